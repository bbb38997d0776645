"""What a backend is: something that adds scaled noise to tensors in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
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


Walk = tuple[Key, Sequence[Term]]


class Backend(Protocol):
    """Noise for a fixed list of slots."""

    name: str

    @staticmethod
    def runs_on(device: torch.device) -> bool:
        """Whether it can move tensors of this device."""

    def __init__(self, slots: Sequence[Slot]) -> None: ...

    def walk(self, key: Key, terms: Sequence[Term]) -> None:
        """`x = (x - back * s) + forth * s` for every slot, term after term.

        An offset of zero is left out, and so is the whole term where `back` equals `forth`.
        """

    def chain(self, walks: Sequence[Walk]) -> None:
        """What `walk` does, for one step after the other; all have one seed and distribution."""

    def squares(self, key: Key, direction: int) -> int:
        """The squared length of the direction's normal vector over all slots, in fixed point."""
