"""How many steps are needed to reach a point with `norm(grad) <= eps`, and how small rho must be for that.

D is `f(x0) - f*`. The bounds count steps: options 1 and 3 make two queries per step, options 2 and 4 four.
`printed=True` gives a formula as the paper prints it, where that differs from what its proof shows.
"""

from __future__ import annotations

import math
from typing import Literal

from forwardtune.theory.smoothness import Constants, constants_for_dimension, constants_for_steps
from forwardtune.theory.step_sizes import dynamic_relaxed_error

Regime = Literal[1, 2, 3, 4]

QUERIES_PER_STEP = {1: 2, 2: 4, 3: 2, 4: 4}
"""Queries per step under each option."""


def steps_stationary(eps: float, D: float, d: int, L: float, alpha0: float) -> float:
    """Option 1 (Theorem 3.8): `2d/eps^2 (D/alpha0 + L alpha0/2)^2`, minimal for `alpha0 = sqrt(2D/L)`."""
    return 2 * d / eps**2 * (D / alpha0 + L * alpha0 / 2) ** 2


def steps_dynamic(eps: float, D: float, d: int, L: float, rho: float, *, printed: bool = False) -> float:
    """Option 2 (Theorem 3.8): `4 L d D/(eps^2 - L^2 d^2 rho^2/2)`, infinite for `rho >= sqrt(2) eps/(L d)`.

    Printed is `4 L d D/(eps^2 - rho^2/2)`.
    """
    loss = rho**2 / 2 if printed else (L * d * rho) ** 2 / 2
    return 4 * L * d * D / (eps**2 - loss) if loss < eps**2 else math.inf


def steps_stationary_relaxed(
    eps: float, D: float, d: int, L0: float, L1: float, constants: Constants | None = None, *, printed: bool = False
) -> float:
    """Option 3 (Theorem 3.11): `(sqrt(d) + (A L0/(B L1) + B L1 D) sqrt(d)/eps)^2`.

    Printed is `A L0` without the `1/(B L1)`. A and B depend on the number of steps, which depends on them: if they are
    not given, the smallest integer number of steps that satisfies its own bound is returned.
    """
    if constants is None:

        def bound(K: int) -> float:
            return steps_stationary_relaxed(eps, D, d, L0, L1, constants_for_steps(K), printed=printed)

        enough = 1
        while enough < bound(enough):
            enough *= 2
        too_few = enough // 2
        while too_few + 1 < enough:
            middle = (too_few + enough) // 2
            too_few, enough = (too_few, middle) if middle >= bound(middle) else (middle, enough)
        return float(enough)
    A, B = constants
    first = A * L0 if printed else A * L0 / (B * L1)
    return (math.sqrt(d) + (first + B * L1 * D) * math.sqrt(d) / eps) ** 2


def regime(gradient_norm: float, L0: float, L1: float, d: int, constants: Constants | None = None) -> Regime:
    """The row of the paper's Table 1 (option 4) that a point falls into, by its gradient norm."""
    A, B = constants or constants_for_dimension(d)
    q = math.sqrt(2) * B * L1
    if q <= 1:
        return 1 if gradient_norm * (1 - q) >= A * L0 else 2
    return 3 if gradient_norm * (q - 1) <= A * L0 else 4


def steps_dynamic_relaxed(
    which: Regime, eps: float, D: float, d: int, L0: float, L1: float, constants: Constants | None = None
) -> float:
    """Option 4 (Table 1), while the run stays in the given regime, with the rho of `rho_dynamic_relaxed`.

    In regime 4 it is the loss, not the gradient norm, that falls: to within eps of the minimum.
    """
    A, B = constants or constants_for_dimension(d)
    q = math.sqrt(2) * B * L1
    _check_regime(which, q)
    if which == 1:
        return 8 * d * D / eps
    if which == 2:
        return 8 * A * L0 * d * D / ((1 - q) * eps**2) if q < 1 else math.inf
    if which == 3:
        return 8 * A * L0 * d * D * (2 * q - 1) / ((q - 1) * eps**2) if q > 1 else math.inf
    return 8 * (2 * q - 1) * (q - 1) * max(0.0, D - eps) * d / (A * L0)


def rho_dynamic(eps: float, d: int, L: float, *, printed: bool = False) -> float:
    """Option 2: a rho for which `steps_dynamic` is `8 L d D/eps^2`: `eps/(L d)`.

    Printed is `sqrt(2) eps/(L d)`, the smallest rho for which the bound is infinite.
    """
    return (math.sqrt(2) if printed else 1) * eps / (L * d)


def rho_dynamic_relaxed(
    which: Regime,
    eps: float,
    d: int,
    L0: float,
    L1: float,
    xi: float,
    constants: Constants | None = None,
    *,
    printed: bool = False,
) -> float:
    """Option 4 (Table 1): the largest rho; xi bounds the error of the slope, `xi rho^2 d^(3/2)`.

    The proof allows the step size an error of `1/(2d)` in regime 1 and of `eps/(2 (A L0 + q eps) d)` in the others.
    Printed is the rho for which the error of the slope itself is that small; see `step_sizes.dynamic_relaxed_error`.
    """
    A, B = constants or constants_for_dimension(d)
    q = math.sqrt(2) * B * L1
    _check_regime(which, q)
    allowed = 1 / (2 * d) if which == 1 else eps / (2 * (A * L0 + q * eps) * d)
    return math.sqrt(allowed / dynamic_relaxed_error(1.0, L0, d, xi, Constants(A, B), printed=printed))


def _check_regime(which: Regime, q: float) -> None:
    if which not in (1, 2, 3, 4):
        raise ValueError(f"the regime must be 1, 2, 3 or 4, not {which!r}: see regime()")
    if (which <= 2) != (q <= 1):
        raise ValueError(
            f"regimes 1 and 2 need sqrt(2) B L1 <= 1, and regimes 3 and 4 need it above 1; it is {q:.4g}: see regime()"
        )
