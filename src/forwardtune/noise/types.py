"""What moves: a key of the noise, the slots that it covers, and the terms of a move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from forwardtune.noise.distributions import Distribution


class Key(NamedTuple):
    """What the noise of a step depends on, beside direction, parameter and index."""

    seed: int
    step: int
    distribution: Distribution

    @property
    def seed_words(self) -> tuple[int, int]:
        return self.seed & 0xFFFFFFFF, self.seed >> 32


@dataclass(frozen=True)
class Slot:
    """A tensor with its number among the parameters and the number of its group."""

    tensor: Tensor
    parameter: int
    group: int


class Term(NamedTuple):
    """A walk along one direction: in each group first `back` to the old point, then `forth` to the new one.

    Both sums are rounded to the tensor's dtype, and the first takes away just what was once added: going back gives the
    old weights exactly, but for sums that had passed a power of two or were a tie, which may be off by a last place.
    """

    direction: int
    back: Sequence[float]
    forth: Sequence[float]


Move = tuple[Key, Sequence[Term]]
"""The terms of one pass, and the key of their step."""
