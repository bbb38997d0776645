"""Small recorded runs that the ledger's tests share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import forwardtune as ft

METHODS = {
    "VS2P": (ft.VS2P, {"lr": 4.0, "rho": 1e-2}),
    "MeZO": (ft.MeZO, {"lr": 1e-2, "rho": 1e-2}),
    "STP": (ft.STP, {"lr": 1e-2}),
    "S2P": (ft.S2P, {"step_size": "dynamic", "L": 1.0, "rho": 1e-2}),
}
X = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
Y = X[:, :3].argmax(1)


class Net(nn.Module):
    """Tied weights, a strided weight, BatchNorm, dropout."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 3)
        self.last.weight.data = torch.randn(6, 3).t()
        self.to(dtype)

    def forward(self, x):
        hidden = F.dropout(self.norm(self.second(self.first(x)).relu()), 0.2, self.training)
        return self.last(hidden)


def loss(model: nn.Module) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    return F.cross_entropy(model(X.to(dtype)).double(), Y)


def recorded(path, method="VS2P", dtype=torch.float32, steps=40, groups=False, closure=None, **options):
    """A run with a scheduler, its model, and the weights and buffers after each step."""
    model = Net(dtype)
    kind, settings = METHODS[method]
    params = list(model.named_parameters())
    if groups:
        params = [{"params": params[:3], "lr": settings.get("lr", 1.0) / 2}, {"params": params[3:]}]
    ledger = ft.Ledger(
        path, model, **{key: options.pop(key) for key in ("fsync", "checkpoint_every") if key in options}
    )
    optimizer = kind(params, **settings, **options, recorder=ledger)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    states = [snapshot(model)]
    for step in range(steps):
        optimizer.step((lambda step=step: closure(step, model)) if closure else lambda: loss(model))
        scheduler.step()
        states.append(snapshot(model))
    return model, optimizer, states


def gone_on(path, steps, dtype=torch.float32):
    """A recorded run, resumed with another scheduler and gone on to so many steps: its model, optimizer and start."""
    model = Net(dtype)
    optimizer, start = ft.resume(model, path)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    for _ in range(start):
        scheduler.step()
    for _ in range(start, steps):
        optimizer.step(lambda: loss(model))
        scheduler.step()
    return model, optimizer, start


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(bits(one[name]), bits(other[name])) for name in one
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes, since -0.0 equals 0.0."""
    return tensor.contiguous().view(-1).view(torch.uint8)
