"""The theorems, measured: steps to a small gradient against the bounds, and what relaxed smoothness is for."""

import contextlib

import numpy as np
import pytest
import torch

import forwardtune as ft
from forwardtune.theory import complexity

DIMENSIONS = (20, 40, 80, 160, 320)
SEEDS = range(3)


def steps_to(eps, x, loss, gradient, optimizer, limit):
    """Steps until the gradient norm is at most eps, or None."""
    for step in range(limit):
        if gradient(x).norm() <= eps:
            return step
        optimizer.step(lambda: loss(x))
    return None


class Quadratic:
    """`L/2 norm(x)^2`, started at distance one."""

    L, D = 2.0, 1.0

    def start(self, d, seed):
        x = torch.randn(d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        return x / x.norm()

    def loss(self, x):
        return self.L / 2 * (x @ x)

    def gradient(self, x):
        return self.L * x


def measure(make, eps):
    """Mean steps for each dimension, and the bound for it."""
    f = Quadratic()
    measured, bounds = [], []
    for d in DIMENSIONS:
        counts = []
        for seed in SEEDS:
            x = f.start(d, seed)
            optimizer, bound = make(f, [x], d, seed)
            counts.append(steps_to(eps, x, f.loss, f.gradient, optimizer, int(bound) + 1))
        assert None not in counts, (d, counts)
        measured.append(np.mean(counts))
        bounds.append(bound)
    return np.array(measured), np.array(bounds)


def slope_in_d(measured):
    return np.polyfit(np.log(DIMENSIONS), np.log(measured), 1)[0]


def test_option_1_keeps_its_bound_and_grows_linearly():
    eps, alpha0 = 0.4, 1.0

    def make(f, params, d, seed):
        K = complexity.steps_stationary(eps, f.D, d, f.L, alpha0)
        return ft.S2P(params, step_size="stationary", alpha0=alpha0, steps=int(K), seed=seed), K

    measured, bounds = measure(make, eps)
    assert (measured <= 0.25 * bounds).all()
    assert slope_in_d(measured) == pytest.approx(1, abs=0.1)


def test_option_2_keeps_its_corrected_bound_and_grows_linearly():
    eps = 0.1

    def make(f, params, d, seed):
        rho = complexity.rho_dynamic(eps, d, f.L)
        bound = complexity.steps_dynamic(eps, f.D, d, f.L, rho)
        return ft.S2P(params, step_size="dynamic", L=f.L, rho=rho, seed=seed), bound

    measured, bounds = measure(make, eps)
    assert (measured <= 0.25 * bounds).all()
    assert slope_in_d(measured) == pytest.approx(1, abs=0.1)


RELAXED = {
    # name: (loss, gradient, (L0, L1), L near the minimum, start)
    "x^4": (lambda x: (x**4).sum(), lambda x: 4 * x**3, (4.0, 2.0), 12.0, 20.0),
    "exp": (lambda x: (x.exp() + (-x).exp()).sum(), lambda x: x.exp() - (-x).exp(), (2.0, 1.0), 2 * np.cosh(1), 6.0),
}


@pytest.mark.parametrize("name", list(RELAXED))
def test_relaxed_constants_bound_the_curvature(name):
    _, gradient, (L0, L1), _, _ = RELAXED[name]
    t = torch.linspace(-20, 20, 100_001, dtype=torch.float64, requires_grad=True)
    g = gradient(t)
    (curvature,) = torch.autograd.grad(g.sum(), t)
    assert (curvature <= (L0 + L1 * g.abs()) * (1 + 1e-12)).all()


@pytest.mark.parametrize("name", list(RELAXED))
def test_option_4_converges_where_option_2_with_a_local_constant_diverges(name):
    """L holds in the unit ball around the minimum; the start lies outside."""
    loss, gradient, (L0, L1), L, start = RELAXED[name]
    d, eps = 10, 0.1
    x = torch.full((d,), start, dtype=torch.float64)
    four = ft.S2P([x], step_size="dynamic-relaxed", L0=L0, L1=L1, rho=1e-4, seed=1)
    assert steps_to(eps, x, loss, gradient, four, 20_000) is not None

    y = torch.full((d,), start, dtype=torch.float64)
    two = ft.S2P([y], step_size="dynamic", L=L, rho=1e-4, seed=1, max_nonfinite=1)
    first = float(loss(y))
    with contextlib.suppress(ft.NonFiniteLossError):
        assert steps_to(eps, y, loss, gradient, two, 1000) is None
    assert float(loss(y)) > 1e6 * first


@pytest.mark.parametrize("name", list(RELAXED))
def test_option_3_keeps_its_corrected_bound(name):
    loss, gradient, (L0, L1), _, _ = RELAXED[name]
    d, eps = 5, 1.0
    x = torch.full((d,), 1.5, dtype=torch.float64)
    D = float(loss(x) - loss(torch.zeros(d, dtype=torch.float64)))
    K = complexity.steps_stationary_relaxed(eps, D, d, L0, L1)
    optimizer = ft.S2P([x], step_size="stationary-relaxed", L1=L1, steps=int(K), seed=0)
    assert steps_to(eps, x, loss, gradient, optimizer, int(K)) is not None
