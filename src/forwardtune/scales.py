"""Units of the weights' own size: every tensor is probed and moved in proportion to it.

The direction is `D s`, with `D` one number per tensor. With ``scale="absolute"`` it is 1, as in the paper. With
``scale="relative"`` it is the tensor's root mean square at the start of the run, so that an offset of 0.01 changes
every weight by one per cent of the size that is usual in its tensor. Layers differ in the size of their weights, and
what changes a large one imperceptibly wrecks a small one; in relative units one rate fits them all, and rates lie close
together on different models.

A tensor of zeros has no size of its own. A matrix (LoRA's B, a new head) takes the size that it would usually have at
random, one over the root of the fan-in; a vector (biases, gates) takes the median of the tensors tuned with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Literal, get_args

import torch
from torch import Tensor

from forwardtune.errors import InvalidArgumentError
from forwardtune.noise.backends.reference import pieces

Scale = Literal["relative", "absolute"]
SCALES: tuple[Scale, ...] = get_args(Scale)

SMALLEST = 1e-3
"""Of the median: a tensor that is nearly zero would otherwise never move."""


def relative_scales(tensors: Sequence[Tensor]) -> list[float]:
    """One number for each of the tensors that are tuned together.

    >>> relative_scales([torch.full((2, 2), 0.5), torch.zeros(3), torch.full((4,), 2.0)])
    [0.5, 1.25, 2.0]
    >>> relative_scales([torch.full((8, 5), 0.125), torch.zeros(20, 4), torch.zeros(20)])
    [0.125, 0.5, 0.125]
    """
    sizes = [root_mean_square(tensor) for tensor in tensors]
    for size, tensor in zip(sizes, tensors, strict=True):
        if not math.isfinite(size):
            raise InvalidArgumentError(
                f"a parameter of shape {tuple(tensor.shape)} has weights that are not finite, or too large to be "
                'measured; mend them, or choose scale="absolute" and an lr'
            )
    known = [size for size in sizes if size > 0]
    usual = median(known) if known else 0.0
    return [
        _coarse(max(size, SMALLEST * usual) if size else _size_of_zeros(tensor, usual))
        for size, tensor in zip(sizes, tensors, strict=True)
    ]


def _size_of_zeros(tensor: Tensor, usual: float) -> float:
    if tensor.ndim > 1 and tensor.numel():
        return 1 / math.sqrt(tensor[0].numel())
    return usual or 1 / math.sqrt(max(1, tensor.numel()))


@torch.no_grad()
def root_mean_square(tensor: Tensor) -> float:
    """In double precision, without a copy of the tensor."""
    if not tensor.numel():
        return 0.0
    squares = [piece.detach().to(torch.float64).square().sum() for piece, _ in pieces(tensor)]
    return math.sqrt(float(torch.stack(squares).sum()) / tensor.numel())


def _coarse(scale: float) -> float:
    """Rounded to eight bits, so that it does not depend on the order in which squares were summed."""
    mantissa, exponent = math.frexp(scale)
    return math.ldexp(round(mantissa * 256) / 256, exponent)
