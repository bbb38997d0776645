"""Queries in bfloat16 against float32, with float32 weights either way: their time, and how far slopes agree.

    python -m benchmarks.compute --data DIR [--json FILE]

A slope is what a step measures along a random line, with probes at a distance on either side of the base, in units of
the weights' own size. Both kinds of queries see the same lines and batches.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch

import forwardtune as ft
from benchmarks.harness import Row, arguments, finish, interleaved, ratios, show
from forwardtune import presets
from forwardtune.experiments.under_way import batch_indices
from forwardtune.tasks import Sources, Task, prepare
from forwardtune.tasks.computing import COMPUTE

WORKLOADS = {
    "MNIST, ResNet18": ("gains/mnist-resnet18", "mnist"),
    "SST-2, all-MiniLM-L6-v2": ("gains/glue", "sst2"),
    "texts, stories15M": ("gains/texts", "texts"),
}
LINES, DISTANCES = 40, (1e-2, 1e-3)


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with the data and weights of the presets")
    options = parser.parse_args()
    rows: list[Row] = []
    for title, (preset, name) in WORKLOADS.items():
        workload = replace(presets.load(preset).workload(name), fit=0)
        tasks = {dtype: prepare(replace(workload, compute=dtype), Sources(options.data), "cpu") for dtype in COMPUTE}
        with tempfile.TemporaryDirectory() as folder:
            base = Path(folder) / "base.safetensors"
            tasks["float32"].make_base(base)
            agree = {rho: agreement(tasks.values(), base, rho) for rho in DISTANCES}
            seconds = interleaved({dtype: query(task, base) for dtype, task in tasks.items()}, options.rounds)
        table = ratios(seconds, "float32")
        show(f"one query, {title}", table)
        print("correlation of slopes: " + ", ".join(f"{told:.2f} at {rho:g}" for rho, told in agree.items()) + "\n")
        short = {f"correlation at {rho:g}": told for rho, told in agree.items()}
        rows += [{**row, "name": f"{title}: {row['name']}", **short} for row in table]
    finish(rows, options.json)


def agreement(tasks: Iterable[Task], base: Path, rho: float) -> float:
    """The correlation between the slopes that either kind of queries tells."""
    return torch.corrcoef(torch.tensor([slopes(task, base, rho) for task in tasks]))[0, 1].item()


def slopes(task: Task, base: Path, rho: float) -> list[float]:
    """Along the first lines of a run that stays where it is."""
    model = task.start(base)
    optimizer, measured = ft.VS2P(model.parameters(), lr=0.0, rho=rho), []
    for number in range(LINES):
        batch = task.batch(batch_indices(task.examples, task.workload.batch, 0, number))
        optimizer.step(lambda batch=batch: task.loss(model, batch))
        assert optimizer.last_step is not None
        measured.append(optimizer.last_step.gamma)
    return measured


def query(task: Task, base: Path) -> Callable[[], object]:
    model, batch = task.start(base), task.batch(torch.arange(task.workload.batch))

    @torch.inference_mode()
    def once() -> object:
        return task.loss(model, batch)

    return once


if __name__ == "__main__":
    main()
