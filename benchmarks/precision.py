"""What tuning in bfloat16 comes to, against float32: VS2P without a rate, at equal queries.

The network of the preset `digits`, 2,000 queries, five seeds; with `--data DIR`, stories15M on SST-2 as well, 300
queries, three seeds. Rows tell how probes are made and sums are rounded; all losses are computed in float32. And how
many weights steps change that move nothing. Small steps have a rate of their own, which they keep.

    python -m benchmarks.precision [--data DIR] [--json FILE]
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn

import forwardtune as ft
from benchmarks.harness import Row, arguments, finish
from forwardtune import presets
from forwardtune.experiments.under_way import batch_indices
from forwardtune.tasks import Sources, Task, TextWorkload, prepare

KINDS: dict[str, dict[str, Any]] = {
    "layer by layer, stochastic": {},
    "layer by layer, nearest": {"rounding": "nearest"},
    "in place, stochastic": {"probes": "in-place"},
    "in place, nearest": {"probes": "in-place", "rounding": "nearest"},
}
OWN = {"own lines": {"directions": "per-example"}}
SMALL = {"lr": 0.05, "rho": 0.01}
"""Steps of at most 0.05 per cent of the weights' size, where bfloat16's numbers are 0.4 to 0.8 per cent apart."""
IDLE = 200
"""Steps that move nothing."""


class Short(nn.Module):
    """A network whose weights and activations are bfloat16; its outputs are float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.model(x.to(torch.bfloat16)).float()
        return y


def started(task: Task, base: Path, short: bool) -> nn.Module:
    model = task.start(base)
    if isinstance(task.workload, TextWorkload):  # logits are float32 whatever the dtype
        return model.to(torch.bfloat16 if short else torch.float32)
    return Short(model) if short else model


def tuned(task: Task, model: nn.Module, seed: int, options: dict[str, Any]) -> float:
    """The training loss of a run of its own."""
    optimizer = ft.VS2P(model.named_parameters(), **{"lr": "auto", "seed": seed, **options})
    loss = task.losses if optimizer.by_example else task.loss
    while optimizer.queries + 4 <= task.queries:
        batch = task.batch(batch_indices(task.examples, task.workload.batch, seed, optimizer.steps))
        optimizer.step(lambda batch=batch: loss(model, batch))
    return task.evaluate(model).train_loss


def idle(task: Task, model: nn.Module, options: dict[str, Any]) -> float:
    """The part of the weights that have changed after steps that move nothing."""
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = ft.VS2P(model.parameters(), lr=0.0, **options)
    batch = task.batch(batch_indices(task.examples, task.workload.batch, 0, 0))
    for _ in range(IDLE):
        optimizer.step(lambda: task.loss(model, batch))
    changed = [(p != old).sum().item() for p, old in zip(model.parameters(), before, strict=True)]
    return sum(changed) / sum(old.numel() for old in before)


def measured(name: str, task: Task, seeds: range) -> list[Row]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base.safetensors"
        task.make_base(base)

        def measure(kind: str, baseline: str, short: bool, options: dict[str, Any]) -> None:
            losses = [tuned(task, started(task, base, short), seed, options) for seed in seeds]
            mean = fmean(losses)
            ratio = mean / next((float(row["train_loss"]) for row in rows if row["name"] == baseline), mean)
            print(f"{name}, {kind:35} loss {mean:.3f} ± {stdev(losses):.3f}, ratio {ratio:.3f}", flush=True)
            rows.append(
                {"name": f"{name}, {kind}", "baseline": baseline, "train_loss": mean, "std": stdev(losses)}
                | {"ratio": ratio}
            )

        measure("float32", f"{name}, float32", False, {})
        for kind, options in KINDS.items():
            measure(f"bfloat16, {kind}", f"{name}, float32", True, options)
        for kind, options in OWN.items():
            measure(f"float32, {kind}", f"{name}, float32, {kind}", False, options)
            measure(f"bfloat16, {kind}", f"{name}, float32, {kind}", True, options)
        small = f"{name}, float32, small steps"
        measure("float32, small steps", small, False, SMALL)
        for kind, options in KINDS.items():
            measure(f"bfloat16, small steps, {kind}", small, True, SMALL | options)
        for short in (False, True):
            for kind in ("layer by layer, nearest", "in place, nearest"):
                probes = {"probes": "layerwise", **KINDS[kind]}
                part = idle(task, started(task, base, short), probes)
                what = f"{name}, {'bfloat16' if short else 'float32'}, {kind}: weights changed by {IDLE} idle steps"
                print(f"{what}: {part:.2%}", flush=True)
                rows.append({"name": what, "ratio": part})
    return rows


def main() -> None:
    torch.set_num_threads(1)
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, metavar="DIR", help="also measure stories15M on SST-2 from this folder")
    options = parser.parse_args()
    digits = presets.load("digits").workloads[0]
    rows = measured("digits", prepare(replace(digits, queries=2000, epochs=None), Sources(), "cpu"), range(5))
    if options.data:
        sst2 = presets.load("auto/sst2").workloads[0]
        rows += measured("SST-2", prepare(sst2, Sources(options.data), "cpu"), range(3))
    finish(rows, options.json)


if __name__ == "__main__":
    main()
