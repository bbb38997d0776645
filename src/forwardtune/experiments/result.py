"""What a run came to, typed: its evaluations, what its method saw, and where it comes from.

Every type reads and writes the JSON of the store. There a number that is not finite is null; here it is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from statistics import fmean
from typing import Any, Literal, Protocol

from forwardtune.errors import ExperimentError
from forwardtune.metrics import shown, spoken, unit
from forwardtune.record import StepRecord
from forwardtune.tasks.identity import fingerprint
from forwardtune.tasks.task import DataFacts, Scores
from forwardtune.toml_tables import build, one_of, value

Rate = float | Literal["auto"]
Json = dict[str, Any]
"""A JSON object: what is read from a file or about to be written, and nothing else."""

POINTS = 100
"""Of a trace, at most."""


def rate_name(lr: Rate) -> str:
    return lr if isinstance(lr, str) else f"{lr:g}"


@dataclass(frozen=True)
class Evaluation:
    """The model after some steps, on fixed examples."""

    step: int
    queries: int
    seconds: float
    scores: Scores

    def to_json(self) -> Json:
        return {"step": self.step, "queries": self.queries, "seconds": self.seconds, **scores_to_json(self.scores)}

    @staticmethod
    def from_json(table: Json, where: str) -> Evaluation:
        rest = {name: number for name, number in table.items() if name not in ("step", "queries", "seconds")}
        return build(Evaluation, {**table, "scores": scores_from_json(rest, where)}, where, strict=False)


def scores_to_json(scores: Scores) -> Json:
    numbers = {"train_loss": scores.train_loss, "test_loss": scores.test_loss, **scores.metrics}
    return {name: value if math.isfinite(value) else None for name, value in numbers.items()}


def scores_from_json(table: Json, where: str) -> Scores:
    known = value(Mapping[str, float | None], table, where)
    numbers = {name: math.nan if number is None else number for name, number in known.items()}
    for name in ("train_loss", "test_loss"):
        if name not in numbers:
            raise ExperimentError(f"{where} has no {name!r}")
    return Scores(numbers.pop("train_loss"), numbers.pop("test_loss"), numbers)


@dataclass(frozen=True)
class Curve:
    """All evaluations of a run, column by column: `scores[i]` is after `queries[i]`."""

    queries: tuple[int, ...]
    scores: tuple[Scores, ...]

    def column(self, name: str) -> list[float]:
        """`train_loss`, `test_loss` or a metric."""
        if name in ("train_loss", "test_loss"):
            return [getattr(scores, name) for scores in self.scores]
        return [scores.metrics[name] for scores in self.scores]

    def to_json(self) -> Json:
        rows = [scores_to_json(scores) for scores in self.scores]
        return {"queries": list(self.queries), **{name: [row[name] for row in rows] for name in rows[0]}}

    @staticmethod
    def from_json(table: Json, where: str) -> Curve:
        columns = value(Mapping[str, tuple[float | None, ...]], table, where)
        queries = value(tuple[int, ...], table.get("queries"), f"{where}: queries")
        _check_lengths(columns, where)
        rows = [{name: column[i] for name, column in columns.items() if name != "queries"} for i in range(len(queries))]
        return Curve(queries, tuple(scores_from_json(row, where) for row in rows))


@dataclass(frozen=True)
class Trace:
    """What the method saw and did, in means over stretches of steps: None where a stretch has no value.

    `alpha` is the distance moved, the size of t. A method without slopes has no gamma and sigma.
    """

    queries: tuple[int, ...] = ()
    loss: tuple[float | None, ...] = ()
    gamma: tuple[float | None, ...] = ()
    sigma: tuple[float | None, ...] = ()
    alpha: tuple[float | None, ...] = ()

    def to_json(self) -> Json:
        columns = {entry.name: list(getattr(self, entry.name)) for entry in fields(self)}
        return {name: column for name, column in columns.items() if column or name == "queries"}

    @staticmethod
    def from_json(table: Json, where: str) -> Trace:
        trace = build(Trace, table, where, strict=False)
        _check_lengths({name: column for name, column in trace.to_json().items() if column}, where)
        return trace


def _check_lengths(columns: Mapping[str, Sequence[object]], where: str) -> None:
    if len(set(map(len, columns.values()))) > 1:
        raise ExperimentError(f"{where} has columns of different lengths")


class Tracer:
    """Collects a trace step by step."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, float | None, float | None, float | None, float | None]] = []

    def add(self, record: StepRecord | None) -> None:
        if record is None:
            return
        seen: tuple[float | None, float | None, float | None] = (None, None, None)
        if record.taken:
            seen = None if record.gamma is None else abs(record.gamma), record.sigma, abs(record.t)
        self._rows.append((record.queries, record.loss, *seen))

    def add_loss(self, queries: int, loss: float) -> None:
        """A step that has nothing else to tell."""
        self._rows.append((queries, loss, None, None, None))

    def trace(self) -> Trace:
        size = math.ceil(len(self._rows) / POINTS) or 1
        stretches = [self._rows[i : i + size] for i in range(0, len(self._rows), size)]
        columns = [tuple(_mean([row[i] for row in stretch]) for stretch in stretches) for i in range(1, 5)]
        queries = tuple(stretch[-1][0] for stretch in stretches)
        return Trace(queries, *(column if any(column) else () for column in columns))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return fmean(known) if known else None


@dataclass(frozen=True)
class Description:
    """All that decides a run's outcome, and nothing else: no names, no other runs."""

    workload: Mapping[str, object]
    method: str
    settings: Mapping[str, object]
    lr: Rate
    seed: int
    decay: str
    noise: int
    rules: int


@dataclass(frozen=True)
class Base:
    """The weights that the run started from: what decides them, and the digest of their file.

    before: the test scores of the model before what is new in it was fitted, if something was.
    """

    id: str
    digest: str
    before: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Code:
    """Versions, and the commit of the checkout if there is one, with whether its files have changed since."""

    versions: Mapping[str, str]
    commit: str | None
    dirty: bool | None


@dataclass(frozen=True)
class Host:
    name: str
    cpu: str
    cores: int | None
    system: str


@dataclass(frozen=True)
class Circumstances:
    """What differs when the same run is made again: the machine, times (ISO 8601), sessions, bytes of peak memory.

    evaluating: the part of the seconds that evaluations took; older results do not tell.
    """

    host: Host
    started: str
    finished: str
    sessions: int
    seconds: float
    peak_memory: int
    evaluating: float | None = None


@dataclass(frozen=True)
class RunResult:
    """A finished run. `reason` tells why it was given up, if it was; `metrics` come first to last in importance.

    agreement: of examples, at the last time that a run which may give them lines of their own has measured it.
    lines: "own" or "common", as examples had them at the end of a run that was to find out which is better.
    """

    id: str
    title: str
    run: Description
    status: str
    reason: str
    queries: int
    final: Scores
    curve: Curve
    trace: Trace
    weights: int
    data: DataFacts
    base: Base
    code: Code
    device: str
    threads: int
    circumstances: Circumstances
    metrics: tuple[str, ...] = field(default=("accuracy",))
    plateaus: int = 0
    agreement: float | None = None
    lines: str = ""

    @property
    def diverged(self) -> bool:
        return self.status == "diverged"

    @property
    def metric(self) -> str:
        """What methods are compared by on the test set."""
        return self.metrics[0]

    @property
    def score(self) -> float:
        """The final value of that metric."""
        return self.final.metrics[self.metric]

    @property
    def queries_per_second(self) -> float:
        """In steps alone, where it is known how long evaluations took."""
        seconds = self.circumstances.seconds - (self.circumstances.evaluating or 0.0)
        return self.queries / seconds if seconds > 0 else math.nan

    def first(self, metric: str) -> float:
        """The test score of the model before anything in it was fitted or tuned."""
        return self.base.before.get(metric, self.fitted(metric))

    def fitted(self, metric: str) -> float:
        """That of the base weights, with which tuning began."""
        return self.curve.column(metric)[0]

    @property
    def told_score(self) -> str:
        """As: test accuracy 60.5%."""
        return f"test {spoken(self.metric)} {shown(self.metric, self.score)}{unit(self.metric)}"

    def summary(self) -> Json:
        """All but the columns of numbers."""
        data = asdict(self.data)
        told = {name: data[name] for name in data if data[name] or name not in ("note", "majority")}
        here = {name: fact for name, fact in asdict(self.circumstances).items() if fact is not None}
        return {
            "id": self.id,
            "title": self.title,
            "run": asdict(self.run),
            "status": self.status,
            "reason": self.reason,
            "queries": self.queries,
            "metrics": list(self.metrics),
            "final": scores_to_json(self.final),
            "plateaus": self.plateaus,
            **({} if self.agreement is None else {"agreement": self.agreement}),
            **({"lines": self.lines} if self.lines else {}),
            "weights": self.weights,
            "data": told,
            "base": {name: told for name, told in asdict(self.base).items() if told},
            "code": asdict(self.code),
            "device": self.device,
            "threads": self.threads,
            "circumstances": here,
        }

    def to_json(self) -> Json:
        return {**self.summary(), "curve": self.curve.to_json(), "trace": self.trace.to_json()}

    @staticmethod
    def from_json(table: Json, where: str = "the result") -> RunResult:
        """Older results lack `metrics`, `plateaus`, `agreement` or `lines`, which then are what they always were.

        Anything in the table that no result has is an `ExperimentError`.
        """
        kinds = {"final": scores_from_json, "curve": Curve.from_json, "trace": Trace.from_json}
        columns = {name: read(table[name], f"{where}: {name}") for name, read in kinds.items() if name in table}
        result = build(RunResult, {**table, **columns}, where, strict=False)
        one_of(f"{where}: status", result.status, ("finished", "diverged"))
        for scores in (result.final, *result.curve.scores):
            if not scores.metrics.keys() >= set(result.metrics):
                raise ExperimentError(f"{where} has no {' or '.join(result.metrics)} among its scores")
        if fingerprint(table["run"]) != result.id:
            raise ExperimentError(f"{where} is not the run that its id says")
        return result


class Results(Protocol):
    """Where results are: a store, or evidence."""

    def result(self, run_id: str) -> RunResult | None: ...
