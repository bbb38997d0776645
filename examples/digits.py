"""Fine-tunes a small network on handwritten digits with VS2P, MeZO and STP, at an equal number of forward passes.

    python -m examples.digits            one run of each method, a table and a plot
    python -m examples.digits --grid     every rate of each method's grid, three seeds, best rates compared

The network is first trained by backpropagation, for a few seconds, on the same digits shifted by a pixel; tuning it to
the digits where they belong is the task. Training loss is that of the whole training set.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, track
from rich.table import Table
from torch import Tensor, nn

import forwardtune as ft

QUERIES = 4000
BATCH = 64
EVALUATIONS = 40
SEEDS = range(3)

GRIDS: dict[str, list[float]] = {
    "VS2P": [8.0, 11.0, 16.0, 22.0, 32.0],
    "MeZO": [2.5e-4, 3.5e-4, 5e-4, 7e-4, 1e-3],
    "STP": [4e-3, 5.6e-3, 8e-3, 1.1e-2, 1.6e-2],
}
BEST = {"VS2P": 22.0, "MeZO": 5e-4, "STP": 8e-3}
METHODS = {"VS2P": ft.VS2P, "MeZO": ft.MeZO, "STP": ft.STP}
QUERIES_PER_STEP = {"VS2P": 2, "MeZO": 2, "STP": 3}


@dataclass
class Digits:
    """Images of 8 x 8 pixels and their labels."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor

    @staticmethod
    @cache
    def load() -> Digits:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
        y = torch.tensor(labels)
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
        train, test = order[:1400], order[1400:]
        return Digits(x[train], y[train], x[test], y[test])

    def batches(self, seed: int, size: int = BATCH) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches without end, drawn epoch by epoch."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            for chosen in torch.randperm(len(self.train_y), generator=generator).split(size):
                if len(chosen) == size:
                    yield self.train_x[chosen], self.train_y[chosen]


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


@cache
def pretrained() -> dict[str, Tensor]:
    """Weights after backpropagation on digits shifted by one pixel, down and to the right."""
    torch.manual_seed(0)
    data, model = Digits.load(), network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _, (x, y) in zip(range(400), data.batches(seed=0), strict=False):
        optimizer.zero_grad()
        F.cross_entropy(model(x.roll((1, 1), dims=(2, 3))), y).backward()
        optimizer.step()
    return model.state_dict()


@torch.inference_mode()
def evaluate(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Loss and accuracy."""
    logits = model(x)
    return F.cross_entropy(logits, y).item(), (logits.argmax(1) == y).float().mean().item()


@dataclass
class Run:
    """A method's tuning run."""

    method: str
    lr: float
    seed: int
    queries: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    accuracy: float = 0.0
    seconds: float = 0.0


def tune(
    method: str, lr: float, seed: int, *, window: int = 50, progress: Callable[[int, float], None] | None = None
) -> Run:
    """Tunes the pretrained network with QUERIES forward passes, the rate following a cosine to zero.

    A run whose loss stops being finite ends there, with an infinite loss.
    """
    data, model = Digits.load(), network()
    model.load_state_dict(pretrained())
    settings = {"window": window} if method == "VS2P" else {}
    optimizer = METHODS[method](model.parameters(), lr=lr, seed=seed, distribution="normal", **settings)
    steps = QUERIES // QUERIES_PER_STEP[method]
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    run, start = Run(method, lr, seed), time.perf_counter()

    def note() -> None:
        loss, run.accuracy = (
            evaluate(model, data.train_x, data.train_y)[0],
            evaluate(model, data.test_x, data.test_y)[1],
        )
        run.queries.append(optimizer.queries)
        run.losses.append(loss)
        if progress:
            progress(optimizer.queries, loss)

    try:
        for step, (x, y) in zip(range(steps), data.batches(seed), strict=False):
            if step % (steps // EVALUATIONS) == 0:
                note()
            optimizer.step(lambda: F.cross_entropy(model(x), y))  # noqa: B023
            scheduler.step()
        note()
    except ft.NonFiniteLossError:
        run.losses[-1] = math.inf
    run.seconds = time.perf_counter() - start
    return run


def one_of_each(console: Console, window: int) -> list[Run]:
    """One run of each method at its best rate, with a live bar for each."""
    runs = []
    columns = TextColumn("{task.description:<5}"), BarColumn(), MofNCompleteColumn(), TextColumn("queries")
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.3f}"), TimeElapsedColumn(), console=console) as bars:
        for method, lr in BEST.items():
            total = QUERIES // QUERIES_PER_STEP[method] * QUERIES_PER_STEP[method]
            bar = bars.add_task(method, total=total, loss=math.nan)

            def show(queries: int, loss: float) -> None:
                bars.update(bar, completed=queries, loss=loss)  # noqa: B023

            runs.append(tune(method, lr, seed=0, window=window, progress=show))
    return runs


def whole_grid(console: Console, window: int) -> list[Run]:
    """Every rate and seed, two at a time; the runs of each method's best rate (by mean final training loss)."""
    jobs = [(method, lr, seed) for method, grid in GRIDS.items() for lr in grid for seed in SEEDS]
    with ProcessPoolExecutor(
        2, mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        futures = [pool.submit(tune, *job, window=window) for job in jobs]
        runs = [future.result() for future in track(futures, "all rates, three seeds", console=console)]
    table = Table("method", "lr", *(f"loss, seed {seed}" for seed in SEEDS), "mean")
    best = []
    for method, grid in GRIDS.items():
        rows = {lr: [run for run in runs if (run.method, run.lr) == (method, lr)] for lr in grid}
        means = {lr: statistics.fmean(run.losses[-1] for run in row) for lr, row in rows.items()}
        winner = min(grid, key=means.__getitem__)
        best += rows[winner]
        for lr, row in rows.items():
            cells = [f"{run.losses[-1]:.3g}" for run in row]
            table.add_row(method, f"{lr:g}", *cells, f"{means[lr]:.3g}", style="bold" if lr == winner else "")
    console.print(table)
    return best


def summary(runs: list[Run]) -> Table:
    table = Table("method", "lr", "queries", "training loss", "test accuracy", "seconds", title="digits, equal queries")
    for method in METHODS:
        mine = [run for run in runs if run.method == method]
        loss, accuracy = (
            statistics.fmean(values) for values in zip(*((r.losses[-1], r.accuracy) for r in mine), strict=True)
        )
        seconds = statistics.fmean(run.seconds for run in mine)
        table.add_row(
            method, f"{mine[0].lr:g}", f"{mine[0].queries[-1]:,}", f"{loss:.3f}", f"{accuracy:.1%}", f"{seconds:.1f}"
        )
    return table


def plot(runs: list[Run], path: Path) -> None:
    """Training loss against queries, the mean over seeds, with their range as a band."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for method, color in zip(METHODS, ("#0b6e4f", "#c8553d", "#4a6fa5"), strict=True):
        mine = [run for run in runs if run.method == method]
        curves = list(zip(*(run.losses for run in mine), strict=True))
        middle = [statistics.fmean(values) for values in curves]
        label = f"{method}, lr {mine[0].lr:g}: {middle[-1]:.2f}"
        axes.plot(mine[0].queries, middle, color=color, linewidth=2, label=label)
        axes.fill_between(mine[0].queries, [min(v) for v in curves], [max(v) for v in curves], color=color, alpha=0.15)
    axes.set(yscale="log", xlabel="forward passes", ylabel="training loss")
    axes.set_yticks([0.5, 0.7, 1, 2, 3, 5], labels=["0.5", "0.7", "1", "2", "3", "5"])
    axes.minorticks_off()
    axes.set_title("A small network tuned to digits with forward passes only", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--grid", action="store_true", help="try every rate with three seeds, not just the best with one"
    )
    parser.add_argument(
        "--plot", type=Path, default=Path("results/digits.png"), metavar="FILE", help="where the plot goes"
    )
    parser.add_argument("--window", type=int, default=50, help="VS2P's window of recent gammas (default 50)")
    options = parser.parse_args()
    console = Console()
    with console.status("compiling the noise and pretraining on shifted digits"):
        data, model = Digits.load(), network()
        ft.VS2P(model.parameters(), distribution="normal").step(lambda: 0.0)
        model.load_state_dict(pretrained())
        loss, accuracy = evaluate(model, data.test_x, data.test_y)
    parameters = sum(p.numel() for p in model.parameters())
    console.print(
        f"Pretrained on shifted digits: test loss {loss:.2f}, accuracy {accuracy:.1%}, {parameters:,} weights."
    )
    runs = (whole_grid if options.grid else one_of_each)(console, options.window)
    console.print(summary(runs))
    plot(runs, options.plot)
    console.print(f"Plot: {options.plot}")


if __name__ == "__main__":
    main()
