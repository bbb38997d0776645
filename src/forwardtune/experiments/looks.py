"""Evaluations of a run under way, one JSON line each, so that a run that was killed need not repeat them."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from forwardtune.experiments.store import write_text
from forwardtune.experiments.workloads import Evaluation

Look = dict[str, Any]


class Looks:
    """By step: queries and seconds so far, and how well the network does; a value that is not finite is None."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.at: dict[int, Look] = {}
        self.sessions: list[str] = []

    def begin(self, step: int) -> None:
        """A process takes up the run at a step."""
        for line in self.file.read_text("utf-8").splitlines() if self.file.exists() else ():
            try:
                entry = json.loads(line)
            except ValueError:  # the last line, which was being written
                break
            if "session" in entry:
                self.sessions.append(entry["session"])
            elif entry["step"] <= step:
                self.at[entry["step"]] = entry
        self.sessions.append(datetime.now(UTC).isoformat(timespec="seconds"))
        entries = [{"session": session} for session in self.sessions] + list(self.at.values())
        write_text(self.file, "".join(json.dumps(entry) + "\n" for entry in entries))

    @property
    def seconds(self) -> float:
        """How long the run has taken up to the last look."""
        return float(list(self.at.values())[-1]["seconds"]) if self.at else 0.0

    def add(self, step: int, queries: int, seconds: float, evaluation: Evaluation) -> Look:
        found = {name: value if math.isfinite(value) else None for name, value in evaluation._asdict().items()}
        look: Look = {"step": step, "queries": queries, "seconds": seconds, **found}
        with open(self.file, "a", encoding="utf-8") as file:
            file.write(json.dumps(look) + "\n")
        self.at[step] = look
        return look

    def column(self, name: str) -> list[Any]:
        return [look[name] for look in self.at.values()]
