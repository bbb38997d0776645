"""Time to a loss on pretrained models: VS2P without a rate, against the published MeZO recipe.

    python -m benchmarks.clock --data DIR [--only NAME] [--json FILE]

Both tune all weights from the same base and see the same batches of one seed. The recipe has its own noise, four sweeps
of it a step, and the best of four rates, found on a part of its steps, which is not charged to it. The goal is the
lowest loss on fixed training examples that the recipe comes to in its steps; told are the times at which either is
first there, if VS2P is in as much time as the recipe has. Both are evaluated after every tenth step, which is not
timed.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from torch import nn

import forwardtune as ft
from benchmarks.harness import Row, finish, ratios, show, without_rounds
from benchmarks.models import Closure, published_mezo
from forwardtune import presets
from forwardtune.experiments.under_way import batch_indices
from forwardtune.tasks import Sources, Task, prepare

PILOT, RATES, STRIDE = 75, 4, 10
"""The recipe's steps by which its rates are judged; how many rates; the steps between evaluations."""
SEED = 0
THEIRS, OURS = "published MeZO", "VS2P auto"
Looks = list[tuple[float, float]]
"""Seconds and the loss at every evaluation."""


class Workload(NamedTuple):
    """A workload of a preset, the lowest rate that the recipe tries there (each other is twice the one before), how
    many steps it makes, and how many examples a loss is evaluated on."""

    preset: str
    name: str
    lowest: float
    steps: int
    examples: int


WORKLOADS = {
    "MNIST, ResNet18": Workload("decide/mnist-resnet18", "mnist-resnet18", 1e-5, 1200, 500),
    "CIFAR-10, ResNet18": Workload("decide/cifar10-resnet18", "cifar10-resnet18", 1e-5, 1200, 500),
    "texts, stories15M": Workload("gains/texts", "texts", 1e-6, 300, 100),
}


class Contest:
    """Steps of either kind from the base weights of a workload, timed."""

    def __init__(self, task: Task, base: Path) -> None:
        self.task, self.base = task, base

    def looks(
        self,
        step_of: Callable[[nn.Module, Closure], Callable[[], object]],
        *,
        steps: float = math.inf,
        time_limit: float = math.inf,
    ) -> Looks:
        """The first of many steps, up to a number of them or of seconds."""
        model = self.task.start(self.base)
        step = step_of(model, lambda: self.task.loss(model, self.batch))
        seconds, made = 0.0, []
        number = 0
        while number < steps and seconds < time_limit:
            self.batch = self.task.batch(batch_indices(self.task.examples, self.task.workload.batch, SEED, number))
            begun = time.perf_counter()
            step()
            seconds += time.perf_counter() - begun
            number += 1
            if number % STRIDE == 0:
                made.append((seconds, self.task.evaluate(model).train_loss))
        return made

    def recipe(self, lr: float, steps: int) -> Looks:
        return self.looks(lambda model, closure: published_mezo(model, closure, lr), steps=steps)

    def vs2p(self, time_limit: float) -> Looks:
        def step_of(model: nn.Module, closure: Closure) -> Callable[[], object]:
            optimizer = ft.VS2P(model.parameters(), lr="auto", seed=SEED)
            return lambda: optimizer.step(closure)

        return self.looks(step_of, time_limit=time_limit)


def lowest(looks: Looks) -> float:
    """The lowest loss; infinite if none is finite."""
    return min((loss for _, loss in looks if math.isfinite(loss)), default=math.inf)


def first(looks: Looks, goal: float) -> tuple[int, float] | None:
    """The steps and the seconds after which the loss is first at the goal."""
    return next(((STRIDE * (i + 1), seconds) for i, (seconds, loss) in enumerate(looks) if loss <= goal), None)


def main() -> None:
    parser = without_rounds(__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with the data and weights of the presets")
    parser.add_argument("--only", choices=WORKLOADS, help="one workload")
    options = parser.parse_args()
    rows: list[Row] = []
    for title in [options.only] if options.only else WORKLOADS:
        table = compared(WORKLOADS[title], options.data)
        if table:
            show(f"time to the lowest loss of the recipe, {title}", table)
        rows += [{**row, "name": f"{title}: {row['name']}", "baseline": f"{title}: {THEIRS}"} for row in table]
    finish(rows, options.json)


def compared(workload: Workload, data: Path) -> list[Row]:
    named = presets.load(workload.preset).workload(workload.name)
    task = prepare(replace(named, train_examples=workload.examples, test_examples=1), Sources(data), "cpu")
    with tempfile.TemporaryDirectory() as folder:
        contest = Contest(task, Path(folder) / "base.safetensors")
        start = task.evaluate(task.make_base(contest.base)).train_loss
        tried = {lr: contest.recipe(lr, PILOT)[-1][1] for lr in (workload.lowest * 2**k for k in range(RATES))}
        best = min(tried, key=lambda lr: tried[lr] if math.isfinite(tried[lr]) else math.inf)
        theirs = contest.recipe(best, workload.steps)
        ours = contest.vs2p(theirs[-1][0])
    goal = lowest(theirs)
    print(f"loss at the start {start:.3f}; the recipe by {PILOT} steps:")
    print(", ".join(f"{loss:.3f} at lr {lr:g}" for lr, loss in tried.items()))
    print(f"by {workload.steps} steps at most {goal:.3f} at lr {best:g}")
    print(f"in that time {OURS} makes {STRIDE * len(ours)} steps")
    reached = {name: first(looks, goal) for name, looks in ((THEIRS, theirs), (OURS, ours))}
    print(
        ", ".join(
            f"{name}: {'never there' if at is None else f'there by {at[0]} steps'}" for name, at in reached.items()
        )
    )
    if not goal < start or None in reached.values():
        print("no ratio: one of them never is at a loss below that at the start")
        return []
    return ratios({name: at[1] for name, at in reached.items() if at}, THEIRS)


if __name__ == "__main__":
    main()
