"""Resuming a long run of a small model from its ledger alone, beside making its steps, and the memory that takes.

python -m benchmarks.resume [--steps N] [--json FILE]
"""

from __future__ import annotations

import resource
import tempfile
import time
from pathlib import Path

import torch

import forwardtune as ft
from benchmarks.harness import Row, arguments, finish, show

LOSSES = 4096


def made(path: Path, steps: int, lr: float | str) -> None:
    """A run that minimizes a sum of squares with noise."""
    weights = {"x": torch.ones(8)}
    x, noise = weights["x"], torch.rand(LOSSES, generator=torch.Generator().manual_seed(0)).tolist()
    with ft.Ledger(path, weights) as ledger:
        optimizer = ft.VS2P(weights.values(), lr=lr, recorder=ledger)
        for _ in range(steps):
            optimizer.step(lambda: float(x @ x) + noise[optimizer.steps % LOSSES])


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000, help="of the run (default 100000)")
    options = parser.parse_args()
    rows: list[Row] = []
    for name, lr in (("VS2P", 1.0), ("VS2P auto", "auto")):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run.ledger"
            start = time.perf_counter()
            made(path, options.steps, lr)
            making = time.perf_counter() - start
            before, size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, path.stat().st_size / 1e6
            start = time.perf_counter()
            optimizer, step = ft.resume({"x": torch.ones(8)}, path)
            resuming = time.perf_counter() - start
            optimizer.recorder.close()
            assert step == options.steps
            peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3
        print(f"{name}: a ledger of {size:.1f} MB; the peak of memory rose by {peak:.0f} MB while resuming")
        baseline = f"{name}, made"
        rows += [
            {"name": baseline, "baseline": baseline, "ratio": 1.0, "seconds": making},
            {"name": f"{name}, resumed", "baseline": baseline, "ratio": resuming / making, "seconds": resuming},
        ]
    show(f"a run of {options.steps:,} steps", rows)
    finish(rows, options.json)


if __name__ == "__main__":
    main()
