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


Term = tuple[int, Sequence[float]]
"""A direction's number, and how far to go along it in each group."""


class Backend(Protocol):
    """Noise for a fixed list of slots; terms are added one after the other, each sum rounded to the tensor's dtype."""

    name: str

    @staticmethod
    def runs_on(device: torch.device) -> bool:
        """Whether it can move tensors of this device."""

    def __init__(self, slots: Sequence[Slot]) -> None: ...

    def add(self, key: Key, terms: Sequence[Term]) -> None:
        """`tensor += scale * s` for every slot and term; a scale of zero leaves the tensor untouched."""

    def squares(self, key: Key, direction: int) -> int:
        """The squared length of the direction's normal vector over all slots, in fixed point."""
