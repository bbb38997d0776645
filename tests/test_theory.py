"""The formulas of the theory against hand-computed values and each other."""

import math

import numpy as np
import pytest

from forwardtune.theory import complexity as C
from forwardtune.theory import smoothness as S
from forwardtune.theory import step_sizes as A

PAPER = S.Constants(1.01, 1.01)


def test_constants():
    assert S.constants(1.0) == (2.0, pytest.approx(math.e - 1))
    a, b = S.constants(1e-6)
    assert a == pytest.approx(1, abs=1e-5)
    assert b == pytest.approx(1, abs=1e-5)
    # the dynamic pair solves e^c = 1 + 1/sqrt(2d), i.e. c B = 1/sqrt(2d)
    for d in (1, 10, 10**6):
        c = math.log1p(1 / math.sqrt(2 * d))
        assert S.constants_for_dimension(d).B * c == pytest.approx(1 / math.sqrt(2 * d))
        c = math.log1p(math.sqrt(2 / d))
        assert S.constants_for_steps(d).B * c == pytest.approx(math.sqrt(2 / d))
    # the paper's 1.01 holds for large d only
    assert max(S.constants_for_dimension(10_000)) < 1.01 < max(S.constants_for_dimension(1_000))
    with pytest.raises(ValueError, match="above zero"):
        S.constants(0)


def test_step_sizes():
    assert A.stationary(2.0, 25, 4) == 0.2
    assert A.dynamic(-3.0, 2.0, 5) == 0.3
    assert A.stationary_relaxed(2.0, 8, 4, PAPER) == pytest.approx(math.sqrt(2) / (1.01 * 2 * math.sqrt(32)))
    assert A.dynamic_relaxed(-3.0, 1.0, 2.0, 5, PAPER) == pytest.approx(3 / ((1.01 + math.sqrt(2) * 1.01 * 6) * 5))
    # L1 = 0 is option 2, and a steep slope meets a ceiling
    assert A.dynamic_relaxed(3.0, 2.0, 0.0, 5, S.Constants(1, 1)) == A.dynamic(3.0, 2.0, 5)
    ceiling = 1 / (math.sqrt(2) * 1.01 * 2.0 * 5)
    assert A.dynamic_relaxed(1e12, 1.0, 2.0, 5, PAPER) == pytest.approx(ceiling)
    assert A.dynamic_error(0.1) == 0.05
    assert A.dynamic_relaxed_error(0.1, 2.0, 4, 3.0, PAPER) == pytest.approx(3 * 0.01 * 2 / (1.01 * 2))
    assert A.dynamic_relaxed_error(0.1, 2.0, 4, 3.0, printed=True) == pytest.approx(3 * 0.01 * 8)


def test_the_relaxed_step_error_bound_needs_its_correction():
    """Erratum 7: for A L0 d < 1 the printed bound of the step-size error fails, the corrected one holds."""
    L0, L1, d = 1e-3, 0.0, 4
    slope, error = 1.0, 1e-4
    difference = abs(
        A.dynamic_relaxed(slope + error, L0, L1, d, S.Constants(1, 1))
        - A.dynamic_relaxed(slope, L0, L1, d, S.Constants(1, 1))
    )
    rho, xi = 1.0, error / d**1.5
    assert difference > A.dynamic_relaxed_error(rho, L0, d, xi, S.Constants(1, 1), printed=True)
    assert difference <= A.dynamic_relaxed_error(rho, L0, d, xi, S.Constants(1, 1)) * (1 + 1e-9)


def test_steps_of_options_1_to_3():
    assert C.steps_stationary(0.1, 2.0, 10, 4.0, 1.0) == pytest.approx(2 * 10 / 0.01 * (2 + 2) ** 2)
    best = min(C.steps_stationary(0.1, 2.0, 10, 4.0, a) for a in np.linspace(0.5, 2, 301))
    assert C.steps_stationary(0.1, 2.0, 10, 4.0, math.sqrt(2 * 2 / 4)) == pytest.approx(best)
    # erratum 3
    rho = C.rho_dynamic(0.1, 10, 4.0)
    assert C.steps_dynamic(0.1, 2.0, 10, 4.0, rho) == pytest.approx(8 * 4 * 10 * 2 / 0.01)
    printed = C.rho_dynamic(0.1, 10, 4.0, printed=True)
    assert C.steps_dynamic(0.1, 2.0, 10, 4.0, printed * (1 + 1e-12)) == math.inf
    assert C.steps_dynamic(0.1, 2.0, 10, 4.0, printed, printed=True) < math.inf
    assert C.steps_dynamic(0.1, 2.0, 10, 4.0, 0.0) == C.steps_dynamic(0.1, 2.0, 10, 4.0, 0.0, printed=True)
    # erratum 4
    eps, D, d, L0, L1 = 0.1, 2.0, 9, 3.0, 5.0
    right = (3 + (1.01 * 3 / (1.01 * 5) + 1.01 * 5 * 2) * 3 / 0.1) ** 2
    assert C.steps_stationary_relaxed(eps, D, d, L0, L1, PAPER) == pytest.approx(right)
    wrong = (3 + (1.01 * 3 + 1.01 * 5 * 2) * 3 / 0.1) ** 2
    assert C.steps_stationary_relaxed(eps, D, d, L0, L1, PAPER, printed=True) == pytest.approx(wrong)


@pytest.mark.parametrize("eps", [0.05, 1.0, 30.0])
def test_option_3_is_the_smallest_number_of_steps_that_keeps_its_own_bound(eps):
    def bound(K):
        return C.steps_stationary_relaxed(eps, 2.0, 9, 3.0, 5.0, S.constants_for_steps(K))

    K = C.steps_stationary_relaxed(eps, 2.0, 9, 3.0, 5.0)
    assert int(K) == K
    assert bound(int(K)) <= K
    assert bound(int(K) - 1) > K - 1


def test_option_3_with_an_astronomical_number_of_steps():
    assert C.steps_stationary_relaxed(1e-6, 1.0, 10**9, 1.0, 1.0) > 1e20


def test_option_3_bound_follows_from_its_proof():
    """Inserting alpha and K into the summed descent inequality gives exactly eps."""
    eps, D, d, L0, L1 = 0.1, 2.0, 9, 3.0, 5.0
    K = C.steps_stationary_relaxed(eps, D, d, L0, L1, PAPER)
    alpha = math.sqrt(2) / (1.01 * L1 * math.sqrt(d * K))
    denominator = math.sqrt(2) * alpha - 1.01 * alpha**2 * L1 * d
    g = 2 * D / (denominator * K) + 1.01 * alpha**2 * L0 * d / denominator
    assert g == pytest.approx(eps)


def test_regimes_of_option_4():
    d, L0 = 100, 2.0
    small, large = 0.3, 3.0  # L1 with q below and above one
    for L1 in (small, large):
        q = math.sqrt(2) * 1.01 * L1
        border = 1.01 * L0 / abs(1 - q)
        below, above = (2, 1) if q <= 1 else (3, 4)
        assert C.regime(border * 0.999, L0, L1, d, PAPER) == below
        assert C.regime(border * 1.001, L0, L1, d, PAPER) == above
    eps, D, a = 0.1, 5.0, 1.01 * L0
    q = math.sqrt(2) * 1.01 * small
    assert C.steps_dynamic_relaxed(1, eps, D, d, L0, small, PAPER) == pytest.approx(8 * d * D / eps)
    assert C.steps_dynamic_relaxed(2, eps, D, d, L0, small, PAPER) == pytest.approx(8 * a * d * D / ((1 - q) * eps**2))
    q = math.sqrt(2) * 1.01 * large
    third = 8 * a * d * D * (2 * q - 1) / ((q - 1) * eps**2)
    assert C.steps_dynamic_relaxed(3, eps, D, d, L0, large, PAPER) == pytest.approx(third)
    fourth = 8 * (2 * q - 1) * (q - 1) * (D - eps) * d / a
    assert C.steps_dynamic_relaxed(4, eps, D, d, L0, large, PAPER) == pytest.approx(fourth)
    with pytest.raises(ValueError, match="see regime"):
        C.steps_dynamic_relaxed(3, eps, D, d, L0, small, PAPER)


def test_rho_of_option_4_keeps_the_error_small_enough():
    """At the largest rho the error of the step size is exactly what each proof allows."""
    eps, d, L0, xi = 0.1, 100, 2.0, 7.0
    for which, L1 in ((1, 0.3), (2, 0.3), (3, 3.0), (4, 3.0)):
        allowed = 1 / (2 * d) if which == 1 else eps / (2 * (1.01 * L0 + math.sqrt(2) * 1.01 * L1 * eps) * d)
        rho = C.rho_dynamic_relaxed(which, eps, d, L0, L1, xi, PAPER)
        assert A.dynamic_relaxed_error(rho, L0, d, xi, PAPER) == pytest.approx(allowed)
        printed = C.rho_dynamic_relaxed(which, eps, d, L0, L1, xi, PAPER, printed=True)
        assert xi * printed**2 * d**1.5 == pytest.approx(allowed)
    first = C.rho_dynamic_relaxed(1, eps, d, L0, 0.3, xi, PAPER, printed=True)
    assert first == pytest.approx(1 / (d * math.sqrt(2 * xi * math.sqrt(d))))
