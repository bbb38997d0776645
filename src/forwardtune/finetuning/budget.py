"""How long a run takes, and how many queries fit into a time: planned once, and kept for when it resumes."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from forwardtune.errors import ExperimentError
from forwardtune.experiments.events import Estimated
from forwardtune.experiments.plan import Run
from forwardtune.experiments.result import Json
from forwardtune.experiments.spec import LEAST_AUTO
from forwardtune.experiments.store import read_json
from forwardtune.files import translated, write_json
from forwardtune.finetuning.pace import Pace
from forwardtune.tasks.identity import fingerprint
from forwardtune.toml_tables import build

EVALUATIONS = 10
"""Of a run, unless a number is given; fewer if they would take more than SHARE of the time that it has."""
SHARE = 0.25


@dataclass(frozen=True)
class Budget:
    """A run's length and the pace it was planned for; `minutes` is None if the length was given."""

    queries: int
    evaluations: int
    pace: Pace
    minutes: float | None = None

    def of(self, run: Run) -> Run:
        """The run with this budget."""
        return replace(run, workload=replace(run.workload, queries=self.queries, evaluations=self.evaluations))

    @property
    def estimate(self) -> Estimated:
        pace = self.pace
        return Estimated(
            self.queries, self.evaluations, pace.query, pace.evaluation, pace.threads, pace.tried, self.minutes
        )

    def to_json(self) -> Json:
        return asdict(self)

    @staticmethod
    def from_json(table: Json) -> Budget:
        pace = table["pace"]
        tried = {int(number): seconds for number, seconds in pace["tried"].items()}
        return build(Budget, {**table, "pace": {**pace, "tried": tried}}, "the budget")


def fitted(run: Run, pace: Pace, minutes: float, seconds: float, evaluations: int | None) -> Budget:
    """The budget that takes what is left of so many minutes after some seconds."""
    left = 60 * minutes - seconds
    wanted = evaluations or max(1, min(EVALUATIONS, math.floor(SHARE * left / pace.evaluation)))
    queries = math.floor((left - wanted * pace.evaluation) / pace.query)
    least = max(wanted * run.method.most_queries, LEAST_AUTO if run.method.is_auto else 0)
    if queries < least:
        enough = (seconds + pace.seconds(least, wanted)) / 60
        raise ExperimentError(
            f"{minutes:g} minutes are too few: the run needs {least} queries of {pace.query:.2g} s and {wanted} "
            f"evaluations of {pace.evaluation:.2g} s, and {seconds:.0f} s are over. Give --minutes "
            f"{math.ceil(10 * enough) / 10:g} or more, or fewer --evaluations or --test-examples"
        )
    return Budget(queries, wanted, pace, minutes)


class BudgetFile:
    """Where the budget of a run is kept: by its id or, of a planned one, by its minutes and what else decides it."""

    def __init__(self, folder: Path, run: Run, minutes: float | None, evaluations: int | None) -> None:
        name = run.id
        if minutes is not None:
            open_ended = replace(run, workload=replace(run.workload, queries=1, evaluations=1))
            name = fingerprint([asdict(open_ended.description), minutes, evaluations])
        self.path = folder / f"{name}.json"

    def read(self) -> Budget | None:
        if not self.path.exists():
            return None
        try:
            return Budget.from_json(read_json(self.path))
        except (KeyError, TypeError, ValueError, AttributeError, ExperimentError):
            raise ExperimentError(f"{self.path} is not a budget of forwardtune; move it away to plan anew") from None

    def write(self, budget: Budget) -> None:
        with translated(ExperimentError, f"{self.path} cannot be written"):
            self.path.parent.mkdir(exist_ok=True)
            write_json(self.path, budget.to_json())
