"""What is told while runs are made, one type an event; `to_json` is what `--json` prints."""

from __future__ import annotations

import math
from collections.abc import Callable
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
class MakingBase(Event):
    name = "base"
    workload: str
    weights: str


@dataclass(frozen=True)
class Started(Event):
    """A run begins, or resumes after so many queries; `about` says what is tuned."""

    name = "start"
    run: str
    title: str
    queries: int
    total: int
    about: str


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
    name = "look"
    run: str
    evaluation: Evaluation

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
