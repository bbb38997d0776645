"""Small recorded runs that the ledger's tests share."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import forwardtune as ft
from forwardtune.ledger import export, read

METHODS = {
    "VS2P": (ft.VS2P, {"lr": 4.0, "rho": 1e-2}),
    "MeZO": (ft.MeZO, {"lr": 1e-2, "rho": 1e-2}),
    "STP": (ft.STP, {"lr": 1e-2}),
    "S2P": (ft.S2P, {"step_size": "dynamic", "L": 1.0, "rho": 1e-2}),
    "VS2P auto": (ft.VS2P, {"lr": "auto"}),
    "STP auto": (ft.STP, {"lr": "auto"}),
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
    """A recorded run with a scheduler: its model, its optimizer, and the weights and buffers after each step."""
    model = Net(dtype)
    kind, settings = METHODS[method]
    params = list(model.named_parameters())
    if groups:
        lr = settings.get("lr", 1.0)
        params = [{"params": params[:3], "lr": 0.5 if lr == "auto" else lr / 2}, {"params": params[3:]}]
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


def resumed(path, steps, dtype=torch.float32):
    """A recorded run, resumed with a new scheduler up to so many steps: its model, optimizer and first new step."""
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


def weights(state):
    """A state dict without its buffers."""
    return {name: tensor for name, tensor in state.items() if "running" not in name and "num_" not in name}


class ClosedRun(NamedTuple):
    """A run that has ended: its files' bytes by name, and what it left behind."""

    files: dict[str, bytes]
    states: list[dict[str, torch.Tensor]]
    """The weights and buffers after each step."""
    generator: torch.Tensor
    latest_state: str
    """The name of the file with its last state."""


def closed_run(folder: Path, steps: int) -> ClosedRun:
    """A run in `run.ledger`, exported to `small.safetensors`."""
    path = folder / "run.ledger"
    _, optimizer, states = recorded(path, steps=steps)
    generator = torch.get_rng_state()
    optimizer.recorder.close()
    export(path, folder / "small.safetensors")
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    return ClosedRun(files, states, generator, f"run.ledger.state{read(path).state_file}")


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).write_bytes(data)


def check_replay(folder: Path, run: ClosedRun, name: str = "run.ledger") -> int | None:
    """Reads a changed ledger, whose sound part must have the run's weights: its end, or None if it is refused."""
    try:
        end = read(folder / name).end
    except ft.LedgerError:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        model = ft.replay(Net(), folder / name, until=end)
    assert same(weights(model.state_dict()), weights(run.states[end]))
    return end


def check_resume(folder: Path, run: ClosedRun) -> int | None:
    """Resumes a changed run, which must be as it was at that step: the step, or None if it is refused."""
    model = Net()
    try:
        optimizer, step = ft.resume(model, folder / "run.ledger")
    except ft.LedgerError:
        return None
    optimizer.recorder.close()
    assert same(model.state_dict(), run.states[step])
    assert optimizer.queries == 2 * step
    if step == len(run.states) - 1:
        assert torch.equal(torch.get_rng_state(), run.generator)
    return step
