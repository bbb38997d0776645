"""What a gradient is worth: AdamW and VS2P on the digits preset at an equal cost.

A step of backpropagation is counted as three forward passes (one forward, a backward of twice its cost), one of VS2P as
two. Both start from the preset's base weights and see the same batches.

    python -m benchmarks.backpropagation [--json FILE]
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import fmean

import torch

from benchmarks.harness import Row, arguments, finish
from forwardtune import presets
from forwardtune.experiments.plan import Run
from forwardtune.experiments.runner import batch_indices, execute, make_base
from forwardtune.experiments.store import Store
from forwardtune.tasks import Sources, Task, prepare

RATES = (1e-3, 3e-3, 1e-2)
SEEDS = (0, 1, 2)
SHORT = 20
"""Steps of AdamW that are about as good as all of VS2P's."""


def adamw(task: Task, base: Path, lr: float, seed: int, steps: int) -> tuple[float, float]:
    """Training loss and accuracy after so many steps."""
    model = task.start(base)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        optimizer.zero_grad()
        numbers = batch_indices(task.examples, task.workload.batch, seed, step)
        task.loss(model, task.batch(numbers)).backward()
        optimizer.step()
        scheduler.step()
    scores = task.evaluate(model)
    return scores.train_loss, scores.metrics["accuracy"]


def main() -> None:
    torch.set_num_threads(1)  # so small a network gains nothing from more
    options = arguments(__doc__.splitlines()[0]).parse_args()
    spec = presets.load("digits")
    task = prepare(spec.workloads[0], Sources(), "cpu")
    runs: dict[str, list[tuple[float, float, int]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "store")
        make_base(task, store)
        base = store.base(task.base_id)
        vs2p = spec.method("VS2P")
        results = [execute(Run(spec.workloads[0], vs2p, vs2p.lr[1], s, spec.decay), store, task).result for s in SEEDS]
        runs[f"VS2P, lr {vs2p.lr[1]:g}"] = [(r.final.train_loss, r.score, r.queries) for r in results]
        for steps in (task.queries // 3, SHORT):
            by_rate = {lr: [adamw(task, base, lr, seed, steps) for seed in SEEDS] for lr in RATES}
            best = min(by_rate.items(), key=lambda item: fmean(loss for loss, _ in item[1]))
            runs[f"AdamW, lr {best[0]:g}, {steps} steps"] = [(*run, 3 * steps) for run in best[1]]
    rows: list[Row] = []
    for name, seeds in runs.items():
        loss, accuracy, cost = (fmean(column) for column in zip(*seeds, strict=True))
        print(f"{name:30} {cost:6.0f} forward passes, training loss {loss:.3f}, test accuracy {accuracy:.1%}")
        rows.append({"name": name, "forward_passes": cost, "train_loss": loss, "accuracy": accuracy})
    finish(rows, options.json)


if __name__ == "__main__":
    main()
