"""Directions that are products: each line of a step has a direction of rank one in every matrix.

In a matrix the direction of line j is `r_j s_j^T`, with `r_j` and `s_j` vectors of signs; in a convolution's weight
`r_j s_j k_j`, over output channels, input channels and taps; in a vector it is a vector of signs. Products of
independent signs are signs that are pairwise uncorrelated, so that `E v v^T = I` as for a direction without structure.
What a layer computes with such a direction costs next to nothing (`forwardtune.layers`), which is what they are for.

The signs are the elements of the parameter's noise (Rademacher) along direction j: first those of `r`, then `s`, `k`.

Beside them there is one direction without structure, `COMMON`: that of a common line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from forwardtune.noise import distributions as D
from forwardtune.noise.backends import reference
from forwardtune.noise.backends.selection import choose
from forwardtune.noise.distributions import Distribution
from forwardtune.noise.mover import Mover, check_number
from forwardtune.noise.philox import MASK, philox
from forwardtune.noise.types import COMMON, Key, Slot, Term

SIGNS = 1 - 2 * (torch.arange(256)[:, None] >> torch.arange(8) & 1).to(torch.float32)
"""The eight signs of every byte, lowest bit first."""
Factors = tuple[Tensor, ...]
"""The signs of all lines in one parameter, as float32 of shape (lines, rows); beyond a vector also (lines, columns),
and of a convolution (lines, taps)."""


def factor_sizes(shape: Sequence[int]) -> tuple[int, ...]:
    """The lengths of a direction's factors in a parameter of this shape.

    >>> factor_sizes((7,)), factor_sizes((3, 5)), factor_sizes((8, 3, 2, 2))
    ((7,), (3, 5), (8, 3, 4))
    """
    if len(shape) <= 2:
        return tuple(shape) or (1,)
    return shape[0], shape[1], math.prod(shape[2:])


def factors(slots: Sequence[Slot], seed: int, step: int, lines: int) -> list[Factors]:
    """The signs of lines 0 to `lines` in every slot; all words are made in one go."""
    sizes = [factor_sizes(slot.tensor.shape) for slot in slots]
    words = [-(-sum(own) // 32) for own in sizes]
    number = torch.cat([torch.arange(count) for count in words])
    parameter = torch.cat([torch.full((n,), slot.parameter) for slot, n in zip(slots, words, strict=True)])
    block = number // D.TILE_WORDS * D.LANES + number % D.LANES
    line = torch.arange(lines)[:, None]
    four = philox(block & MASK, block >> 32 << 16 | line, parameter, torch.tensor(step), seed & MASK, seed >> 32)
    row = (number // D.LANES % 4).expand(lines, -1)
    word = torch.stack(four).gather(0, row[None])[0]
    signs = SIGNS[word.to(torch.uint32).view(torch.uint8).long()].view(lines, -1, 32)
    ends = list(accumulate(words, initial=0))
    return [
        _split(signs[:, start:end].reshape(lines, -1), own, slot.tensor.device)
        for slot, own, (start, end) in zip(slots, sizes, pairwise(ends), strict=True)
    ]


def _split(signs: Tensor, sizes: Sequence[int], device: torch.device) -> Factors:
    ends = list(accumulate(sizes, initial=0))
    return tuple(signs[:, start:end].contiguous().to(device) for start, end in pairwise(ends))


def as_matrix(own: Factors) -> tuple[Tensor, Tensor]:
    """Two factors whose outer product is the direction of a parameter, seen as a matrix; a vector is a row."""
    rows, *rest = own
    if not rest:
        return torch.ones(len(rows), 1, device=rows.device), rows
    return rows, rest[0] if len(rest) == 1 else (rest[0][:, :, None] * rest[1][:, None, :]).flatten(1)


def add_reference(
    tensor: Tensor, rows: Tensor, columns: Tensor, offsets: Tensor, key: Key, parameter: int, *, undone: bool
) -> None:
    """Adds `sum_j offsets[j] rows[j] columns[j]^T` to a tensor: summed line after line, then rounded once."""
    compute = torch.promote_types(tensor.dtype, torch.float32)
    total = torch.zeros(rows.shape[1], columns.shape[1], dtype=compute, device=tensor.device)
    for r, s, offset in zip(rows.to(compute), columns.to(compute), offsets.to(compute), strict=True):
        total += (offset * r)[:, None] * s
    reference.add(tensor, total.view(tensor.shape), key, 0, parameter, undone=undone)


class OuterMover:
    """Moves slots along directions that are products, as :class:`forwardtune.noise.Mover` does along others.

    All terms of a move are one sum, rounded once; going back subtracts exactly what going forth added.
    """

    def __init__(
        self, slots: Sequence[Slot], groups: int, *, seed: int, backend: str = "auto", stochastic: bool = False
    ) -> None:
        self.slots, self.groups, self.seed, self.backend = tuple(slots), groups, seed, backend
        self._common = Mover(
            slots, groups, seed=seed, distribution="rademacher", backend=backend, stochastic=stochastic
        )
        self.dimension, self.names, self.stochastic = self._common.dimension, self._common.names, stochastic
        self._kept: dict[tuple[int, int], list[Factors]] = {}

    def part(self, slots: Sequence[Slot]) -> OuterMover:
        """Moves some of the slots, or copies of them, as this one moves them all."""
        return OuterMover(slots, self.groups, seed=self.seed, backend=self.backend, stochastic=self.stochastic)

    def move(self, step: int, terms: Sequence[Term]) -> None:
        """Moves all tensors along lines of a step, in one pass for going back and one for going forth."""
        if any(term.direction == COMMON for term in terms):
            self._common.move(step, [term._replace(direction=0) for term in terms])
            return
        check_number("step", step)
        lines = 1 + max((term.direction for term in terms), default=-1)
        if not lines:
            return
        offsets = torch.zeros(2, lines, self.groups, dtype=torch.float64)
        offsets[:, [term.direction for term in terms]] = torch.tensor(
            [[[-t for t in term.back] for term in terms], [list(term.forth) for term in terms]], dtype=torch.float64
        )
        key = Key(self.seed, step, "rademacher", self.stochastic)
        for slot, own in zip(self.slots, self.factors(step, lines), strict=True):
            for part, undone in zip(offsets[:, :, slot.group] * slot.scale, (True, False), strict=True):
                if part.any():
                    adder(self.backend, slot.tensor)(
                        slot.tensor, *as_matrix(own), part, key, slot.parameter, undone=undone
                    )

    def factors(self, step: int, lines: int) -> list[Factors]:
        """The factors of all slots; the latest are kept, for the probes and the move of one step."""
        check_number("direction", lines - 1)
        if (step, lines) not in self._kept:
            self._kept = {(step, lines): factors(self.slots, self.seed, step, lines)}
        return self._kept[step, lines]

    def values(self, step: int, direction: int, parameter: int) -> Tensor:
        """The direction in one parameter, as float64 on the CPU."""
        slot = next(slot for slot in self.slots if slot.parameter == parameter)
        if direction == COMMON:
            key, n = Key(self.seed, step, "rademacher"), slot.tensor.numel()
            return slot.scale * reference.values(key, 0, parameter, 0, n, torch.device("cpu")).to(torch.float64)
        rows, columns = as_matrix(factors([slot], self.seed, step, direction + 1)[0])
        return slot.scale * (rows[-1][:, None] * columns[-1]).flatten().to("cpu", torch.float64)

    def chain(self, moves: Iterable[tuple[int, Sequence[Term]]]) -> None:
        """Makes the moves of many steps, one after the other."""
        for step, terms in moves:
            self.move(step, terms)


def adder(backend: str, tensor: Tensor) -> Callable[..., None]:
    """What adds sums of products to a tensor; see `add_reference`."""
    name = choose(backend, tensor.device).name if tensor.is_contiguous() else "reference"
    if name == "numba":
        from forwardtune.noise.backends import numba_outer

        return numba_outer.add_outer
    if name == "triton":
        from forwardtune.noise.backends import triton_outer

        return triton_outer.add_outer
    return add_reference


def mover_of(
    slots: Sequence[Slot],
    groups: int,
    *,
    seed: int,
    distribution: Distribution,
    backend: str,
    products: bool,
    stochastic: bool,
) -> Mover | OuterMover:
    """The mover along directions that are products, or along others."""
    if products:
        return OuterMover(slots, groups, seed=seed, backend=backend, stochastic=stochastic)
    return Mover(slots, groups, seed=seed, distribution=distribution, backend=backend, stochastic=stochastic)
