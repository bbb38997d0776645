"""The terms of moves as arrays, which a compiled kernel goes through one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from forwardtune.noise.types import Move


class Terms(NamedTuple):
    """One entry for each term of all moves, in order; `offsets` has one (back, forth) for each of the groups."""

    steps: np.ndarray[Any, Any]
    directions: np.ndarray[Any, Any]
    lengths: np.ndarray[Any, Any]
    offsets: np.ndarray[Any, Any]

    @classmethod
    def of(cls, moves: Sequence[Move]) -> Terms:
        terms = [term for _, terms in moves for term in terms]
        return cls(
            np.array([key.step for key, terms in moves for _ in terms], np.int64),
            np.array([term.direction for term in terms], np.int64),
            np.array([term.length for term in terms]),
            np.array([(term.back, term.forth) for term in terms], np.float64),
        )
