"""One table of optimizers, and small problems for them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forwardtune as ft

# One table of optimizers drives all tests: name -> (constructor, queries per step)
METHODS = {
    "VS2P": (lambda p, **k: ft.VS2P(p, **{"lr": 5.0, "rho": 1e-2, **k}), 2),
    "MeZO": (lambda p, **k: ft.MeZO(p, **{"lr": 0.05, **k}), 2),
    "STP": (lambda p, **k: ft.STP(p, **{"lr": 5e-2, **k}), 3),
    "S2P-1": (lambda p, **k: ft.S2P(p, **{"step_size": "stationary", "alpha0": 1.0, "steps": 50, **k}), 2),
    "S2P-2": (lambda p, **k: ft.S2P(p, **{"step_size": "dynamic", "L": 0.5, **k}), 4),
    "S2P-3": (lambda p, **k: ft.S2P(p, **{"step_size": "stationary-relaxed", "L1": 10.0, "steps": 50, **k}), 2),
    "S2P-4": (lambda p, **k: ft.S2P(p, **{"step_size": "dynamic-relaxed", "L0": 0.5, "L1": 0.5, **k}), 4),
}
every_method = pytest.mark.parametrize("method", list(METHODS))


def network(dtype=torch.float32):
    """A small network with dropout and BatchNorm."""
    torch.manual_seed(0)
    layers = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3)
    return nn.Sequential(*layers).to(dtype)


def loss_of(model):
    """The loss of one fixed batch."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 6, generator=generator).to(next(model.parameters()).dtype)
    y = torch.randint(0, 3, (40,), generator=generator)
    return lambda: F.cross_entropy(model(x), y)


def problem(dtype=torch.float32):
    model = network(dtype)
    return model, loss_of(model)


def weights(model):
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


class Odd(nn.Module):
    """Parameters of every dtype and layout, some tied."""

    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.transposed = nn.Parameter(torch.randn(4, 5, generator=g).t())
        self.f64 = nn.Parameter(torch.randn(5, dtype=torch.float64, generator=g))
        self.bf16 = nn.Parameter(torch.randn(5, generator=g).bfloat16())
        self.f16 = nn.Parameter(torch.randn(5, generator=g).half())
        self.frozen = nn.Parameter(torch.randn(5, generator=g), requires_grad=False)
        self.tied = self.frozen
        self.alias = nn.Parameter(self.f64.data)

    def loss(self):
        parts = self.transposed.sum(1), self.f64, self.bf16.double(), self.f16.double(), self.frozen, self.tied
        total = sum(part.double() for part in parts) * self.scalar + self.empty.sum()
        return ((total - 1) ** 2).mean()
