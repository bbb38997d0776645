"""Trajectories against a transcription of the paper's algorithms in float64 numpy.

The transcription is written from the formulas and knows nothing of forwardtune but the noise that is fed to it: it
keeps the old point, makes new points from it, and picks. (Errata: the sign of VS2P's update; exact A and B.)
"""

import math

import numpy as np
import pytest
import torch

import forwardtune as ft

STEPS = 100


def rosenbrock(x):
    return sum(2.0 * (x[i + 1] - x[i] ** 2) ** 2 + (1 - x[i]) ** 2 for i in range(len(x) - 1))


class Logistic:
    def __init__(self, d):
        rng = np.random.default_rng(7)
        self.X, self.y = rng.standard_normal((50, d)), np.sign(rng.standard_normal(50))

    def __call__(self, x):
        if isinstance(x, torch.Tensor):
            margins = torch.from_numpy(self.y) * (torch.from_numpy(self.X) @ x)
            return torch.logaddexp(torch.zeros_like(margins), -margins).mean()
        return np.logaddexp(0.0, -self.y * (self.X @ x)).mean()


def ga(f, x, s, k, m, *, alpha, rho):
    gamma = (f(x + rho * s) - f(x - rho * s)) / (2 * rho)
    return x - alpha * gamma * s


def stp(f, x, s, k, m, *, alpha):
    candidates = [x, x + alpha * s, x - alpha * s]
    return candidates[int(np.argmin([f(c) for c in candidates]))]


def best_of_two(f, x, s, alpha):
    return min((x + alpha * s, x - alpha * s), key=f)


def option1(f, x, s, k, m, *, alpha0):
    return best_of_two(f, x, s, alpha0 / math.sqrt(STEPS * len(x)))


def option2(f, x, s, k, m, *, L, rho):
    gamma = abs(f(x + rho * s) - f(x - rho * s)) / (2 * rho)
    return best_of_two(f, x, s, gamma / (L * len(x)))


def option3(f, x, s, k, m, *, L1):
    c = math.log(1 + math.sqrt(2 / STEPS))
    B = (math.exp(c) - 1) / c
    return best_of_two(f, x, s, math.sqrt(2) / (B * L1 * math.sqrt(len(x) * STEPS)))


def option4(f, x, s, k, m, *, L0, L1, rho):
    d = len(x)
    c = math.log(1 + 1 / math.sqrt(2 * d))
    A, B = 1 + math.exp(c) - (math.exp(c) - 1) / c, (math.exp(c) - 1) / c
    gamma = abs(f(x + rho * s) - f(x - rho * s)) / (2 * rho)
    return best_of_two(f, x, s, gamma / ((A * L0 + math.sqrt(2) * B * L1 * gamma) * d))


def vs2p(f, x, s, k, m, *, eta, rho, window=50, tau_a=3, tau_b=3):
    plus, minus = f(x + rho * s), f(x - rho * s)
    gamma, beta = (plus - minus) / (2 * rho), np.sign(plus - minus)
    m.append(gamma)
    recent = m[-window:]
    sigma = np.std(recent, ddof=1) if len(recent) > 1 else abs(gamma)
    return x - beta * eta * rho / (tau_b * sigma / abs(gamma) + tau_b / tau_a) * s


METHODS = {
    "mezo": (ga, {"alpha": 2e-3, "rho": 1e-3}, lambda p, **k: ft.MeZO(p, lr=2e-3, rho=1e-3, **k)),
    "stp": (stp, {"alpha": 5e-3}, lambda p, **k: ft.STP(p, lr=5e-3, **k)),
    "s2p-1": (option1, {"alpha0": 0.5}, lambda p, **k: ft.S2P(p, step_size=1, alpha0=0.5, steps=STEPS, **k)),
    "s2p-2": (option2, {"L": 20, "rho": 1e-3}, lambda p, **k: ft.S2P(p, step_size="dynamic", L=20, rho=1e-3, **k)),
    "s2p-3": (option3, {"L1": 2}, lambda p, **k: ft.S2P(p, step_size="stationary-relaxed", L1=2, steps=STEPS, **k)),
    "s2p-4": (
        option4,
        {"L0": 5, "L1": 2, "rho": 1e-3},
        lambda p, **k: ft.S2P(p, step_size=4, L0=5, L1=2, rho=1e-3, **k),
    ),
    "vs2p": (vs2p, {"eta": 1.0, "rho": 0.01}, lambda p, **k: ft.VS2P(p, lr=1.0, rho=0.01, **k)),
    "vs2p-window": (
        vs2p,
        {"eta": 2.0, "rho": 0.01, "window": 5, "tau_a": 2, "tau_b": 4},
        lambda p, **k: ft.VS2P(p, lr=2.0, rho=0.01, window=5, tau_a=2, tau_b=4, **k),
    ),
}


@pytest.mark.parametrize("loss", ["rosenbrock", "logistic"])
@pytest.mark.parametrize("distribution", ["rademacher", "normal", "uniform", "sphere"])
@pytest.mark.parametrize("backend", ["numba", "reference"])
@pytest.mark.parametrize("method", list(METHODS))
def test_trajectory(method, backend, distribution, loss):
    transcription, settings, make = METHODS[method]
    d = 12
    f = rosenbrock if loss == "rosenbrock" else Logistic(d)
    start = np.random.default_rng(1).uniform(-0.5, 0.5, d)
    x = start.copy()
    # the vector lives in two parameters of one group
    parts = torch.tensor(start[:5]), torch.tensor(start[5:]).reshape(7, 1)
    optimizer = make(parts, seed=3, scale="absolute", distribution=distribution, backend=backend)
    memory = []
    for k in range(STEPS):
        s = torch.cat([optimizer.field.values(k, 0, i, 0, part.numel()) for i, part in enumerate(parts)])
        x = transcription(f, x, s.numpy(), k, memory, **settings)
        optimizer.step(lambda: f(torch.cat([part.flatten() for part in parts])))
        ours = torch.cat([part.flatten() for part in parts]).numpy()
        np.testing.assert_allclose(ours, x, rtol=0, atol=1e-12)
    assert f(x) < f(start)


def test_vs2p_as_printed_climbs():
    """Erratum 1: with the printed sign the loss of a plain quadratic grows, with ours it falls."""
    rng = np.random.default_rng(0)

    def f(x):
        return float(x @ x)

    printed, fixed = np.ones(5), np.ones(5)
    m1, m2 = [], []
    for k in range(100):
        s = np.sign(rng.standard_normal(5))
        move = vs2p(f, printed, s, k, m1, eta=1.0, rho=0.01) - printed
        printed = printed - move
        fixed = vs2p(f, fixed, s, k, m2, eta=1.0, rho=0.01)
    assert f(fixed) < f(np.ones(5)) < f(printed)
