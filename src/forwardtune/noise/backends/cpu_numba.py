"""The noise at memory speed on CPU tensors, compiled by numba.

One call moves the whole model: a table lists chunks of tensors (address, dtype, index in the noise), threads share the
chunks, and each chunk is moved in tiles of at most 8,192 elements: Philox words, noise, sums, all in L1. A tile makes
all moves before the next one is touched, so many steps cost one pass over memory, as one does.

Threads come from an ordinary pool, and the kernel runs without the interpreter's lock: there is no threading layer that
cannot be forked or re-entered, and the thread count can change from call to call without changing a result.
"""

# Compiled functions have no annotations, and numba's own are incomplete.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="attr-defined,call-arg"

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import carray

from forwardtune.errors import BackendError
from forwardtune.noise import distributions as D
from forwardtune.noise.backends import reference
from forwardtune.noise.backends.arrays import Terms
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
    add_rademacher,
    add_rounded,
    add_twice_f32,
    exchange,
    f32,
    f64,
    fill,
    i32,
    i64,
    jit,
    multiply,
    normal,
    philox,
    pointer,
    round_keys,
    rounding_bits,
    u32,
    u64,
)
from forwardtune.noise.types import Key, Move, Slot, Term

CHUNK = 8 * D.RADEMACHER_TILE
"""Elements that one thread moves at a time; 256 KiB of float32."""
PARALLEL_FROM = 4 * CHUNK
"""Models of fewer elements are moved by the calling thread alone: waking others costs more."""
FUSED = 5
"""Sums made in a register: those of a two-point step, replayed, which moves forth, back and forth, back and forth."""


@jit
def _add_all(address, dtype, count, noise, sums):
    """All sums along a direction, on elements that stay in the cache."""
    if dtype == F32 and sums.size == FUSED:
        x = carray(pointer(address, f32), (count,))
        add_five_f32(x, noise, f32(sums[0]), f32(sums[1]), f32(sums[2]), f32(sums[3]), f32(sums[4]))
    elif dtype == F32 and sums.size == 2:
        add_twice_f32(carray(pointer(address, f32), (count,)), noise, f32(sums[0]), f32(sums[1]))
    else:
        for offset in sums:
            add(address, dtype, count, noise, offset)


@jit
def _no_zeros(offsets):
    """Whether no offset becomes zero in float32."""
    zeros = 0
    for offset in offsets:
        zeros += f32(offset) == 0
    return zeros == 0


@jit
def _collect(sums, undoes, group, scale, lengths, offsets, first, last):
    """Writes what terms `first` to `last` add, one after the other, padded with -0.0; returns how many sums that is.

    `undoes` has whether a sum goes back.
    """
    count = 0
    for term in range(first, last):
        back = offsets[term, 0, group] * scale * lengths[term]
        forth = offsets[term, 1, group] * scale * lengths[term]
        for undone, offset in ((True, -back), (False, forth)):
            if back != forth and offset != 0.0:
                sums[count], undoes[count] = offset, undone
                count += 1
    sums[count : count + FUSED] = -0.0
    return count


@jit
def _round_all(address, dtype, count, noise, sums, undoes, words):
    """As `_add_all`, on elements of 16 bits, with the words that decide how sums are rounded."""
    bits, change = np.empty(D.BLOCK, u32), np.empty(count, f32)
    for i in range(sums.size):
        rounding_bits(bits, words, u32(0xFFFF) if undoes[i] else u32(0))
        multiply(change, noise, f32(sums[i]))
        add_rounded(address, dtype, count, change, bits)


@jit
def _move(table, scales, shapes, strides, first, last, kind, keys, rounding, steps, directions, lengths, offsets):
    """Makes all moves on one tile after the other, in chunks `first` to `last`.

    The last four arguments have the terms of all moves; `offsets` has one (back, forth) per term and group. `rounding`
    are the keys of stochastic rounding, and empty if sums are rounded to nearest.
    """
    words = np.empty(D.TILE_WORDS, u32)
    deciding = np.empty(D.TILE_WORDS, u32)
    undoes = np.empty(2 * steps.size + FUSED, np.bool_)
    noise = np.empty(D.BLOCK, f32)
    packed = np.empty(D.RADEMACHER_TILE, f64)
    sums = np.empty(2 * steps.size + FUSED, f64)
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
            term = 0
            while term < steps.size:
                step, direction, before = steps[term], directions[term], term
                while term < steps.size and steps[term] == step and directions[term] == direction:
                    term += 1
                several = _collect(sums, undoes, group, scales[c], lengths, offsets, before, term)
                if several == 0:
                    continue
                block = u64((start + low) // tile * D.LANES)
                philox(words, block, u64(direction), u64(parameter), u64(step), keys)
                done = 0
                if kind == RADEMACHER and dtype == F32 and _no_zeros(sums[:several]):
                    done = n // 32 * 32
                    for i in range(0, several, FUSED):
                        add_rademacher(u64(target), words[: n // 32], sums[i : i + FUSED], several - i)
                while done < n:
                    word, within = done // D.BLOCK * block_words, done % D.BLOCK
                    m = min(D.BLOCK - within, n - done)
                    fill(noise, words[word : word + block_words], kind)
                    if size == 2 and rounding.size:
                        own = u64((start + low + done) // D.BLOCK * D.LANES)
                        philox(deciding, own, u64(direction), u64(parameter), u64(step), rounding)
                        _round_all(target + done * size, dtype, m, noise, sums[:several], undoes, deciding)
                    else:
                        _add_all(target + done * size, dtype, m, noise[within : within + m], sums[:several])
                    done += m
            if layout >= 0:
                exchange(address, target, dtype, n, start + low, shapes[layout], strides[layout], True)


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


def share(work: Callable[[int, int], Any], n: int, parts: int) -> list[Any]:
    """Runs `work` over parts of a range in threads. All have ended when it returns, or raises on a signal."""
    bounds = [n * i // parts for i in range(parts + 1)]
    pool = _pool(os.getpid(), torch.get_num_threads())
    futures = [pool.submit(work, low, high) for low, high in pairwise(bounds)]
    try:
        return [future.result() for future in futures]
    finally:
        wait(futures)


@cache
def _self_test() -> None:
    """Compares small tensors with the reference: code that another version compiled and cached must not run."""
    for name in D.DISTRIBUTIONS:
        ours, theirs = ([torch.ones(700, dtype=dtype) for dtype in DTYPES] for _ in range(2))
        slots = [[Slot(tensor, number, 0, 0.75) for number, tensor in enumerate(part)] for part in (ours, theirs)]
        fast, slow = CpuNumba(slots[0], tested=True), reference.Reference(slots[1])
        key = Key(1, 2, name, stochastic=True)
        for backend in (fast, slow):
            backend.move([(key, [Term(3, [0.1], [0.2])])])
            nearest = key._replace(stochastic=False)
            backend.move([(nearest, [Term(1, [0.0], [0.1]), Term(1, [0.1], [0.3]), Term(1, [0.3], [0.2])])])
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

    def move(self, moves: Sequence[Move]) -> None:
        self.move_terms(moves[0][0], Terms.of(moves))

    def move_terms(self, key: Key, terms: Terms) -> None:
        c = self.chunks
        place = c.table, c.scales, c.shapes, c.strides
        kind, keys = KINDS[key.distribution], round_keys(key.seed)
        rounding = round_keys(key.rounding.seed)[: None if key.stochastic else 0]
        self._share(
            lambda first, last: _move(*place, first, last, kind, keys, rounding, *terms),
            len(terms.steps),
        )

    def squares(self, key: Key, direction: int) -> int:
        step, keys, number = u64(key.step), round_keys(key.seed), u64(direction)
        return sum(self._share(lambda first, last: _squares(self.chunks.table, first, last, step, keys, number)))

    def _share(self, work: Callable[[int, int], Any], passes: int = 1) -> list[Any]:
        """Runs `work` over ranges of the chunks; of many, several per thread, so that a slow one delays no other."""
        n, threads = len(self.chunks.table), torch.get_num_threads()
        if threads == 1 or self.chunks.elements * passes < PARALLEL_FROM:
            return [work(0, n)]
        return share(work, n, max(threads, min(8 * threads, n // 16)))
