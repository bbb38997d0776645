"""Time to a loss on pretrained models: what forwardtune does without a rate, against the published MeZO recipe.

    python -m benchmarks.clock --data DIR [--only NAME] [--json FILE]

All begin with the same model and see the same batches of one seed. The recipe has its own noise, four sweeps of it a
step, and the best of four rates, found on a part of its steps, which is not charged to it. All compute as the preset
says, in bfloat16 on texts.
The goal is the lowest loss on fixed test examples that the recipe comes to in its steps. Told are the times at
which each is first there: the recipe; VS2P, which has as much time as the recipe, from the same weights; and a fit by
forward passes, of a wide head or of how answers are read, which is what comes before tuning where labels are learned.
The time of the fit includes loading the model and one evaluation; steps are evaluated after every tenth, which is not
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

PILOT, RATES, STRIDE = 50, 4, 10
"""The recipe's steps by which its rates are judged; how many rates; the steps between evaluations."""
SEED = 0
THEIRS, OURS, FITTED = "published MeZO", "VS2P auto", "a fit"
FIT = 2000
"""Examples."""
Looks = list[tuple[float, float]]
"""Seconds and the loss at every evaluation."""


class Workload(NamedTuple):
    """A workload of a preset, the lowest rate that the recipe tries there (each other is twice the one before), how
    many steps it makes, how many examples a loss is evaluated on, and the settings of a fit, if there is one."""

    preset: str
    name: str
    lowest: float
    steps: int
    examples: int
    fit: dict[str, object]


WIDE = {"fit": FIT, "head": "wide"}
WORKLOADS = {
    "MNIST, ResNet18": Workload("decide/mnist-resnet18", "mnist-resnet18", 1e-5, 400, 500, WIDE),
    "CIFAR-10, ResNet18": Workload("decide/cifar10-resnet18", "cifar10-resnet18", 1e-5, 400, 500, WIDE),
    "SST-2, MiniLM": Workload("gains/glue", "sst2", 1e-6, 200, 500, {"fit": FIT}),
    "texts, stories15M": Workload("gains/texts", "texts", 1e-6, 200, 100, {"fit": 300}),
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
                made.append((seconds, self.task.evaluate(model).test_loss))
        return made

    def recipe(self, lr: float, steps: int) -> Looks:
        return self.looks(lambda model, closure: published_mezo(model, closure, lr), steps=steps)

    def fitted(self, settings: dict[str, object]) -> Looks:
        task = prepare(replace(self.task.workload, **settings), self.task.sources, "cpu")  # type: ignore[arg-type]
        begun = time.perf_counter()
        model = task.make_base(self.base.with_name("fitted.safetensors"))
        return [(time.perf_counter() - begun, task.evaluate(model).test_loss)]

    def vs2p(self, time_limit: float) -> Looks:
        def step_of(model: nn.Module, closure: Closure) -> Callable[[], object]:
            optimizer = ft.VS2P(model.parameters(), lr="auto", seed=SEED)
            return lambda: optimizer.step(closure)

        return self.looks(step_of, time_limit=time_limit)


def lowest(looks: Looks) -> float:
    """The lowest loss; infinite if none is finite."""
    return min((loss for _, loss in looks if math.isfinite(loss)), default=math.inf)


def first(looks: Looks, goal: float) -> float | None:
    """The seconds after which the loss is first at the goal."""
    return next((seconds for seconds, loss in looks if loss <= goal), None)


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
    named = replace(named, fit=0, train_examples=1, test_examples=workload.examples)
    task = prepare(named, Sources(data), "cpu")
    with tempfile.TemporaryDirectory() as folder:
        contest = Contest(task, Path(folder) / "base.safetensors")
        start = task.evaluate(task.make_base(contest.base)).test_loss
        tried = {lr: contest.recipe(lr, PILOT)[-1][1] for lr in (workload.lowest * 2**k for k in range(RATES))}
        best = min(tried, key=lambda lr: tried[lr] if math.isfinite(tried[lr]) else math.inf)
        looks = {THEIRS: contest.recipe(best, workload.steps)}
        looks[OURS] = contest.vs2p(looks[THEIRS][-1][0])
        if workload.fit:
            looks[FITTED] = contest.fitted(workload.fit)
    goal = lowest(looks[THEIRS])
    print(f"loss at the start {start:.3f}; the recipe by {PILOT} steps:")
    print(", ".join(f"{loss:.3f} at lr {lr:g}" for lr, loss in tried.items()))
    print(f"by {workload.steps} steps at most {goal:.3f} at lr {best:g}")
    for name, made in looks.items():
        steps = "" if name == FITTED else f" in {STRIDE * len(made)} steps"
        print(f"{name}: at most {lowest(made):.3f}{steps} and {made[-1][0]:.0f} s")
    if not goal < start:
        print("no ratio: the recipe is never at a loss below that at the start")
        return []
    reached = {name: at for name, made in looks.items() if (at := first(made, goal)) is not None}
    for name in looks.keys() - reached.keys():
        print(f"{name} never is at the recipe's lowest loss, and has no row")
    if best in (min(tried), max(tried)):
        print(f"the recipe's best rate is an end of its grid, {best:g}: beyond it another might be better")
    return ratios(reached, THEIRS)


if __name__ == "__main__":
    main()
