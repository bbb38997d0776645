"""What is told while runs are made, one type an event; `to_json` is what `--json` prints."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar

from forwardtune.experiments.result import Evaluation, Json, RunResult


@dataclass(frozen=True)
class Event:
    name: ClassVar[str]

    def to_json(self) -> Json:
        return {"event": self.name, **asdict(self)}


@dataclass(frozen=True)
class Planned(Event):
    """So many runs, some of them made before, and the queries of the others."""

    name = "plan"
    spec: str
    runs: int
    finished: int
    queries: int


@dataclass(frozen=True)
class SweepPlanned(Event):
    """Of `rates[i]` rates each comes to `queries[i]` queries of its own; all together use no more than the budget."""

    name = "sweep"
    title: str
    lr: tuple[float, ...]
    rates: tuple[int, ...]
    queries: tuple[int, ...]
    budget: int


@dataclass(frozen=True)
class Judged(Event):
    """The rates that came to so many queries, with the losses they saw, the best first; some of them are kept."""

    name = "rung"
    queries: int
    losses: Mapping[float, float]
    kept: tuple[float, ...]

    def to_json(self) -> Json:
        pairs = [[lr, loss if math.isfinite(loss) else None] for lr, loss in self.losses.items()]
        return {**super().to_json(), "losses": pairs}


@dataclass(frozen=True)
class MakingBase(Event):
    name = "base"
    workload: str
    weights: str


@dataclass(frozen=True)
class Measuring(Event):
    """It is measured how long a run takes; `about` says what is tuned."""

    name = "measuring"
    about: str


@dataclass(frozen=True)
class Estimated(Event):
    """How long a run takes: seconds of a query and of an evaluation, with so many threads.

    tried: seconds of a query by number of threads, where there was a choice.
    minutes: the time that the budget was planned for; None if it was given in queries.
    """

    name = "estimate"
    queries: int
    evaluations: int
    query: float
    evaluation: float
    threads: int
    tried: Mapping[int, float]
    minutes: float | None = None

    @property
    def seconds(self) -> float:
        return self.queries * self.query + self.evaluations * self.evaluation


@dataclass(frozen=True)
class Started(Event):
    """A run begins, or resumes after so many queries, with so many evaluations to make.

    about: what is tuned. probes: how they are made, "in-place" or "layerwise".
    """

    name = "start"
    run: str
    title: str
    queries: int
    total: int
    about: str
    evaluations: int
    probes: str = "in-place"


@dataclass(frozen=True)
class Progressed(Event):
    name = "progress"
    run: str
    queries: int
    loss: float

    def to_json(self) -> Json:
        return {**super().to_json(), "loss": self.loss if math.isfinite(self.loss) else None}


@dataclass(frozen=True)
class Evaluated(Event):
    """An evaluation, and the seconds that it took."""

    name = "look"
    run: str
    evaluation: Evaluation
    took: float

    def to_json(self) -> Json:
        return {"event": self.name, "run": self.run, **self.evaluation.to_json()}


@dataclass(frozen=True)
class Noted(Event):
    """Something that the user should know; of one run, or of all."""

    name = "note"
    text: str
    run: str = ""

    def to_json(self) -> Json:
        return {"event": self.name, **({"run": self.run} if self.run else {}), "text": self.text}


@dataclass(frozen=True)
class Paused(Event):
    """A run has come as far as it was to, and can be resumed."""

    name = "pause"
    run: str
    queries: int


@dataclass(frozen=True)
class Finished(Event):
    """Its curves are in the store."""

    name = "done"
    run: str
    result: RunResult

    def to_json(self) -> Json:
        return {"event": self.name, "run": self.run, "result": self.result.summary()}


@dataclass(frozen=True)
class Failed(Event):
    name = "failed"
    text: str


Tell = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Tells nobody."""
