"""Sweeps over ten rates against `lr="auto"` at equal queries: what it costs to find a rate.

The network and methods of the preset `auto/digits`: VS2P in relative units, 2,000 queries for everything, mean final
training loss over five seeds.

    python -m benchmarks.sweep [--json FILE]
"""

from __future__ import annotations

import tempfile
from statistics import fmean, stdev

import torch

from benchmarks.harness import Row, arguments, finish
from forwardtune import presets
from forwardtune.experiments.plan import run_of
from forwardtune.experiments.result import RunResult
from forwardtune.experiments.runner import execute
from forwardtune.experiments.scoring import smoothed
from forwardtune.experiments.store import Store
from forwardtune.experiments.sweep import plan_sweep, sweep
from forwardtune.tasks import Sources, Tasks

QUERIES = 2000
SEEDS = range(5)


def row_of(name: str, results: list[RunResult], queries: list[int]) -> Row:
    """What the runs came to, with the queries of everything that was needed for them."""
    losses = [float("inf") if result.diverged else smoothed(result)[-1] for result in results]
    row: Row = {"name": name, "train_loss": fmean(losses), "std": stdev(losses), "queries": max(queries)}
    rates = ", ".join(f"{result.run.lr}" for result in results)
    print(f"{name:14} training loss {row['train_loss']:.3f} ± {row['std']:.3f}, {row['queries']:,} queries, lr {rates}")
    return row


def main() -> None:
    torch.set_num_threads(1)
    options = arguments(__doc__.splitlines()[0]).parse_args()
    spec, tasks = presets.load("auto/digits"), Tasks(Sources(), "cpu")
    (workload,), auto, grid = spec.workloads, spec.method("VS2P auto"), spec.method("VS2P relative")
    with tempfile.TemporaryDirectory() as folder:
        store = Store(f"{folder}/store")
        runs = [run_of(spec, workload, auto, "auto", seed) for seed in SEEDS]
        results = [execute(run, store, tasks[workload]).result for run in runs]
        rows = [row_of("auto", results, [result.queries for result in results])]
        for eta in (2, 3, 4, 5):
            plans = [plan_sweep(spec, workload, grid, queries=QUERIES, seed=seed, eta=eta) for seed in SEEDS]
            outcomes = [sweep(plan, store, tasks) for plan in plans]
            winners = [outcome.winner for outcome in outcomes if outcome.winner]
            rows.append(row_of(f"sweep, eta {eta}", winners, [outcome.queries for outcome in outcomes]))
    finish(rows, options.json)


if __name__ == "__main__":
    main()
