"""Time to a loss on pretrained models: VS2P without a rate, against the published MeZO recipe.

    python -m benchmarks.clock --data DIR [--only NAME] [--json FILE]

Both tune all weights from the same base and see the same batches. The recipe has its own noise, four sweeps of it a
step, and the best of four rates, found on a quarter of its steps, which is not charged to it. Told is the time at which
VS2P's loss on fixed training examples first is where the recipe's ended. Evaluations are not timed.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from torch import nn

import forwardtune as ft
from benchmarks.harness import Row, arguments, finish, ratios, show
from benchmarks.models import Closure, published_mezo
from forwardtune import presets
from forwardtune.experiments.under_way import batch_indices
from forwardtune.tasks import Sources, Task, prepare

STEPS, PILOT, RATES = 300, 75, 4
"""Of the recipe: its steps, those with which a rate is judged, and how many rates, each twice the one before."""
LOOKS = 30
"""Evaluations of VS2P in as many steps as the recipe has."""
SEED = 0
THEIRS, OURS = "published MeZO", "VS2P auto"


class Workload(NamedTuple):
    """A workload of a preset, and the lowest rate that the recipe tries there."""

    preset: str
    name: str
    lowest: float


WORKLOADS = {
    "MNIST, ResNet18": Workload("decide/mnist-resnet18", "mnist-resnet18", 2e-5),
    "CIFAR-10, ResNet18": Workload("decide/cifar10-resnet18", "cifar10-resnet18", 2e-5),
    "texts, stories15M": Workload("gains/texts", "texts", 1e-6),
}


class Contest:
    """Steps of either kind from the base weights of a workload, timed."""

    def __init__(self, task: Task, base: Path) -> None:
        self.task, self.base = task, base

    def start(self) -> nn.Module:
        return self.task.start(self.base)

    def loss(self, model: nn.Module) -> float:
        return self.task.evaluate(model).train_loss

    def timed(self, step: Callable[[], object], batches: range) -> float:
        """The seconds that a step takes on each of these batches."""
        seconds = 0.0
        for number in batches:
            self.batch = self.task.batch(batch_indices(self.task.examples, self.task.workload.batch, SEED, number))
            begun = time.perf_counter()
            step()
            seconds += time.perf_counter() - begun
        return seconds

    def closure(self, model: nn.Module) -> Closure:
        return lambda: self.task.loss(model, self.batch)

    def recipe(self, lr: float, steps: int) -> tuple[float, float]:
        """Where the published recipe ends, and the seconds of its steps."""
        model = self.start()
        seconds = self.timed(published_mezo(model, self.closure(model), lr), range(steps))
        return self.loss(model), seconds

    def vs2p(self, goal: float) -> tuple[int, float]:
        """After how many queries VS2P is at the goal, and after how many seconds; infinite if it never is."""
        model = self.start()
        optimizer = ft.VS2P(model.parameters(), lr="auto", seed=SEED)
        closure, seconds, stride = self.closure(model), 0.0, STEPS // LOOKS
        for look in range(LOOKS):
            seconds += self.timed(lambda: optimizer.step(closure), range(look * stride, (look + 1) * stride))
            if self.loss(model) <= goal:
                return optimizer.queries, seconds
        return optimizer.queries, float("inf")


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with the data and weights of the presets")
    parser.add_argument("--only", choices=WORKLOADS, help="one workload")
    options = parser.parse_args()
    rows: list[Row] = []
    for title in [options.only] if options.only else WORKLOADS:
        table = compared(WORKLOADS[title], options.data)
        show(f"time to the loss at which the recipe ends, {title}", table)
        rows += [{**row, "name": f"{title}: {row['name']}", "baseline": f"{title}: {THEIRS}"} for row in table]
    finish(rows, options.json)


def compared(workload: Workload, data: Path) -> list[Row]:
    spec = presets.load(workload.preset)
    task = prepare(spec.workload(workload.name), Sources(data), "cpu")
    with tempfile.TemporaryDirectory() as folder:
        contest = Contest(task, Path(folder) / "base.safetensors")
        model = task.make_base(contest.base)
        print(f"{sum(p.numel() for p in model.parameters()):,} weights, loss {contest.loss(model):.3f} at the start")
        tried = {lr: contest.recipe(lr, PILOT)[0] for lr in (workload.lowest * 2**k for k in range(RATES))}
        best = min(tried, key=lambda lr: (tried[lr] != tried[lr], tried[lr]))
        print(
            f"{THEIRS}: " + ", ".join(f"{loss:.3f} at lr {lr:g}" for lr, loss in tried.items()) + f" by {PILOT} steps"
        )
        goal, theirs = contest.recipe(best, STEPS)
        queries, ours = contest.vs2p(goal)
        print(f"{THEIRS}, lr {best:g}: {goal:.3f} by {2 * STEPS} queries; {OURS}: there by {queries} queries")
    return ratios({THEIRS: theirs, OURS: ours}, THEIRS)


if __name__ == "__main__":
    main()
