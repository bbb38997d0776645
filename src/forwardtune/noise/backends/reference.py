"""The noise, spelled out in plain torch operations: the oracle for every other backend, and it runs anywhere.

Each element is computed from its own index alone; nothing is shared between neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from forwardtune.noise import distributions as D
from forwardtune.noise.backends.arrays import Terms
from forwardtune.noise.philox import MASK, philox
from forwardtune.noise.types import Key, Move, Slot, Term

CHUNK = 1 << 18
"""Elements whose noise is held in memory at a time."""


def values(key: Key, direction: int, parameter: int, start: int, stop: int, device: torch.device) -> Tensor:
    """Elements `start` to `stop` of a parameter's noise (the normal noise, for the sphere), as float32."""
    index = torch.arange(start, stop, device=device)
    if key.distribution == "rademacher":
        sign = _word(key, direction, parameter, index // 32) >> index % 32 & 1
        return (1 - 2 * sign).to(torch.float32)
    tile, element = index // D.BLOCK, index % D.BLOCK
    word = _word(key, direction, parameter, tile * D.TILE_WORDS + element % D.TILE_WORDS)
    second = element >= D.TILE_WORDS
    if key.distribution == "uniform":
        half = torch.where(second, word >> 16, word & 0xFFFF)
        signed = half - (half >> 15 << 16)
        return (2 * signed + 1).to(torch.float32) * D.UNIFORM_SCALE
    return _box_muller(word, second)


def rounding_bits(key: Key, direction: int, parameter: int, start: int, stop: int, device: torch.device) -> Tensor:
    """Sixteen bits for each of these elements, as int64."""
    index = torch.arange(start, stop, device=device)
    number = index // D.BLOCK * D.TILE_WORDS + index % D.TILE_WORDS
    word = _word(key.rounding, direction, parameter, number)
    return torch.where(index % D.BLOCK >= D.TILE_WORDS, word >> 16, word & 0xFFFF)


def rounded(total: Tensor, bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Float32 sums as bfloat16 or float16, rounded up in magnitude where sixteen bits are more than what is kept.

    Added to the bits that are lost, they carry into those that are kept.
    """
    whole = total.view(torch.int32).to(torch.int64)
    magnitude, sign = whole & 0x7FFFFFFF, whole >> 16 & 0x8000
    if dtype == torch.bfloat16:
        kept = torch.where(magnitude > 0x7F800000, 0x7FC0, magnitude + bits >> 16)
    else:
        kept = magnitude + (bits >> 3) - 0x38000000 >> 13
        fixed = (total.abs().clamp(max=1.0) * 2.0**40).to(torch.int64)  # subnormal: units of 2^-24, and 16 bits below
        kept = torch.where(magnitude < 0x38800000, fixed + bits >> 16, kept)
        kept = torch.where(magnitude >= 0x47800000, 0x7C00, kept)
        kept = torch.where(magnitude > 0x7F800000, 0x7E00, kept)
    return (kept | sign).to(torch.uint16).view(dtype)


def _word(key: Key, direction: int, parameter: int, number: Tensor) -> Tensor:
    """Words of the parameter's stream, by number."""
    block = number // D.TILE_WORDS * D.LANES + number % D.LANES
    c1 = block >> 32 << 16 | direction
    words = philox(
        block & MASK, c1, torch.full_like(block, parameter), torch.full_like(block, key.step), *key.seed_words
    )
    row = number // D.LANES % 4
    return torch.stack(words).gather(0, row[None])[0]


def _box_muller(word: Tensor, second: Tensor) -> Tensor:
    """The cosine half of the pair that a word gives, or its sine half where `second`."""
    u = (word >> 1 | 1).to(torch.float32)  # 2^31 times a number in (0, 1]
    bits = u.view(torch.int32) - D.SQRT_HALF_BITS
    exponent = ((bits >> 23) - 31).to(torch.float32)
    f = ((bits & 0x7FFFFF) + D.SQRT_HALF_BITS).view(torch.float32) - 1.0
    radius = _sqrt((exponent * D.LN2 + f * _polynomial(D.LOG, f)) * -2.0)

    x = ((word >> 1 & 0x7FFE) + 1).to(torch.float32) * 2.0**-15
    y = x * x
    cosine = torch.where(word & 1 == 1, -radius, radius) * ((1.0 - y) * _polynomial(D.COS, y))
    sine = torch.where(word & 2 == 2, -radius, radius) * (x * _polynomial(D.SIN, y))
    return torch.where(second, sine, cosine)


def _sqrt(x: Tensor) -> Tensor:
    """The float32 square root rounded to nearest, which torch's own is not on every device.

    For x = m * 4^e with an integer m in [2^46, 2^48), the root is r * 2^e with r the integer nearest to sqrt(m), that
    is `r*r - r < m <= r*r + r`. Torch's root gives an r that is nearly right.
    """
    bits = x.abs().view(torch.int32).to(torch.int64)
    exponent, mantissa = (bits >> 23) - 127, bits & 0x7FFFFF | 1 << 23
    m = mantissa << 23 + (exponent & 1)
    near = torch.sqrt(x.abs()).view(torch.int32).to(torch.int64)
    r = near & 0x7FFFFF | 1 << 23
    for _ in range(2):
        r = r + (m > r * r + r).to(torch.int64) - (m <= r * r - r).to(torch.int64)
    root = (near >> 23 << 23) + (r - (1 << 23))
    return torch.where(x == 0, x, root.to(torch.int32).view(torch.float32))


def _polynomial(coefficients: Sequence[float], x: Tensor) -> Tensor:
    result = torch.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        result = result * x + c
    return result


def pieces(tensor: Tensor, start: int = 0) -> Iterator[tuple[Tensor, int]]:
    """Views of at most CHUNK elements that make up the tensor, each with the index of its first element."""
    if tensor.numel() <= CHUNK:
        yield tensor, start
        return
    row = tensor[0].numel()
    for piece in torch.split(tensor, max(1, CHUNK // row)):
        if row > CHUNK:
            yield from pieces(piece[0], start)
        else:
            yield piece, start
        start += piece.numel()


def add(
    piece: Tensor, change: Tensor, key: Key, direction: int, parameter: int, start: int = 0, *, undone: bool = False
) -> None:
    """Adds a change to elements of a parameter, from `start` on, rounded as the key says; `undone`: it goes back."""
    total = piece.to(change.dtype) + change
    if key.stochastic and piece.element_size() == 2:
        bits = rounding_bits(key, direction, parameter, start, start + piece.numel(), piece.device).view(piece.shape)
        total = rounded(total, 0xFFFF - bits if undone else bits, piece.dtype)
    piece.copy_(total)


class Reference:
    """Moves tensors of any device, dtype and layout, slowly and plainly."""

    name = "reference"

    @staticmethod
    def runs_on(device: torch.device) -> bool:
        return True

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = slots

    def move(self, moves: Sequence[Move]) -> None:
        for key, terms in moves:
            for term in terms:
                self._move(key, term)

    def move_terms(self, key: Key, terms: Terms) -> None:
        for step, direction, length, (back, forth) in zip(*(column.tolist() for column in terms), strict=True):
            self._move(key._replace(step=step), Term(direction, back, forth, length))

    def _move(self, key: Key, term: Term) -> None:
        for slot in self.slots:
            compute = torch.promote_types(slot.tensor.dtype, torch.float32)
            back, forth = (offsets[slot.group] * slot.scale * term.length for offsets in (term.back, term.forth))
            for piece, start in pieces(slot.tensor) if back != forth else ():
                noise = self._noise(key, term.direction, slot, piece, start).to(compute)
                for offset, undone in ((-back, True), (forth, False)):
                    if offset:
                        factor = torch.tensor(offset, dtype=compute, device=piece.device)
                        add(piece, noise * factor, key, term.direction, slot.parameter, start, undone=undone)

    def squares(self, key: Key, direction: int) -> int:
        total = 0
        for slot in self.slots:
            for piece, start in pieces(slot.tensor):
                noise = self._noise(key, direction, slot, piece, start)
                total += int((noise * noise * D.FIXED_POINT + 0.5).to(torch.int64).sum())
        return total

    def _noise(self, key: Key, direction: int, slot: Slot, piece: Tensor, start: int) -> Tensor:
        noise = values(key, direction, slot.parameter, start, start + piece.numel(), piece.device)
        return noise.view(piece.shape)
