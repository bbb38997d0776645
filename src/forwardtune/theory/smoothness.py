"""Smoothness, its constants, and the lemma behind descent.

A function is L-smooth if `norm(hess) <= L`, and (L0, L1)-smooth if `norm(hess) <= L0 + L1*norm(grad)`. Under the
latter, a step from x to y no longer than `c/L1` obeys
`f(y) <= f(x) + <grad, y-x> + (A*L0 + B*L1*norm(grad))/2 * norm(y-x)^2`, with A and B as below.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Constants(NamedTuple):
    """The pair (A, B) of the relaxed descent inequality."""

    A: float
    B: float


def constants(c: float) -> Constants:
    """`A = 1 + e^c - (e^c - 1)/c` and `B = (e^c - 1)/c`, for steps no longer than `c/L1` (Lemma A.1).

    >>> constants(1.0)
    Constants(A=2.0, B=1.718281828459045)
    """
    if not c > 0:
        raise ValueError(f"c must be above zero, not {c!r}")
    B = math.expm1(c) / c
    return Constants(1 + math.exp(c) - B, B)


def constants_for_dimension(d: int) -> Constants:
    """A and B for the steps of option 4, which need `e^c >= 1 + 1/sqrt(2 d)`.

    >>> constants_for_dimension(1000)
    Constants(A=1.0112..., B=1.0111...)
    """
    return constants(math.log1p(1 / math.sqrt(2 * d)))


def constants_for_steps(K: int) -> Constants:
    """A and B for the steps of option 3, which need `e^c >= 1 + sqrt(2/K)`."""
    return constants(math.log1p(math.sqrt(2 / K)))


def slope_bounds(gradient_norm: float) -> tuple[float, float]:
    """`norm(g)/sqrt(2) <= E abs(<g, s>) <= norm(g)` for a Rademacher direction s (Lemma 3.6, Khintchine)."""
    return gradient_norm / math.sqrt(2), gradient_norm
