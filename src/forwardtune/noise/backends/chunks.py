"""The memory of all slots as a table of chunks, which a compiled kernel goes through row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from forwardtune.noise.types import Slot

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
COLUMNS = ("address", "count", "start", "parameter", "group", "dtype", "size", "layout")
"""`start` is the noise index of a chunk's first element, `dtype` an index into DTYPES, `size` an element's bytes. A
chunk of a contiguous tensor has its own address, and layout -1; one of a strided tensor has the tensor's address, and
the row of the tensor's shape and strides (in bytes) as its layout."""
ADDRESS, COUNT, START, PARAMETER, GROUP, DTYPE, SIZE, LAYOUT = range(len(COLUMNS))


class Chunks:
    """A table of chunks of at most `size` elements each, their scales, and shapes and strides of strided tensors."""

    def __init__(self, slots: Sequence[Slot], size: int) -> None:
        rows: list[dict[str, int]] = []
        scales: list[float] = []
        layouts: list[tuple[Sequence[int], Sequence[int]]] = []
        for slot in slots:
            t = slot.tensor
            item, layout = t.element_size(), -1
            if not t.is_contiguous():
                layout = len(layouts)
                layouts.append((t.shape, [stride * item for stride in t.stride()]))
            same = {"parameter": slot.parameter, "group": slot.group, "dtype": DTYPES.index(t.dtype)}
            same |= {"size": item, "layout": layout}
            for start in range(0, t.numel(), size):
                address = t.data_ptr() + (start * item if layout < 0 else 0)
                rows.append({"address": address, "count": min(size, t.numel() - start), "start": start, **same})
                scales.append(slot.scale)
        dims = max((len(shape) for shape, _ in layouts), default=1)
        self.table = np.array([[row[name] for name in COLUMNS] for row in rows], np.int64).reshape(-1, len(COLUMNS))
        self.scales = np.array(scales, np.float64)
        self.shapes = _padded([shape for shape, _ in layouts], dims, 1)
        self.strides = _padded([strides for _, strides in layouts], dims, 0)
        self.elements = int(self.table[:, COUNT].sum())


def _padded(rows: Sequence[Sequence[int]], width: int, filler: int) -> np.ndarray[Any, Any]:
    return np.array([[filler] * (width - len(row)) + list(row) for row in rows], np.int64).reshape(-1, width)
