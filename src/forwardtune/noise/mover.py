"""Moves the tensors of a fixed list of slots, in place, along the directions of steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from forwardtune.errors import InvalidArgumentError
from forwardtune.noise.backends import reference
from forwardtune.noise.backends.arrays import Terms
from forwardtune.noise.backends.interface import Backend
from forwardtune.noise.backends.selection import choose
from forwardtune.noise.distributions import (
    DISTRIBUTIONS,
    EXACT_LENGTH_BELOW,
    FIXED_POINT,
    Distribution,
    sphere_scale,
)
from forwardtune.noise.types import Key, Slot, Term

KEPT = 16
"""Steps around the present one whose lengths are kept: a review moves along some that are past."""
LIMITS = {"seed": 2**64, "step": 2**32, "direction": 2**16}


def check_number(name: str, value: int) -> None:
    """Refuses a seed, step or direction that does not fit the generator's counter."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < LIMITS[name]:
        raise InvalidArgumentError(f"{name} must be an integer from 0 to {LIMITS[name] - 1}, not {value!r}")


class Mover:
    """Slots and the backends that move them. `groups` is the number of parameter groups that terms have offsets for."""

    def __init__(
        self,
        slots: Sequence[Slot],
        groups: int,
        *,
        seed: int,
        distribution: Distribution,
        backend: str = "auto",
        stochastic: bool = False,
        whole: Mover | None = None,
    ) -> None:
        check_number("seed", seed)
        if distribution not in DISTRIBUTIONS:
            raise InvalidArgumentError(
                f"unknown distribution {distribution!r}; choose one of {', '.join(DISTRIBUTIONS)}"
            )
        self.slots, self.groups, self.seed, self.distribution = tuple(slots), groups, seed, distribution
        self.backend, self.stochastic, self._whole = backend, stochastic, whole
        self.dimension = sum(slot.tensor.numel() for slot in slots)
        by_kind: dict[type[Backend], list[Slot]] = {}
        for slot in slots:
            by_kind.setdefault(choose(backend, slot.tensor.device), []).append(slot)
        self.backends = [kind(members) for kind, members in by_kind.items()]
        self.names = [member.name for member in self.backends]
        self._lengths: dict[tuple[int, int], float] = {}

    def part(self, slots: Sequence[Slot]) -> Mover:
        """Moves some of the slots, or copies of them, as this one moves them all."""
        return Mover(
            slots,
            self.groups,
            seed=self.seed,
            distribution=self.distribution,
            backend=self.backend,
            stochastic=self.stochastic,
            whole=self,
        )

    def move(self, step: int, terms: Sequence[Term]) -> None:
        """Moves all tensors along directions of a step, in one pass; see :class:`Term`."""
        self.chain([(step, terms)])

    def chain(self, moves: Iterable[tuple[int, Sequence[Term]]]) -> None:
        """Makes the moves of many steps, one after the other, in one pass."""
        keyed = [(self._key(step), self._checked(step, terms)) for step, terms in moves]
        if any(terms for _, terms in keyed):
            for backend in self.backends:
                backend.move(keyed)

    def chain_terms(self, terms: Terms) -> None:
        """As `chain`, with the terms of all moves as arrays, whose lengths are not known yet."""
        if not len(terms.steps):
            return
        for name, numbers in (("step", terms.steps), ("direction", terms.directions)):
            check_number(name, int(numbers.min()))
            check_number(name, int(numbers.max()))
        if self.distribution == "sphere":
            pairs = zip(terms.steps.tolist(), terms.directions.tolist(), strict=True)
            terms = terms._replace(lengths=np.array([self.length(step, direction) for step, direction in pairs]))
        for backend in self.backends:
            backend.move_terms(self._key(0), terms)

    def _checked(self, step: int, terms: Sequence[Term]) -> Sequence[Term]:
        """The terms with their lengths."""
        check_number("step", step)
        for term in terms:
            check_number("direction", term.direction)
            if not len(term.back) == len(term.forth) == self.groups:
                raise InvalidArgumentError(
                    f"a term needs one `back` and one `forth` for each of the {self.groups} groups, not {term}"
                )
        if self.distribution != "sphere":
            return terms
        return [term._replace(length=self.length(step, term.direction)) for term in terms]

    def length(self, step: int, direction: int) -> float:
        """What the noise that backends make is multiplied by to get `s`: 1, except for the sphere.

        Those of steps nearby are kept.
        """
        if self.distribution != "sphere":
            return 1.0
        if self._whole:
            return self._whole.length(step, direction)
        for known in [key for key in self._lengths if not step - KEPT <= key[0] <= step + KEPT]:
            del self._lengths[known]
        if (step, direction) not in self._lengths:
            squared = self._squared_length(self._key(step), direction)
            self._lengths[step, direction] = sphere_scale(self.dimension, squared)
        return self._lengths[step, direction]

    def _squared_length(self, key: Key, direction: int) -> float:
        if self.dimension >= EXACT_LENGTH_BELOW:
            return sum(backend.squares(key, direction) for backend in self.backends) / FIXED_POINT
        cpu = torch.device("cpu")
        noise = [reference.values(key, direction, s.parameter, 0, s.tensor.numel(), cpu) for s in self.slots]
        return math.fsum(torch.cat(noise).to(torch.float64).square().tolist())

    def _key(self, step: int) -> Key:
        return Key(self.seed, step, self.distribution, self.stochastic)
