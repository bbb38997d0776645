"""The step sizes of Algorithm 1, options 1 to 4, and how far the dynamic ones are from the optimum.

Where A and B are not given, they are the exact constants for the given dimension or number of steps.
"""

from __future__ import annotations

import math

from forwardtune.theory.smoothness import Constants, constants_for_dimension, constants_for_steps


def stationary(alpha0: float, K: int, d: int) -> float:
    """Option 1: `alpha0/sqrt(K d)`."""
    return alpha0 / math.sqrt(K * d)


def dynamic(gamma: float, L: float, d: int) -> float:
    """Option 2: `abs(gamma)/(L d)`."""
    return abs(gamma) / (L * d)


def stationary_relaxed(L1: float, K: int, d: int, constants: Constants | None = None) -> float:
    """Option 3: `sqrt(2)/(B L1 sqrt(d K))`."""
    _, B = constants or constants_for_steps(K)
    return math.sqrt(2) / (B * L1 * math.sqrt(d * K))


def dynamic_relaxed(gamma: float, L0: float, L1: float, d: int, constants: Constants | None = None) -> float:
    """Option 4: `abs(gamma)/((A L0 + sqrt(2) B L1 abs(gamma)) d)`."""
    A, B = constants or constants_for_dimension(d)
    return abs(gamma) / ((A * L0 + math.sqrt(2) * B * L1 * abs(gamma)) * d)


def dynamic_error(rho: float) -> float:
    """Option 2: the step size is within `rho/2` of the optimum, `abs(<grad, s>)/(L d)`."""
    return rho / 2


def dynamic_relaxed_error(
    rho: float, L0: float, d: int, xi: float, constants: Constants | None = None, *, printed: bool = False
) -> float:
    """Option 4: the step size is within `xi rho^2 sqrt(d)/(A L0)` of the optimum.

    `abs(gamma)` is within `e = xi rho^2 d^(3/2)` of `abs(<grad, s>)`, and `x/(A L0 + q x)` is nowhere steeper than
    `1/(A L0)`, which gives `e/(A L0 d)`. Printed is `e`, which follows only if `A L0 d >= 1`.
    """
    A, _ = constants or constants_for_dimension(d)
    e = xi * rho**2 * math.pow(d, 1.5)
    return e if printed else e / (A * L0 * d)
