"""What a gradient is worth: AdamW and VS2P on the digits preset at an equal cost.

A step of backpropagation is counted as three forward passes (one forward, a backward of twice its cost), one of VS2P as
two. Both start from the preset's base weights and see the same batches.

    python -m benchmarks.backpropagation [--json FILE]
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch

from benchmarks.harness import Row, arguments, finish
from forwardtune import presets
from forwardtune.experiments.plan import run_of
from forwardtune.experiments.result import Rate, RunResult
from forwardtune.experiments.runner import execute
from forwardtune.experiments.store import Store
from forwardtune.tasks import Sources, prepare

SEEDS = (0, 1, 2)
SHORT = 20
"""Steps of AdamW that are about as good as all of VS2P's."""


def main() -> None:
    torch.set_num_threads(1)  # so small a network gains nothing from more
    options = arguments(__doc__.splitlines()[0]).parse_args()
    spec = presets.load("digits")
    (workload,), vs2p, adamw = spec.workloads, spec.method("VS2P"), spec.method("AdamW")
    short = replace(workload, queries=SHORT * adamw.queries_per_step, evaluations=1)
    task = prepare(workload, Sources(), "cpu")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "store")
        for of, method in (workload, vs2p), (workload, adamw), (short, adamw):
            made: dict[Rate, list[RunResult]] = {}
            for lr in method.lr:
                runs = [run_of(spec, of, method, lr, seed) for seed in SEEDS]
                made[lr] = [execute(run, store, task.with_workload(of)).result for run in runs]
            lr, results = min(made.items(), key=lambda item: fmean(result.final.train_loss for result in item[1]))
            loss, accuracy = fmean(r.final.train_loss for r in results), fmean(r.score for r in results)
            cost = results[0].queries
            name = f"{method.label}, lr {lr:g}, {cost // method.queries_per_step} steps"
            print(f"{name:30} {cost:6.0f} forward passes, training loss {loss:.3f}, test accuracy {accuracy:.1%}")
            rows.append({"name": name, "forward_passes": cost, "train_loss": loss, "accuracy": accuracy})
    finish(rows, options.json)


if __name__ == "__main__":
    main()
