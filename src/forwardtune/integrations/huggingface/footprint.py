"""What will be tuned, and the memory it takes."""

from __future__ import annotations

import re
from dataclasses import dataclass

import psutil  # type: ignore[import-untyped]  # comes with accelerate
import torch
from torch import Tensor, nn

from forwardtune.errors import InvalidArgumentError
from forwardtune.packed import count_weights, parts_of, scales_in


@dataclass(frozen=True)
class Footprint:
    """Numbers of weights, and bytes.

    tuned, total: the weights that are tuned, and all weights, also packed ones.
    memory: bytes of all weights, scales and buffers, which is what tuning needs in addition to one forward pass.
    adamw: bytes that backpropagation with AdamW would need on top, not counting stored activations: a gradient and two
        moments for every tuned weight.
    names: the tuned parameters, with the same parameter of all layers listed once.
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
            f"needs {size(self.memory)} for the weights, plus one forward pass; with AdamW another "
            f"{size(self.adamw)}, and the activations of all layers"
        )


def footprint(model: nn.Module) -> Footprint:
    """The footprint of a model, with or without adapters.

    >>> print(footprint(nn.Linear(1000, 10)))
    tunes 10,010 of 10,010 weights (100.00%): weight, bias
    needs 40 kB for the weights, plus one forward pass; with AdamW another 120 kB, and the activations of all layers
    """
    params = dict(model.named_parameters())
    tuned = {name: p for name, p in params.items() if p.requires_grad}
    every = (*params.values(), *model.buffers(), *scales_in(model).values())
    held = {_storage(part): part for tensor in every for part in parts_of(tensor)}
    return Footprint(
        tuned=sum(p.numel() for p in tuned.values()),
        total=sum(count_weights(p) for p in params.values()),
        memory=sum(tensor.untyped_storage().nbytes() for tensor in held.values()),
        adamw=sum(3 * p.nbytes for p in tuned.values()),
        names=tuple(dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in tuned)),
    )


def check_fits(needed: int, what: str, device: torch.device) -> None:
    """Refuses what needs more memory than is free."""
    free = available(device)
    if needed > free:
        raise InvalidArgumentError(
            f"{what} needs {size(needed)} for its weights alone, and {size(free)} are free on {device.type}; choose a "
            "smaller model, load it in bfloat16, or free some memory"
        )


def available(device: torch.device) -> int:
    """Bytes that are free on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def size(count: float) -> str:
    """A number of bytes, for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _storage(tensor: Tensor) -> object:
    """The same for tensors that share memory."""
    return tensor.device, tensor.untyped_storage().data_ptr() or id(tensor)
