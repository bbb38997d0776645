"""Sums of outer products on CPU tensors, compiled by numba: one pass over the weights for all lines of a step."""

# Compiled functions have no annotations, and numba's own are incomplete.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import os

import numpy as np
import torch
from torch import Tensor

from forwardtune.noise.backends.cpu_numba import PARALLEL_FROM, _pool
from forwardtune.noise.backends.numba_pieces import jit


@jit
def _add(weights, rows, columns, offsets, first, last):
    """Rows `first` to `last`: the lines are summed in order, and the sum is added and rounded once."""
    total = np.empty(weights.shape[1], weights.dtype)
    for i in range(first, last):
        total[:] = 0
        for line in range(offsets.size):
            c = offsets[line] * rows[line, i]
            own = columns[line]
            for j in range(total.size):
                total[j] += c * own[j]
        weights[i] += total


def add_outer(tensor: Tensor, rows: Tensor, columns: Tensor, offsets: Tensor) -> None:
    """Adds `sum_j offsets[j] rows[j] columns[j]^T` to a contiguous tensor, in place."""
    n = rows.shape[1]
    weights = tensor.detach().view(n, -1).numpy()
    factors = [np.ascontiguousarray(x.numpy(), weights.dtype) for x in (rows, columns, offsets)]
    threads = torch.get_num_threads()
    if threads == 1 or n < threads or tensor.numel() * len(rows) < PARALLEL_FROM:
        _add(weights, *factors, 0, n)
        return
    bounds = [n * i // (4 * threads) for i in range(4 * threads + 1)]
    list(_pool(os.getpid(), threads).map(lambda low, high: _add(weights, *factors, low, high), bounds[:-1], bounds[1:]))
