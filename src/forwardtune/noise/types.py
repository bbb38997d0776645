"""What a move is made of: the key of the noise, the slots that move, and the terms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from forwardtune.noise.distributions import ROUNDING_SEED, Distribution

COMMON = -1
"""Among directions that are products (see `outer`), the number of the one that is not; its noise is that of direction 0
in a run along common lines."""


class Key(NamedTuple):
    """What the noise of a step depends on, besides direction, parameter and index.

    stochastic: whether sums of 16-bit weights are rounded stochastically instead of to nearest.
    """

    seed: int
    step: int
    distribution: Distribution
    stochastic: bool = False

    @property
    def seed_words(self) -> tuple[int, int]:
        return self.seed & 0xFFFFFFFF, self.seed >> 32

    @property
    def rounding(self) -> Key:
        """The key of the bits that decide how sums are rounded."""
        return self._replace(seed=self.seed ^ ROUNDING_SEED)


@dataclass(frozen=True)
class Slot:
    """A tensor that moves, with its number among the parameters, the number of its group, and its scale.

    The direction is `scale * s` in this tensor, with `s` the noise: offsets count in units of the scale.
    """

    tensor: Tensor
    parameter: int
    group: int
    scale: float = 1.0


class Term(NamedTuple):
    """Going back and forth along one direction: in each group first `back` to the old point, then `forth` to the new.

    Both sums are rounded to the tensor's dtype. Going back subtracts exactly what was added, which restores the old
    weights, except where the sum had crossed a power of two or was a tie: those may be off by one unit in the last
    place. `length` is what the noise is multiplied by, which the mover knows: 1, except for the sphere.
    """

    direction: int
    back: Sequence[float]
    forth: Sequence[float]
    length: float = 1.0


Move = tuple[Key, Sequence[Term]]
"""The terms of one pass, and the key of their step."""
