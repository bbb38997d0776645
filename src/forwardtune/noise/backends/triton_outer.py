"""Sums of outer products on CUDA tensors, compiled by triton: one pass over the weights for all lines of a step."""

# Compiled functions have no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, disable-error-code="untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forwardtune.noise.backends.cuda_triton import OPTIONS, TYPES, _on, _rounding_bits, _sum
from forwardtune.noise.types import Key

BLOCK = tl.constexpr(1024)
"""Weights that a program adds to."""


@triton.jit(do_not_specialize=["count", "width", "height", "lines", "parameter", "step", "r0", "r1"])
def _add_outer(
    weights, rows, columns, offsets, count, width, height, lines, parameter, step, r0, r1,
    compute: tl.constexpr, stochastic: tl.constexpr, undone: tl.constexpr,
):  # fmt: skip
    """The lines are summed in order, and the sum is added and rounded once."""
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = element < count
    i, j = element // width, element % width
    total = tl.zeros((BLOCK,), dtype=compute)
    for line in range(lines):
        c = tl.load(offsets + line) * tl.load(rows + line * height + i, mask=mask)
        total += c * tl.load(columns + line * width + j, mask=mask)
    x = tl.load(weights + element, mask=mask)
    bits = _rounding_bits(element, 0, parameter, step, r0, r1) if stochastic else 0
    tl.store(weights + element, _sum(x, total, 0xFFFF - bits if undone else bits, compute, stochastic), mask=mask)


def add_outer(
    tensor: Tensor, rows: Tensor, columns: Tensor, offsets: Tensor, key: Key, parameter: int, *, undone: bool
) -> None:
    """Adds `sum_j offsets[j] rows[j] columns[j]^T` to a contiguous tensor, in place."""
    compute = torch.promote_types(tensor.dtype, torch.float32)
    factors = [x.to(tensor.device, compute).contiguous() for x in (rows, columns, offsets)]
    n = tensor.numel()
    with _on(tensor.device):
        _add_outer[(triton.cdiv(n, BLOCK.value),)](
            tensor, *factors, n, columns.shape[1], rows.shape[1], len(offsets),
            parameter, key.step, *key.rounding.seed_words,
            compute=TYPES[compute], stochastic=key.stochastic and tensor.element_size() == 2, undone=undone, **OPTIONS,
        )  # fmt: skip
