"""What lines of their own gain, measured as `directions="auto"` does: B mean(gamma^2) along common lines, over
mean(gamma_i^2) along those of the examples, at the same weights.

The network of the preset `digits` at its start and on its way; with `--data DIR`, ResNet18 in training mode as well.
And what a step along them costs, against one along a common line; on GPT-2 with 16 texts of 64 tokens against two
forward passes, in float32 and bfloat16, with the peak memory of each in a process of its own.

    python -m benchmarks.lines [--data DIR] [--only GPT-2] [--json FILE]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn

import forwardtune as ft
from benchmarks import models
from benchmarks.harness import Row, arguments, finish, interleaved, ratios, show
from forwardtune import presets
from forwardtune.experiments.under_way import batch_indices
from forwardtune.tasks import Sources, Task, prepare

LINES = 60
"""Steps of each kind, none of which moves the weights for good."""


def gains(task: Task, model: nn.Module, rho: float, steps: int = LINES) -> tuple[float, float]:
    """What is gained, and what would be if examples did not disturb each other, `1 + (B - 1) a`."""
    common = ft.VS2P(model.parameters(), lr=0.0, rho=rho, directions=1)
    own = ft.VS2P(model.parameters(), lr=0.0, rho=rho, directions="per-example")
    of_mean, of_own, of_examples = [], [], []
    for step in range(steps):
        batch = task.batch(batch_indices(task.examples, task.workload.batch, 1, step))
        probed: list[torch.Tensor] = []
        common.step(lambda batch=batch, probed=probed: probed.append(task.losses(model, batch)) or probed[-1].mean())
        of_mean.append(len(probed[0]) * common.last_step.gamma**2)
        of_examples.append(((probed[0] - probed[1]) / (2 * rho)).square().mean().item())
        own.step(lambda batch=batch: task.losses(model, batch))
        of_own.append(fmean(line[0].gamma ** 2 for line in own.last_step.lines))
    return fmean(of_mean) / fmean(of_own), fmean(of_mean) / fmean(of_examples)


def costs(name: str, task: Task, model: nn.Module, steps: int, rounds: int) -> list[Row]:
    """Steps of either kind, of a rate that moves all weights, if by nothing that counts."""
    batch = task.batch(batch_indices(task.examples, task.workload.batch, 1, 0))
    common = ft.VS2P(model.parameters(), lr=1e-9, directions=1)
    own = ft.VS2P(model.parameters(), lr=1e-9, directions="per-example")
    seconds = interleaved(
        {
            f"{name}, a common line": lambda: [common.step(lambda: task.loss(model, batch)) for _ in range(steps)],
            f"{name}, own lines": lambda: [own.step(lambda: task.losses(model, batch)) for _ in range(steps)],
        },
        rounds,
    )
    rows = ratios({key: value / steps for key, value in seconds.items()}, f"{name}, a common line")
    show(f"one step, {task.workload.batch} examples", rows)
    return rows


def measured(
    name: str, preset: str, sources: Sources, rho: float, moments: tuple[int, ...], steps: int, rounds: int
) -> list[Row]:
    task = prepare(presets.load(preset).workloads[0], sources, "cpu")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        model = task.make_base(Path(folder) / "base.safetensors")
        optimizer = ft.VS2P(model.named_parameters(), directions="per-example")
        for moment in moments:
            while optimizer.steps < moment:
                batch = task.batch(batch_indices(task.examples, task.workload.batch, 0, optimizer.steps))
                optimizer.step(lambda batch=batch: task.losses(model, batch))
            gain, alone = gains(task, model, rho, steps)
            print(f"{name}, after {moment} steps: {gain:.2f}; 1 + (B - 1) a: {alone:.2f}", flush=True)
            rows.append({"name": f"{name}, after {moment} steps", "ratio": gain, "alone": alone})
        rows += costs(name, task, model, min(steps, 5), rounds)
    return rows


BASELINE = "two forward passes"
STEPS: dict[str, dict[str, Any]] = {
    "a common line, in place": {"probes": "in-place"},
    "a common line, layer by layer": {"probes": "layerwise"},
    "own lines": {"directions": "per-example"},
    "own lines, without the move": {"directions": "per-example", "lr": 0.0},
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def gpt2_steps(dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """Two forward passes, and steps of every kind on the same weights."""
    model, losses = models.gpt2_by_example(dtype=dtype)

    def step(options: dict[str, Any]) -> Callable[[], Any]:
        optimizer = ft.VS2P(model.parameters(), **{"lr": 1e-9, **options})
        closure = losses if optimizer.by_example else lambda: losses().mean()
        return lambda: optimizer.step(closure)

    return {BASELINE: models.two_forward_passes(model, losses)} | {name: step(own) for name, own in STEPS.items()}


def gpt2_costs(rounds: int) -> list[Row]:
    """Times, all against two passes in float32, and peak memory, against two passes in the same dtype."""
    seconds: dict[str, float] = {}
    for name, dtype in DTYPES.items():
        steps = {f"GPT-2, {name}: {kind}": step for kind, step in gpt2_steps(dtype).items()}
        seconds |= interleaved(steps, rounds)
    rows = ratios(seconds, f"GPT-2, float32: {BASELINE}")
    show("one step on GPT-2, 16 x 64 tokens", rows)
    for name in DTYPES:
        peaks = {}
        for kind in (BASELINE, *STEPS):
            command = [sys.executable, "-m", "benchmarks.lines", "--peak", name, kind]
            peaks[kind] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])
        memory: list[Row] = [
            {"name": f"GPT-2, {name}: {kind}", "baseline": f"GPT-2, {name}: {BASELINE}"}
            | {"ratio": peak / peaks[BASELINE], "megabytes": peak / 1e6}
            for kind, peak in peaks.items()
        ]
        show(f"peak memory on GPT-2, 16 x 64 tokens, {name}", memory)
        rows += memory
    return rows


def print_peak(dtype: str, kind: str) -> None:
    """The peak memory of this process after three steps of one kind, in bytes."""
    step = gpt2_steps(DTYPES[dtype])[kind]
    for _ in range(3):
        step()
    status = Path("/proc/self/status").read_text()  # getrusage would begin with the peak of the process that began this
    print(int(status.split("VmHWM:")[1].split()[0]) * 1024)


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, metavar="DIR", help="also measure ResNet18 on MNIST from this folder")
    parser.add_argument("--only", choices=["GPT-2"], help="measure the cost on GPT-2 alone")
    parser.add_argument("--peak", nargs=2, metavar=("DTYPE", "STEP"), help="the memory of one kind, in this process")
    options = parser.parse_args()
    if options.peak:
        print_peak(*options.peak)
        return
    rows = gpt2_costs(options.rounds)
    if options.only is None:
        torch.set_num_threads(1)
        rows += measured("digits", "digits", Sources(), 0.03, (0, 100, 500), LINES, options.rounds)
        if options.data:
            rows += measured("ResNet18", "auto/resnet18", Sources(options.data), 2e-3, (0,), 25, options.rounds)
    finish(rows, options.json)


if __name__ == "__main__":
    main()
