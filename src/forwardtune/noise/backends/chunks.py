"""A plan: the memory of all slots as a flat list of chunks that a compiled kernel can walk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from forwardtune.noise.types import Slot

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
COLUMNS = ("address", "count", "start", "parameter", "group", "dtype", "size", "layout")
"""`start` is the noise index of a chunk's first element. A chunk of a contiguous tensor has its own address and layout
-1; one of a strided tensor has the tensor's address and the row of its shape and strides (in bytes)."""


class Plan:
    """Chunks of at most `size` elements each, and the layouts of strided tensors."""

    def __init__(self, slots: Sequence[Slot], size: int) -> None:
        rows: list[tuple[int, ...]] = []
        layouts: list[tuple[Sequence[int], Sequence[int]]] = []
        for slot in slots:
            t = slot.tensor
            item, layout = t.element_size(), -1
            if not t.is_contiguous():
                layout = len(layouts)
                layouts.append((t.shape, [stride * item for stride in t.stride()]))
            for start in range(0, t.numel(), size):
                address = t.data_ptr() + (start * item if layout < 0 else 0)
                count = min(size, t.numel() - start)
                rows.append((address, count, start, slot.parameter, slot.group, DTYPES.index(t.dtype), item, layout))
        dims = max((len(shape) for shape, _ in layouts), default=1)
        self.chunks = np.array(rows, np.int64).reshape(-1, len(COLUMNS))
        self.shapes = _padded([shape for shape, _ in layouts], dims, 1)
        self.strides = _padded([strides for _, strides in layouts], dims, 0)
        self.elements = int(self.chunks[:, 1].sum())


def _padded(rows: Sequence[Sequence[int]], width: int, filler: int) -> np.ndarray[Any, Any]:
    return np.array([[filler] * (width - len(row)) + list(row) for row in rows], np.int64).reshape(-1, width)
