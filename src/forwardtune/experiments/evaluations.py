"""The evaluations of a run under way, one JSON line each, so that a run that was killed need not repeat them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from forwardtune.errors import ExperimentError
from forwardtune.experiments.result import Curve, Evaluation, Json
from forwardtune.files import parse_json, translated, write_text
from forwardtune.toml_tables import build, value


@dataclass(frozen=True)
class Session:
    """A process that took up the run: when, and from which base."""

    session: str
    base: str


class EvaluationLog:
    """The evaluations by step, in a file that also lists the sessions: the processes that took up the run."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.at: dict[int, Evaluation] = {}
        self._took: dict[int, float] = {}
        self._sessions: list[Session] = []

    def begin(self, step: int, base: str) -> None:
        """A process takes up the run at a step, from the base that it began with."""
        self.read(step, base)
        self._sessions.append(Session(datetime.now(UTC).isoformat(timespec="seconds"), base))
        entries = [*map(asdict, self._sessions), *map(self._entry, self.at.values())]
        with translated(ExperimentError, f"{self.file} cannot be written"):
            write_text(self.file, "".join(json.dumps(entry) + "\n" for entry in entries))

    def read(self, step: int, base: str) -> None:
        """What the file has up to a step; refuses that of a run which was begun from another base."""
        for line in self.file.read_text("utf-8", "replace").splitlines() if self.file.exists() else ():
            try:
                entry = dict(value(Mapping[str, Any], parse_json(line), "a line"))
                if "session" in entry:
                    self._sessions.append(build(Session, entry, "a line"))
                    continue
                took = value(float, entry.pop("took", 0.0), "a line")
                if (evaluation := Evaluation.from_json(entry, "a line")).step <= step:
                    self.at[evaluation.step], self._took[evaluation.step] = evaluation, took
            except (ValueError, ExperimentError):  # the last line, which was being written
                break
        if self._sessions and self._sessions[0].base != base:
            raise ExperimentError(
                f"the run of {self.file} was begun on other data or weights, or by other code of a task; resume it "
                "with those, or choose another folder"
            )

    def _entry(self, evaluation: Evaluation) -> Json:
        return {**evaluation.to_json(), "took": self._took[evaluation.step]}

    def add(self, evaluation: Evaluation, took: float) -> None:
        """An evaluation, and the seconds that it took."""
        self._took[evaluation.step] = took
        with (
            translated(
                ExperimentError,
                f"{self.file} cannot be written; make room or put it back, then run the same command again",
            ),
            open(self.file, "a", encoding="utf-8") as file,
        ):
            file.write(json.dumps(self._entry(evaluation)) + "\n")
        self.at[evaluation.step] = evaluation

    @property
    def first(self) -> Evaluation:
        return next(iter(self.at.values()))

    @property
    def last(self) -> Evaluation:
        return list(self.at.values())[-1]

    @property
    def seconds(self) -> float:
        """How long the run has taken up to its last evaluation."""
        return self.last.seconds if self.at else 0.0

    @property
    def evaluating(self) -> float:
        """The part of these seconds that evaluations took."""
        return sum(self._took[step] for step in self.at)

    @property
    def curve(self) -> Curve:
        evaluations = self.at.values()
        return Curve(tuple(e.queries for e in evaluations), tuple(e.scores for e in evaluations))

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    @property
    def started(self) -> str:
        return self._sessions[0].session
