"""The noise on CUDA tensors, compiled by triton: one launch moves all tensors of a dtype.

A program takes one chunk, reads its weights once, adds every term and writes them back. The operations are those of the
reference, one by one, with fused multiply-add disabled. Set TRITON_INTERPRET=1 to run it on CPU tensors.
"""

# Compiled functions have no annotations.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, disable-error-code="untyped-decorator"

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl

from forwardtune.noise import distributions as D
from forwardtune.noise.backends import chunks, kinds
from forwardtune.noise.backends.arrays import Terms
from forwardtune.noise.backends.chunks import Chunks
from forwardtune.noise.backends.kinds import KINDS
from forwardtune.noise.types import Key, Move, Slot

RADEMACHER, UNIFORM = (tl.constexpr(kind) for kind in (kinds.RADEMACHER, kinds.UNIFORM))
COLUMNS = tl.constexpr(len(chunks.COLUMNS))
ADDRESS, COUNT, START = (tl.constexpr(column) for column in (chunks.ADDRESS, chunks.COUNT, chunks.START))
PARAMETER, GROUP, LAYOUT = (tl.constexpr(column) for column in (chunks.PARAMETER, chunks.GROUP, chunks.LAYOUT))
TYPES = {torch.float32: tl.float32, torch.float64: tl.float64, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

CHUNK = tl.constexpr(D.RADEMACHER_TILE)
LANES, TILE_WORDS, BLOCK = (tl.constexpr(n) for n in (D.LANES, D.TILE_WORDS, D.BLOCK))
LN2, UNIFORM_SCALE, FIXED_POINT = (tl.constexpr(x) for x in (D.LN2, D.UNIFORM_SCALE, D.FIXED_POINT))
HALF_BITS = tl.constexpr(D.SQRT_HALF_BITS)
L0, L1, L2, L3, L4, L5, L6 = (tl.constexpr(c) for c in D.LOG)
S0, S1, S2, S3 = (tl.constexpr(c) for c in D.SIN)
C0, C1, C2, C3 = (tl.constexpr(c) for c in D.COS)

OPTIONS: dict[str, Any] = {"enable_fp_fusion": False, "num_warps": 8}


@triton.jit
def _words(start, tile_size: tl.constexpr, direction, parameter, step, k0, k1):
    """All words of a chunk, as (lane, row); lanes of consecutive tiles follow each other."""
    block = start // tile_size * LANES + tl.arange(0, CHUNK // tile_size * LANES)
    c0 = block.to(tl.uint32)
    c1 = (block >> 32 << 16 | direction).to(tl.uint32)
    c2 = tl.zeros_like(c0) + parameter.to(tl.uint32)
    c3 = tl.zeros_like(c0) + step.to(tl.uint32)
    w0, w1, w2, w3 = tl.philox_impl(c0, c1, c2, c3, k0.to(tl.uint32), k1.to(tl.uint32))
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (CHUNK // tile_size * LANES, 4))


@triton.jit
def _first_elements(tile_size: tl.constexpr, word_elements: tl.constexpr):
    """The index of the first element that each word of a chunk gives, as (lane, row)."""
    lane = tl.arange(0, CHUNK // tile_size * LANES)
    word = (lane % LANES)[:, None] + tl.arange(0, 4)[None, :] * LANES
    return ((lane // LANES * tile_size)[:, None] + word * word_elements).to(tl.int64)


@triton.jit
def _normal(word):
    """The Box-Muller pair of a word."""
    u = (word >> 1 | 1).to(tl.int32).to(tl.float32)
    bits = u.to(tl.int32, bitcast=True) - HALF_BITS
    exponent = ((bits >> 23) - 31).to(tl.float32)
    f = ((bits & 0x7FFFFF) + HALF_BITS).to(tl.float32, bitcast=True) - 1.0
    log = f * ((((((L6 * f + L5) * f + L4) * f + L3) * f + L2) * f + L1) * f + L0)
    radius = tl.sqrt_rn((exponent * LN2 + log) * -2.0)
    x = ((word >> 1 & 0x7FFE) + 1).to(tl.int32).to(tl.float32) * 0.000030517578125
    y = x * x
    cosine = tl.where((word & 1) == 1, -radius, radius) * ((1.0 - y) * (((C3 * y + C2) * y + C1) * y + C0))
    sine = tl.where((word & 2) == 2, -radius, radius) * (x * (((S3 * y + S2) * y + S1) * y + S0))
    return cosine, sine


@triton.jit
def _uniform(word):
    low = ((word << 16).to(tl.int32, bitcast=True) >> 15 | 1).to(tl.float32) * UNIFORM_SCALE
    high = (word.to(tl.int32, bitcast=True) >> 15 | 1).to(tl.float32) * UNIFORM_SCALE
    return low, high


@triton.jit
def _rounding_bits(index, direction, parameter, step, k0, k1):
    """Sixteen bits for each element, by its index."""
    word = index % TILE_WORDS
    block = index // BLOCK * LANES + word % LANES
    c0 = block.to(tl.uint32)
    c1 = (block >> 32 << 16 | direction).to(tl.uint32)
    c2 = tl.zeros_like(c0) + parameter.to(tl.uint32)
    c3 = tl.zeros_like(c0) + step.to(tl.uint32)
    w0, w1, w2, w3 = tl.philox_impl(c0, c1, c2, c3, k0.to(tl.uint32), k1.to(tl.uint32))
    row = word // LANES
    four = tl.where(row < 2, tl.where(row == 0, w0, w1), tl.where(row == 2, w2, w3))
    return tl.where(index % BLOCK >= TILE_WORDS, four >> 16, four & 0xFFFF)


@triton.jit
def _move_term(
    x, noise, back, forth, index, direction, parameter, step, r0, r1, compute: tl.constexpr, stochastic: tl.constexpr
):
    """Both sums of a term."""
    bits = _rounding_bits(index, direction, parameter, step, r0, r1) if stochastic else 0
    if back != 0:
        x = _sum(x, noise.to(compute) * (-back).to(compute), 0xFFFF - bits, compute, stochastic)
    if forth != 0:
        x = _sum(x, noise.to(compute) * forth.to(compute), bits, compute, stochastic)
    return x


@triton.jit
def _sum(x, change, bits, compute: tl.constexpr, stochastic: tl.constexpr):
    total = x.to(compute) + change
    if stochastic:
        return _rounded(total, bits, x.dtype)
    if x.dtype == tl.bfloat16:  # to nearest even by hand: triton's interpreter truncates
        bits = total.to(tl.uint32, bitcast=True)
        bits = tl.where(total == total, bits + 0x7FFF + (bits >> 16 & 1) >> 16, 0x7FC0)
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return total.to(x.dtype)


@triton.jit
def _rounded(total, bits, dtype: tl.constexpr):
    """A float32 sum in 16 bits, rounded up in magnitude where the bits carry."""
    whole = total.to(tl.uint32, bitcast=True)
    magnitude, sign = whole & 0x7FFFFFFF, whole >> 16 & 0x8000
    bits = bits.to(tl.uint32)
    if dtype == tl.bfloat16:
        kept = tl.where(magnitude > 0x7F800000, 0x7FC0, magnitude + bits >> 16)
    else:
        kept = magnitude + (bits >> 3) - 0x38000000 >> 13
        small = tl.where(magnitude < 0x38800000, magnitude, 0x38800000).to(tl.float32, bitcast=True)
        fixed = (small * 1099511627776.0).to(tl.int32).to(tl.uint32)  # subnormal: units of 2^-24, and 16 bits below
        kept = tl.where(magnitude < 0x38800000, fixed + bits >> 16, kept)
        kept = tl.where(magnitude >= 0x47800000, 0x7C00, kept)
        kept = tl.where(magnitude > 0x7F800000, 0x7E00, kept)
    return (kept | sign).to(tl.uint16).to(dtype, bitcast=True)


@triton.jit
def _pointers(address, element, start, shape, strides, dtype: tl.constexpr, dims: tl.constexpr):
    """Pointers to elements of a chunk, by their index in it."""
    if dims == 0:
        return address.to(tl.pointer_type(dtype)) + element
    rest = start + element
    offset = tl.zeros_like(rest)
    for axis in tl.static_range(dims - 1, -1, -1):
        size = tl.load(shape + axis)
        offset += rest % size * tl.load(strides + axis)
        rest = rest // size
    return (address + offset).to(tl.pointer_type(dtype))


@triton.jit
def _load_term(steps, directions, lengths, offsets, groups, term, group, scale):
    """What a term adds in a group, and the key of its noise."""
    length = tl.load(lengths + term)
    back = tl.load(offsets + 2 * term * groups + group) * scale * length
    forth = tl.load(offsets + (2 * term + 1) * groups + group) * scale * length
    return back, forth, tl.load(steps + term), tl.load(directions + term)


@triton.jit(do_not_specialize=["terms", "groups", "k0", "k1", "r0", "r1"])
def _move(
    table, scales, shapes, strides, steps, directions, lengths, offsets, terms, groups, k0, k1, r0, r1,
    kind: tl.constexpr, dtype: tl.constexpr, compute: tl.constexpr, dims: tl.constexpr, stochastic: tl.constexpr,
):  # fmt: skip
    """Moves one chunk along every term."""
    row = table + tl.program_id(0) * COLUMNS
    address, count, start = tl.load(row + ADDRESS), tl.load(row + COUNT), tl.load(row + START)
    parameter, group, layout = tl.load(row + PARAMETER), tl.load(row + GROUP), tl.load(row + LAYOUT)
    shape, stride = shapes + layout * dims, strides + layout * dims
    scale = tl.load(scales + tl.program_id(0))
    if kind == RADEMACHER:
        bit = tl.arange(0, 32)[None, None, :]
        element = _first_elements(CHUNK, 32)[:, :, None] + bit
        pointers = _pointers(address, element, start, shape, stride, dtype, dims)
        x = tl.load(pointers, mask=element < count)
        for term in range(terms):
            back, forth, step, direction = _load_term(steps, directions, lengths, offsets, groups, term, group, scale)
            if back != forth:
                words = _words(start, CHUNK, direction, parameter, step, k0, k1)
                sign = (words[:, :, None] >> bit.to(tl.uint32) & 1).to(tl.int32)
                x = _move_term(
                    x, (1 - 2 * sign).to(tl.float32), back, forth,
                    start + element, direction, parameter, step, r0, r1, compute, stochastic,
                )  # fmt: skip
        tl.store(pointers, x, mask=element < count)
    else:
        first = _first_elements(BLOCK, 1)
        second = first + TILE_WORDS
        pointers1 = _pointers(address, first, start, shape, stride, dtype, dims)
        pointers2 = _pointers(address, second, start, shape, stride, dtype, dims)
        x1 = tl.load(pointers1, mask=first < count)
        x2 = tl.load(pointers2, mask=second < count)
        for term in range(terms):
            back, forth, step, direction = _load_term(steps, directions, lengths, offsets, groups, term, group, scale)
            if back != forth:
                words = _words(start, BLOCK, direction, parameter, step, k0, k1)
                if kind == UNIFORM:
                    noise1, noise2 = _uniform(words)
                else:
                    noise1, noise2 = _normal(words)
                x1 = _move_term(
                    x1, noise1, back, forth,
                    start + first, direction, parameter, step, r0, r1, compute, stochastic,
                )  # fmt: skip
                x2 = _move_term(
                    x2, noise2, back, forth,
                    start + second, direction, parameter, step, r0, r1, compute, stochastic,
                )  # fmt: skip
        tl.store(pointers1, x1, mask=first < count)
        tl.store(pointers2, x2, mask=second < count)


@triton.jit(do_not_specialize=["direction", "step", "k0", "k1"])
def _squares(table, totals, direction, step, k0, k1):
    """The squared length of each chunk's normal noise, in fixed point."""
    row = table + tl.program_id(0) * COLUMNS
    count, start, parameter = tl.load(row + COUNT), tl.load(row + START), tl.load(row + PARAMETER)
    first = _first_elements(BLOCK, 1)
    cosine, sine = _normal(_words(start, BLOCK, direction, parameter, step, k0, k1))
    one = (cosine * cosine * FIXED_POINT + 0.5).to(tl.int32).to(tl.int64)
    two = (sine * sine * FIXED_POINT + 0.5).to(tl.int32).to(tl.int64)
    total = tl.where(first < count, one, 0) + tl.where(first + TILE_WORDS < count, two, 0)
    tl.store(totals + tl.program_id(0), tl.sum(total))


class CudaTriton:
    """Moves CUDA tensors of any layout."""

    name = "triton"

    @staticmethod
    def runs_on(device: torch.device) -> bool:
        return device.type == ("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")

    def __init__(self, slots: Sequence[Slot]) -> None:
        """Sorts the slots into launches: one for each device, dtype and number of strided axes (none if contiguous)."""
        alike: dict[tuple[torch.device, torch.dtype, int], list[Slot]] = {}
        for slot in slots:
            t = slot.tensor
            alike.setdefault((t.device, t.dtype, 0 if t.is_contiguous() else t.dim()), []).append(slot)
        self.launches = [_Launch(*key, members) for key, members in alike.items()]

    def move(self, moves: Sequence[Move]) -> None:
        self.move_terms(moves[0][0], Terms.of(moves))

    def move_terms(self, key: Key, terms: Terms) -> None:
        arrays = [torch.from_numpy(array) for array in terms]
        for launch in self.launches:
            launch.move(key, arrays)

    def squares(self, key: Key, direction: int) -> int:
        return sum(launch.squares(key, direction) for launch in self.launches)


class _Launch:
    """The chunks of one kernel launch, on their device."""

    def __init__(self, device: torch.device, dtype: torch.dtype, dims: int, slots: Sequence[Slot]) -> None:
        self.device, self.dtype, self.dims = device, dtype, dims
        members = Chunks(slots, CHUNK.value)
        self.programs = len(members.table)
        arrays = members.table, members.scales, members.shapes, members.strides
        self.memory = [torch.from_numpy(array).to(device) for array in arrays]

    def move(self, key: Key, terms: Sequence[torch.Tensor]) -> None:
        """Moves along terms, which are the arrays of :class:`Terms` as tensors."""
        if not self.programs:
            return
        compute = tl.float64 if self.dtype == torch.float64 else tl.float32
        with _on(self.device):
            _move[(self.programs,)](
                *self.memory, *(array.to(self.device) for array in terms),
                len(terms[0]), terms[-1].shape[-1], *key.seed_words, *key.rounding.seed_words,
                kind=KINDS[key.distribution], dtype=TYPES[self.dtype], compute=compute, dims=self.dims,
                stochastic=key.stochastic and self.dtype.itemsize == 2, **OPTIONS,
            )  # fmt: skip

    def squares(self, key: Key, direction: int) -> int:
        totals = torch.zeros(self.programs, dtype=torch.int64, device=self.device)
        if self.programs:
            with _on(self.device):
                _squares[(self.programs,)](self.memory[0], totals, direction, key.step, *key.seed_words, **OPTIONS)
        return int(totals.sum())


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Makes a CUDA device current; others need nothing."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
