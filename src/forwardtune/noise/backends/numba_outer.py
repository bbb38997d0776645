"""Sums of outer products on CPU tensors, compiled by numba: one pass over the weights for all lines of a step."""

# Compiled functions have no annotations, and numba's own are incomplete.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="attr-defined,call-arg,operator"

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from forwardtune.noise import distributions as D
from forwardtune.noise.backends.chunks import DTYPES
from forwardtune.noise.backends.cpu_numba import PARALLEL_FROM, share
from forwardtune.noise.backends.numba_pieces import (
    add,
    add_rounded,
    f32,
    i64,
    jit,
    philox,
    round_keys,
    rounding_bits,
    u32,
    u64,
)
from forwardtune.noise.types import Key


@jit
def _sum(total, row, rows, columns, offsets):
    """What all lines add to a row, in order."""
    total[:] = 0
    for line in range(offsets.size):
        c = offsets[line] * rows[line, row]
        own = columns[line]
        for j in range(total.size):
            total[j] += c * own[j]


@jit
def _add(weights, rows, columns, offsets, first, last):
    """Rows `first` to `last`: the lines are summed in order, and the sum is added and rounded once."""
    total = np.empty(weights.shape[1], weights.dtype)
    for i in range(first, last):
        _sum(total, i, rows, columns, offsets)
        weights[i] += total


@jit
def _add_16(address, dtype, rows, columns, offsets, keys, parameter, step, flip, first, last):
    """As `_add`, on weights of 16 bits; without keys sums are rounded to nearest."""
    total = np.empty(columns.shape[1], f32)
    words, bits, known = np.empty(D.TILE_WORDS, u32), np.empty(D.BLOCK, u32), i64(-1)
    for i in range(first, last):
        _sum(total, i, rows, columns, offsets)
        j = 0
        while j < total.size:
            element = i64(i) * total.size + j
            tile, within = element // D.BLOCK, element % D.BLOCK
            count = min(D.BLOCK - within, total.size - j)
            if keys.size == 0:
                add(address + 2 * element, dtype, count, total[j : j + count], 1.0)
            else:
                if tile != known:
                    philox(words, u64(tile * D.LANES), u64(0), u64(parameter), u64(step), keys)
                    rounding_bits(bits, words, flip)
                    known = tile
                add_rounded(address + 2 * element, dtype, count, total[j : j + count], bits[within : within + count])
            j += count


def add_outer(
    tensor: Tensor, rows: Tensor, columns: Tensor, offsets: Tensor, key: Key, parameter: int, *, undone: bool
) -> None:
    """Adds `sum_j offsets[j] rows[j] columns[j]^T` to a contiguous tensor, in place."""
    n, weights = rows.shape[1], tensor.detach()
    compute = np.float64 if tensor.dtype == torch.float64 else np.float32
    factors = [np.ascontiguousarray(x.numpy(), compute) for x in (rows, columns, offsets)]
    if tensor.element_size() == 2:
        keys = round_keys(key.rounding.seed)[: None if key.stochastic else 0]
        flip = u32(0xFFFF if undone else 0)
        place = weights.data_ptr(), DTYPES.index(tensor.dtype)

        def work(low: int, high: int) -> None:
            _add_16(*place, *factors, keys, parameter, key.step, flip, low, high)
    else:
        matrix = weights.view(n, -1).numpy()

        def work(low: int, high: int) -> None:
            _add(matrix, *factors, low, high)

    threads = torch.get_num_threads()
    if threads == 1 or n < threads or tensor.numel() * len(rows) < PARALLEL_FROM:
        work(0, n)
        return
    share(work, n, 4 * threads)
