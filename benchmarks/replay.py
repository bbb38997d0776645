"""Replaying a recorded run, against the memory limit, and what recording adds to a step.

    python -m benchmarks.replay [--json FILE] [--steps N]

Replay: the time of one recorded two-point step over the 124M weights of GPT-2, against torch's in-place addition of a
number to them, and the peak memory besides the weights; and a step over 148 small tensors, in absolute and relative
units and with `lr="auto"`, whose reviews are replayed too. Recording: the time spent in the ledger in steps of a small
convolutional network (21,546 weights, batches of 64), against those steps; and, in the same steps, the time it takes
just to store the same bytes: appended to the journal, or inserted into an SQLite database in WAL mode.
"""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import tempfile
import time
from argparse import SUPPRESS
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import forwardtune as ft
from benchmarks.harness import arguments, finish, interleaved, ratios, show
from benchmarks.models import deep, digits_network
from benchmarks.noise import gpt2_shapes
from forwardtune.ledger import read
from forwardtune.ledger.format import Row, pack
from forwardtune.ledger.journal import Journal
from forwardtune.ledger.replay import advance
from forwardtune.noise import DISTRIBUTIONS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def named(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {f"p{i}": torch.randn(shape, dtype=dtype).mul_(0.02) for i, shape in enumerate(gpt2_shapes())}


def record(path: Path, tensors: dict[str, torch.Tensor], steps: int, **settings: Any) -> None:
    """A run with random losses: what a step costs to replay does not depend on them."""
    generator = torch.Generator().manual_seed(0)
    with ft.Ledger(path, tensors) as ledger:
        optimizer = ft.VS2P(tensors.values(), **{"lr": 1e-3, **settings}, recorder=ledger)
        for _ in range(steps):
            optimizer.step(lambda: torch.rand((), generator=generator))


def replayed(path: Path, weights: list[torch.Tensor], steps: int) -> Callable[[], None]:
    """A replay of a recorded run."""
    run = read(path)
    run.anchors = []  # the weights have changed by now; only the time matters
    return lambda: advance(run, weights, 0, steps, backend="auto")


def replays(folder: Path, steps: int, rounds: int) -> list[dict]:
    rows = []
    for name, dtype in DTYPES.items():
        tensors = named(dtype)
        weights = list(tensors.values())
        candidates = {"in-place add": lambda weights=weights: [t.add_(1e-3) for _ in range(9) for t in weights]}
        for distribution in DISTRIBUTIONS if dtype == torch.float32 else ("rademacher",):
            path = folder / f"{name}.{distribution}"
            record(path, tensors, steps, distribution=distribution)
            candidates[f"replay, {distribution}"] = replayed(path, weights, steps)
        seconds = interleaved(candidates, rounds)
        seconds = {key: value / (9 if key == "in-place add" else steps) for key, value in seconds.items()}
        table = ratios(seconds, "in-place add")
        show(f"one recorded two-point step, 124M {name} weights", table)
        rows += [{**row, "name": f"{name}: {row['name']}", "baseline": f"{name}: {row['baseline']}"} for row in table]
    return rows


def small_replays(folder: Path, rounds: int, steps: int = 500) -> list[dict]:
    """Units make no difference; `lr="auto"` makes about three times the moves."""
    runs = {"absolute": {"scale": "absolute"}, "relative": {"scale": "relative"}, "auto": {"lr": "auto"}}
    candidates = {}
    for name, settings in runs.items():
        model, _ = deep()
        tensors = dict(model.named_parameters())
        record(folder / f"small.{name}", tensors, steps, **settings)
        candidates[f"replay, {name}"] = replayed(folder / f"small.{name}", list(tensors.values()), steps)
    seconds = {key: value / steps for key, value in interleaved(candidates, rounds).items()}
    rows = ratios(seconds, "replay, absolute")
    show("one recorded two-point step, 148 small tensors", rows)
    return [{**row, "name": f"small: {row['name']}", "baseline": f"small: {row['baseline']}"} for row in rows]


def peak(path: Path) -> None:
    """Prints how far memory grows during a replay, in bytes (on Linux)."""
    tensors = named(torch.float32)
    ft.replay({"x": torch.zeros(600)}, path.with_name("small"))  # loads the code
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    ft.replay(tensors, path)
    print(_status("VmHWM") - before)


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def memory(folder: Path, steps: int) -> list[dict]:
    path = folder / "memory"
    record(path, named(torch.float32), steps)
    record(path.with_name("small"), {"x": torch.zeros(600)}, 2)
    command = [sys.executable, "-m", "benchmarks.replay", "--peak", path]
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    weights = sum(tensor.nbytes for tensor in named(torch.float32).values())
    sizes = {"weights": weights, "replay, besides them": grown}
    rows = [{"name": n, "baseline": "weights", "ratio": s / weights, "megabytes": s / 1e6} for n, s in sizes.items()]
    show("peak memory of a replay, 124M float32 weights", rows)
    return rows


class Timed:
    """A recorder that times another recorder, or a function that stores the packed step."""

    def __init__(self, ledger: ft.Ledger | None = None, store: Callable[[int, bytes], object] | None = None) -> None:
        self.ledger, self.store, self.seconds = ledger, store, 0.0

    def begin(self, optimizer):
        if self.ledger:
            start = time.perf_counter()
            self.ledger.begin(optimizer)
            self.seconds += time.perf_counter() - start

    def record(self, optimizer, record):
        numbers = b"" if self.ledger else pack(record, False, [])
        start = time.perf_counter()
        if self.ledger:
            self.ledger.record(optimizer, record)
        else:
            self.store(record.step, numbers)
        self.seconds += time.perf_counter() - start


def sqlite(path: Path) -> Callable[[int, bytes], object]:
    database = sqlite3.connect(path, isolation_level=None)
    for pragma in ("page_size = 1024", "locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = NORMAL"):
        database.execute(f"PRAGMA {pragma}")
    database.execute("CREATE TABLE steps (step INTEGER PRIMARY KEY, crc INTEGER, numbers BLOB, settings TEXT)")
    return lambda step, numbers: database.execute("INSERT INTO steps VALUES (?, ?, ?, ?)", (step, 0, numbers, None))


def journal(path: Path) -> Callable[[int, bytes], object]:
    store = Journal.create(path, "{}", "timed")
    return lambda step, numbers: store.append([Row(numbers)], step)


def recording(folder: Path, steps: int, rounds: int) -> list[dict]:
    """Mean times over stretches of steps, which all candidates run in turn; the best stretch of each counts."""
    torch.manual_seed(0)
    model, x, y = digits_network(), torch.rand(64, 1, 8, 8), torch.randint(10, (64,))
    policies = {"timed (default)": "timed", "every step": 1, "every 100 steps": 100, "never": "never"}
    timed = {
        f"ledger, fsync {name}": Timed(ft.Ledger(folder / name, model, fsync=policy))
        for name, policy in policies.items()
    }
    timed["storing alone, journal"] = Timed(store=journal(folder / "journal"))
    timed["storing alone, SQLite"] = Timed(store=sqlite(folder / "sqlite"))
    optimizers = {name: ft.VS2P(model.parameters(), lr=1e-3, recorder=recorder) for name, recorder in timed.items()}

    def stretch(name: str, count: int) -> tuple[float, float]:
        timed[name].seconds = 0.0
        start = time.perf_counter()
        for _ in range(count):
            optimizers[name].step(lambda: F.cross_entropy(model(x), y))
        spent = timed[name].seconds
        return spent / count, (time.perf_counter() - start - spent) / count

    best = {name: stretch(name, 50) for name in timed}
    for _ in range(rounds):
        for name in timed:
            best[name] = min(best[name], stretch(name, steps), key=lambda pair: pair[0] / pair[1])
    rows = [{"name": "a step", "baseline": "a step", "ratio": 1.0, "seconds": min(rest for _, rest in best.values())}]
    rows += [{"name": n, "baseline": "a step", "ratio": s / rest, "seconds": s} for n, (s, rest) in best.items()]
    show("what recording adds to a step of a small network", rows)
    return rows


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=64, help="recorded steps that are replayed (default 64)")
    parser.add_argument("--peak", type=Path, help=SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        peak(options.peak)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = recording(folder, 400, options.rounds)
        rows += small_replays(folder, options.rounds)
        rows += replays(folder, options.steps, options.rounds)
        rows += memory(folder, options.steps)
    finish(rows, options.json)


if __name__ == "__main__":
    main()
