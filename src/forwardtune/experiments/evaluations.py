"""Evaluations of a run under way, one JSON line each, so that a run that was killed need not repeat them."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from forwardtune.errors import ExperimentError
from forwardtune.experiments.store import write_text
from forwardtune.tasks import Evaluation

Look = dict[str, Any]


class EvaluationLog:
    """By step: queries and seconds so far, and how well the network does; a value that is not finite is None."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.at: dict[int, Look] = {}
        self.sessions: list[Look] = []

    def begin(self, step: int, base: str) -> None:
        """A process takes up the run at a step, from the base that it began with."""
        for line in self.file.read_text("utf-8", "replace").splitlines() if self.file.exists() else ():
            try:
                entry = json.loads(line)
                if "session" in entry:
                    self.sessions.append(entry)
                elif entry["step"] <= step:
                    self.at[entry["step"]] = entry
            except (ValueError, TypeError, KeyError):  # the last line, which was being written
                break
        if self.sessions and self.sessions[0]["base"] != base:
            raise ExperimentError(
                f"the run of {self.file} was begun on other data or weights; go on with those, or choose another folder"
            )
        self.sessions.append({"session": datetime.now(UTC).isoformat(timespec="seconds"), "base": base})
        write_text(self.file, "".join(json.dumps(entry) + "\n" for entry in [*self.sessions, *self.at.values()]))

    @property
    def seconds(self) -> float:
        """How long the run has taken up to the last look."""
        return float(list(self.at.values())[-1]["seconds"]) if self.at else 0.0

    def add(self, step: int, queries: int, seconds: float, evaluation: Evaluation) -> Look:
        found = {name: value if math.isfinite(value) else None for name, value in evaluation.items()}
        look: Look = {"step": step, "queries": queries, "seconds": seconds, **found}
        try:
            with open(self.file, "a", encoding="utf-8") as file:
                file.write(json.dumps(look) + "\n")
        except OSError as error:
            raise ExperimentError(f"{self.file} cannot be written ({error}); make room and go on") from None
        self.at[step] = look
        return look

    def column(self, name: str) -> list[Any]:
        return [look[name] for look in self.at.values()]
