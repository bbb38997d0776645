"""The two-point estimate of the gradient: unbiased but for a term that falls as rho squared."""

import numpy as np
import pytest
import torch

import forwardtune as ft


def curved(x):
    """Smooth, with a third derivative along every direction."""
    return (torch.sin(x).sum() + (x**3).sum() / 3 + (x.prod())) + (x[0] * x[1] ** 2)


def gradient(x):
    x = x.clone().requires_grad_()
    curved(x).backward()
    return x.grad


@pytest.mark.parametrize("distribution", ["rademacher", "normal", "uniform", "sphere"])
def test_the_mean_estimate_is_the_gradient(distribution):
    start = torch.tensor([0.3, -0.7, 1.1, 0.5], dtype=torch.float64)
    x = start.clone()
    optimizer = ft.MeZO([x], lr=0.0, rho=1e-4, scale="absolute", distribution=distribution, seed=5)
    estimates = []
    for step in range(4000):
        optimizer.step(lambda: curved(x))
        estimates.append(optimizer.last_step.gamma * optimizer.field.values(step, 0, 0, 0, 4).numpy())
    estimates = np.array(estimates)
    error = estimates.std(axis=0, ddof=1) / np.sqrt(len(estimates))
    assert (np.abs(estimates.mean(axis=0) - gradient(start).numpy()) < 4 * error).all()
    torch.testing.assert_close(x, start, rtol=0, atol=1e-12)


@pytest.mark.parametrize("distribution", ["rademacher", "normal"])
def test_the_bias_falls_with_slope_two(distribution):
    start = torch.tensor([0.3, -0.7, 1.1, 0.5], dtype=torch.float64)
    rhos = np.logspace(-3, -1, 9)
    biases = []
    for rho in rhos:
        x = start.clone()
        optimizer = ft.MeZO([x], lr=0.0, rho=float(rho), distribution=distribution)
        differences = []
        for step in range(50):
            optimizer.step(lambda: curved(x))  # noqa: B023
            slope = float(gradient(start) @ optimizer.field.values(step, 0, 0, 0, 4))
            differences.append(optimizer.last_step.gamma - slope)
        biases.append(np.abs(differences).mean())
    slope = np.polyfit(np.log(rhos), np.log(biases), 1)[0]
    assert slope == pytest.approx(2, abs=0.02)
