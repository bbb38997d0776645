"""What a backend is: it adds scaled noise to tensors in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from forwardtune.noise.backends.arrays import Terms
from forwardtune.noise.types import Key, Move, Slot


class Backend(Protocol):
    """Moves a fixed list of slots."""

    name: str

    @staticmethod
    def runs_on(device: torch.device) -> bool:
        """Whether it can move tensors of this device."""

    def __init__(self, slots: Sequence[Slot]) -> None: ...

    def move(self, moves: Sequence[Move]) -> None:
        """`x = (x - back * s) + forth * s` for every slot, term after term, move after move.

        `back` and `forth` are a term's offsets times the slot's scale, then times the term's length, in double
        precision. One that is zero is skipped, and so is the whole term where they are equal. All moves have the same
        seed and distribution.
        """

    def move_terms(self, key: Key, terms: Terms) -> None:
        """As `move`; the steps are those of the terms, and the rest is that of the key."""

    def squares(self, key: Key, direction: int) -> int:
        """The squared length of the direction's normal vector over all slots, in fixed point."""
