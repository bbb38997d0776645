"""What `lr="auto"` does not depend on: where its survey starts, the units of the loss, the units of the layers.

The network of the preset `digits`, 2,000 queries, mean final training loss over five seeds; a row changes one thing.

    python -m benchmarks.auto [--json FILE]
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from unittest.mock import patch

import torch
from torch import nn

import forwardtune as ft
from benchmarks.harness import Row, arguments, finish
from forwardtune import auto, presets
from forwardtune.experiments.under_way import batch_indices
from forwardtune.tasks import Sources, Task, prepare

QUERIES = 2000
SEEDS = range(5)


def as_it_is(model: nn.Module) -> None:
    pass


def rescaled(model: nn.Module) -> None:
    """Layers ten times larger and smaller in turn, so that the network computes the same."""
    for name, factor in (("conv1", 10.0), ("conv2", 0.1), ("linear", 10.0), ("head", 0.1)):
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Conv2d | nn.Linear)
        layer.weight.data *= factor
        if name in ("conv1", "linear") and layer.bias is not None:
            layer.bias.data *= 10.0


def tuned(
    task: Task, base: Path, seed: int, units: float = 1.0, change: Callable[[nn.Module], None] = as_it_is
) -> float:
    """The training loss of a run of its own."""
    model = task.start(base)
    change(model)
    optimizer = ft.VS2P(model.named_parameters(), lr="auto", seed=seed)
    while optimizer.queries + 4 <= QUERIES:
        batch = task.batch(batch_indices(task.examples, task.workload.batch, seed, optimizer.steps))
        optimizer.step(lambda batch=batch: units * task.loss(model, batch))
    return task.evaluate(model).train_loss


def main() -> None:
    torch.set_num_threads(1)
    options = arguments(__doc__.splitlines()[0]).parse_args()
    task = prepare(presets.load("digits").workloads[0], Sources(), "cpu")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base.safetensors"
        task.make_base(base)

        def measure(name: str, start: float = auto.START, **changes: object) -> None:
            with patch.object(auto, "START", start):
                losses = [tuned(task, base, seed, **changes) for seed in SEEDS]  # type: ignore[arg-type]
            ratio = fmean(losses) / rows[0]["train_loss"] if rows else 1.0  # type: ignore[operator]
            print(f"{name:40} training loss {fmean(losses):.3f} ± {stdev(losses):.3f}, ratio {ratio:.2f}", flush=True)
            rows.append({"name": name, "train_loss": fmean(losses), "std": stdev(losses), "ratio": ratio})

        measure("as it is, survey from 0.01")
        for start in (1e-4, 1e-3, 1e-1):
            measure(f"survey from {start:g}", start)
        for units in (1e-3, 1e3):
            measure(f"the loss times {units:g}", units=units)
        measure("layers times 10 and 1/10 in turn", change=rescaled)
    finish(rows, options.json)


if __name__ == "__main__":
    main()
