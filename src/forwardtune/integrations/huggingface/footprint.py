"""What will be tuned, and the memory that it takes."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from forwardtune.errors import InvalidArgumentError


@dataclass(frozen=True)
class Footprint:
    """Numbers of weights, and bytes.

    tuned, total: weights that will move, and all.
    memory: bytes of all weights and buffers, which is what tuning needs beside one forward pass.
    adamw: bytes that backpropagation with AdamW would need beside them, not counting kept activations: for every tuned
        weight a gradient and two moments.
    names: the tuned parameters, layers that are alike taken together.
    """

    tuned: int
    total: int
    memory: int
    adamw: int
    names: tuple[str, ...]

    def __str__(self) -> str:
        shown = ", ".join(self.names[:6]) + (f" and {len(self.names) - 6} more" if len(self.names) > 6 else "")
        return (
            f"tunes {self.tuned:,} of {self.total:,} weights ({self.tuned / max(1, self.total):.2%}): {shown}\n"
            f"needs {size(self.memory)} for the weights and one forward pass; with AdamW another "
            f"{size(self.adamw)}, and the activations of all layers"
        )


def footprint(model: nn.Module) -> Footprint:
    """Of a model with or without adapters.

    >>> print(footprint(nn.Linear(1000, 10)))
    tunes 10,010 of 10,010 weights (100.00%): weight, bias
    needs 40 kB for the weights and one forward pass; with AdamW another 120 kB, and the activations of all layers
    """
    params = dict(model.named_parameters())
    tuned = {name: p for name, p in params.items() if p.requires_grad}
    held = {_place(tensor): tensor for tensor in (*params.values(), *model.buffers())}
    return Footprint(
        tuned=sum(p.numel() for p in tuned.values()),
        total=sum(p.numel() for p in params.values()),
        memory=sum(tensor.untyped_storage().nbytes() for tensor in held.values()),
        adamw=sum(3 * p.nbytes for p in tuned.values()),
        names=tuple(dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in tuned)),
    )


def check_fits(needed: int, what: str, device: torch.device) -> None:
    """Refuses what is larger than the memory that is free."""
    free = available(device)
    if free is not None and needed > free:
        raise InvalidArgumentError(
            f"{what} needs {size(needed)} for its weights alone, and {size(free)} are free on {device.type}; choose a "
            "smaller model, load it in bfloat16, or free some memory"
        )


def available(device: torch.device) -> int | None:
    """Bytes that are free on a device; None where that is not known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        rows = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(rows["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else None


def size(count: float) -> str:
    """Bytes in words."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _place(tensor: Tensor) -> object:
    return tensor.device, tensor.untyped_storage().data_ptr() or id(tensor)
