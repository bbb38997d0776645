"""The noise at memory speed on CPU tensors, compiled by numba.

One call moves the whole model: a table lists chunks of tensors (address, dtype, index in the noise), threads share the
chunks, and each chunk is moved in blocks of 512 elements: Philox words, noise, sums, all in L1. A chunk stays in L2
while all terms are added to it, so several directions cost one pass over memory. A chain of many steps goes further:
a tile that fits in L1 makes all moves before the next tile is touched.

Threads come from an ordinary pool, and the kernel runs without the interpreter's lock: there is no threading layer that
cannot be forked or re-entered, and the thread count can change from call to call without changing a result.
"""

# Compiled functions have no annotations, and numba's own are incomplete.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="attr-defined,call-arg"

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import carray

from forwardtune.errors import BackendError
from forwardtune.noise import distributions as D
from forwardtune.noise.backends import reference
from forwardtune.noise.backends.chunks import (
    ADDRESS,
    COUNT,
    DTYPE,
    DTYPES,
    GROUP,
    LAYOUT,
    PARAMETER,
    SIZE,
    START,
    Chunks,
)
from forwardtune.noise.backends.kinds import KINDS, RADEMACHER
from forwardtune.noise.backends.numba_pieces import (
    F32,
    add,
    add_five_f32,
    add_five_rademacher,
    add_rademacher,
    add_twice_f32,
    exchange,
    f32,
    f64,
    fill,
    i32,
    i64,
    jit,
    normal,
    philox,
    pointer,
    round_keys,
    u32,
    u64,
)
from forwardtune.noise.types import Key, Move, Slot, Term

CHUNK = 8 * D.RADEMACHER_TILE
"""Elements that one thread moves at a time; 256 KiB of float32."""
PARALLEL_FROM = 4 * CHUNK
"""Models of fewer elements are moved by the calling thread alone: waking others costs more."""
FUSED = 5
"""Sums that a chain makes in a register: a two-point step moves forth, back and forth, back and forth."""


@jit
def _move_term(address, dtype, count, noise, back, forth):
    """Both sums of a term, on elements that stay in the cache."""
    if dtype == F32 and back != 0.0 and forth != 0.0:
        add_twice_f32(carray(pointer(address, f32), (count,)), noise, f32(-back), f32(forth))
        return
    if back != 0.0:
        add(address, dtype, count, noise, -back)
    if forth != 0.0:
        add(address, dtype, count, noise, forth)


@jit
def _move(table, shapes, strides, first, last, kind, step, keys, directions, offsets):
    """Moves chunks `first` to `last` along every term; `offsets` has one (back, forth) per term and group."""
    tile = np.empty(D.TILE_WORDS, u32)
    noise = np.empty(D.BLOCK, f32)
    packed = np.empty(D.BLOCK, f64)
    block_words = D.BLOCK // 32 if kind == RADEMACHER else D.TILE_WORDS
    for c in range(first, last):
        row = table[c]
        address, count, start, parameter = row[ADDRESS], row[COUNT], row[START], row[PARAMETER]
        group, dtype, size, layout = row[GROUP], row[DTYPE], row[SIZE], row[LAYOUT]
        for term in range(directions.size):
            back, forth = offsets[term, 0, group], offsets[term, 1, group]
            if back == forth:
                continue
            for low in range(0, count, D.BLOCK):
                n = min(D.BLOCK, count - low)
                number = (start + low) // D.BLOCK * block_words
                word = number % D.TILE_WORDS
                if word == 0:
                    philox(tile, u64(number // 4), directions[term], u64(parameter), step, keys)
                words = tile[word : word + block_words]
                if kind == RADEMACHER and dtype == F32 and n == D.BLOCK and layout < 0:
                    x = carray(pointer(address + low * size, f32), (n,))
                    if back != 0.0:
                        add_rademacher(x, words, -back)
                    if forth != 0.0:
                        add_rademacher(x, words, forth)
                    continue
                fill(noise, words, kind)
                if layout < 0:
                    _move_term(address + low * size, dtype, n, noise, back, forth)
                else:
                    shape, stride = shapes[layout], strides[layout]
                    exchange(address, packed.ctypes.data, dtype, n, start + low, shape, stride, False)
                    _move_term(packed.ctypes.data, dtype, n, noise, back, forth)
                    exchange(address, packed.ctypes.data, dtype, n, start + low, shape, stride, True)


@jit
def _add_all(address, dtype, count, noise, offsets, sums):
    """All sums along a direction, on elements that stay in the cache."""
    if dtype == F32 and sums == FUSED:
        x = carray(pointer(address, f32), (count,))
        c0, c1, c2, c3, c4 = f32(offsets[0]), f32(offsets[1]), f32(offsets[2]), f32(offsets[3]), f32(offsets[4])
        add_five_f32(x, noise, c0, c1, c2, c3, c4)
        return
    for i in range(sums):
        add(address, dtype, count, noise, offsets[i])


@jit
def _no_zeros(offsets):
    """Whether no offset becomes zero in float32."""
    zeros = 0
    for offset in offsets:
        zeros += f32(offset) == 0
    return zeros == 0


@jit
def _chain(table, shapes, strides, first, last, kind, keys, steps, directions, offsets, sums):
    """Makes all moves on one tile after the other; the last four arguments are those of `_terms_by_direction`."""
    words = np.empty(D.TILE_WORDS, u32)
    noise = np.empty(D.BLOCK, f32)
    packed = np.empty(D.RADEMACHER_TILE, f64)
    tile = D.RADEMACHER_TILE if kind == RADEMACHER else D.BLOCK
    block_words = D.BLOCK // 32 if kind == RADEMACHER else D.TILE_WORDS
    for c in range(first, last):
        row = table[c]
        address, count, start, parameter = row[ADDRESS], row[COUNT], row[START], row[PARAMETER]
        group, dtype, size, layout = row[GROUP], row[DTYPE], row[SIZE], row[LAYOUT]
        for low in range(0, count, tile):
            n = min(tile, count - low)
            target = i64(address + low * size)
            if layout >= 0:
                target = i64(packed.ctypes.data)
                exchange(address, target, dtype, n, start + low, shapes[layout], strides[layout], False)
            for r in range(steps.size):
                if sums[r, group] == 0:
                    continue
                philox(words, u64((start + low) // tile * D.LANES), directions[r], u64(parameter), steps[r], keys)
                done = 0
                if kind == RADEMACHER and dtype == F32 and _no_zeros(offsets[r, group, : sums[r, group]]):
                    done = n // 32 * 32
                    for i in range(0, sums[r, group], FUSED):
                        add_five_rademacher(u64(target), words[: n // 32], offsets[r, group, i : i + FUSED])
                while done < n:
                    block, within = done // D.BLOCK, done % D.BLOCK
                    m = min(D.BLOCK - within, n - done)
                    fill(noise, words[block * block_words : (block + 1) * block_words], kind)
                    rest = noise[within : within + m]
                    _add_all(target + done * size, dtype, m, rest, offsets[r, group], sums[r, group])
                    done += m
            if layout >= 0:
                exchange(address, target, dtype, n, start + low, shapes[layout], strides[layout], True)


def _terms_by_direction(moves: Sequence[Move]) -> tuple[Any, ...]:
    """Consecutive terms along one direction joined, as arrays: steps, directions, offsets to add, and how many.

    Each group has its own offsets, padded with -0.0.
    """
    keys: list[tuple[int, int]] = []
    rows: list[list[list[float]]] = []
    for key, terms in moves:
        for term in terms:
            if not keys or keys[-1] != (key.step, term.direction):
                keys.append((key.step, term.direction))
                rows.append([[] for _ in term.back])
            for group, back, forth in zip(rows[-1], term.back, term.forth, strict=True):
                if back != forth:
                    group += [offset for offset in (-back, forth) if offset]
    sums = np.array([[len(group) for group in row] for row in rows], i64)
    width = -(-int(sums.max()) // FUSED) * FUSED
    offsets = np.array([[group + [-0.0] * (width - len(group)) for group in row] for row in rows], f64)
    steps, directions = np.array(keys, u64).T.copy()
    return steps, directions, offsets, sums


@jit
def _square_sum(noise):
    total = i32(0)
    for j in range(u64(noise.size)):
        total = i32(total + i32(noise[j] * noise[j] * f32(D.FIXED_POINT) + f32(0.5)))
    return total


@jit
def _squares(table, first, last, step, keys, direction):
    """The squared length of the normal noise of chunks `first` to `last`, in fixed point."""
    words = np.empty(D.TILE_WORDS, u32)
    noise = np.empty(D.BLOCK, f32)
    total = i64(0)
    for c in range(first, last):
        count, start, parameter = table[c, COUNT], table[c, START], table[c, PARAMETER]
        for low in range(0, count, D.BLOCK):
            tile = (start + low) // D.BLOCK
            philox(words, u64(tile * D.LANES), direction, u64(parameter), step, keys)
            normal(noise, words)
            total += i64(_square_sum(noise[: min(D.BLOCK, count - low)]))
    return total


@cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """One pool per process (threads do not survive a fork) and thread count."""
    return ThreadPoolExecutor(threads, thread_name_prefix="forwardtune")


@cache
def _self_test() -> None:
    """Compares small tensors with the reference: code that another version compiled and cached must not run."""
    for name in D.DISTRIBUTIONS:
        ours, theirs = ([torch.ones(700, dtype=dtype) for dtype in DTYPES] for _ in range(2))
        slots = [[Slot(tensor, number, 0) for number, tensor in enumerate(part)] for part in (ours, theirs)]
        fast, slow = CpuNumba(slots[0], tested=True), reference.Reference(slots[1])
        key = Key(1, 2, name)
        for backend in (fast, slow):
            backend.move(key, [Term(3, [0.1], [0.2])])
            backend.chain([(key, [Term(1, [0.0], [0.1]), Term(1, [0.1], [0.3]), Term(1, [0.3], [0.2])])])
        same = fast.squares(key, 3) == slow.squares(key, 3) if name == "sphere" else True
        if not same or not all(map(torch.equal, ours, theirs)):
            raise BackendError(
                f"the compiled {name} noise differs from the reference; numba's cache may be out of date: "
                f"delete {Path(__file__).with_name('__pycache__')} (or NUMBA_CACHE_DIR) and try again"
            )


class CpuNumba:
    """Moves CPU tensors of any layout, with as many threads as torch uses."""

    name = "numba"

    @staticmethod
    def runs_on(device: torch.device) -> bool:
        return device.type == "cpu"

    def __init__(self, slots: Sequence[Slot], *, tested: bool = False) -> None:
        if not tested:
            _self_test()
        self.chunks = Chunks(slots, CHUNK)

    def move(self, key: Key, terms: Sequence[Term]) -> None:
        directions = np.array([term.direction for term in terms], u64)
        offsets = np.array([(term.back, term.forth) for term in terms], f64)
        kind, step, keys = KINDS[key.distribution], u64(key.step), round_keys(key.seed)
        c = self.chunks
        self._share(
            lambda first, last: _move(c.table, c.shapes, c.strides, first, last, kind, step, keys, directions, offsets)
        )

    def chain(self, moves: Sequence[Move]) -> None:
        rows = _terms_by_direction(moves)
        key, c = moves[0][0], self.chunks
        kind, keys = KINDS[key.distribution], round_keys(key.seed)
        self._share(
            lambda first, last: _chain(c.table, c.shapes, c.strides, first, last, kind, keys, *rows), len(rows[0])
        )

    def squares(self, key: Key, direction: int) -> int:
        step, keys, number = u64(key.step), round_keys(key.seed), u64(direction)
        return sum(self._share(lambda first, last: _squares(self.chunks.table, first, last, step, keys, number)))

    def _share(self, work: Callable[[int, int], Any], passes: int = 1) -> list[Any]:
        """Runs `work` over ranges of the chunks; of many, several per thread, so that a slow one delays no other."""
        n, threads = len(self.chunks.table), torch.get_num_threads()
        if threads == 1 or self.chunks.elements * passes < PARALLEL_FROM:
            return [work(0, n)]
        parts = max(threads, min(8 * threads, n // 16))
        bounds = [n * i // parts for i in range(parts + 1)]
        return list(_pool(os.getpid(), threads).map(work, bounds[:-1], bounds[1:]))
