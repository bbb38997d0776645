"""Which weights of a run are saved: those at its best evaluation on the test set, or the last ones."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from forwardtune import ledger as ledgers
from forwardtune.experiments.result import RunResult
from forwardtune.metrics import is_lower_better
from forwardtune.tasks.task import Scores

Keep = Literal["best", "last"]
KEEPS: tuple[Keep, ...] = get_args(Keep)


class Kept(NamedTuple):
    """The evaluation whose weights are saved, after so many queries."""

    queries: int
    scores: Scores
    is_last: bool

    def until(self, ledger: Path) -> int | None:
        """The step to which the run leads to its weights; None for the end."""
        if self.is_last:
            return None
        if not self.queries:
            return 0
        records = ledgers.read(ledger).records()
        return next(record.step + 1 for record in records if record.queries >= self.queries)


def kept(result: RunResult, keep: Keep) -> Kept:
    """The best evaluation is the one with the best metric; of equals that with the lowest test loss."""
    last = len(result.curve.queries) - 1
    index = last if keep == "last" else max(range(last + 1), key=lambda i: _rank(result, i))
    return Kept(result.curve.queries[index], result.curve.scores[index], index == last)


def _rank(result: RunResult, index: int) -> tuple[float, float]:
    scores = result.curve.scores[index]
    metric = scores.metrics[result.metric]
    goodness = -metric if is_lower_better(result.metric) else metric
    return -math.inf if math.isnan(metric) else goodness, -scores.test_loss
