"""How long runs still take."""

from __future__ import annotations

import time
from collections.abc import Callable

from forwardtune.experiments.events import Estimated

TRUST = 50
"""The queries that a measurement made before the run counts for."""


class Remaining:
    """The seconds that are left of some queries and evaluations, each at their mean so far.

    Evaluations are counted apart, so that neither one that was just made nor the first queries move it much.
    """

    def __init__(
        self,
        queries: int,
        evaluations: int = 0,
        estimate: Estimated | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.queries, self.evaluations = queries, evaluations
        self._clock = clock
        self._begun = clock()
        self._made, self._evaluated, self._evaluating = 0, 0, 0.0
        self._estimate = estimate
        self._end: float | None = None
        self._update()

    def progressed(self, queries: int) -> None:
        """So many more queries are made."""
        self.queries -= queries
        self._made += queries
        self._update()

    def evaluated(self, seconds: float) -> None:
        """An evaluation took so long; the first may have been made before the run began."""
        self.evaluations -= 1
        self._evaluated += 1
        self._evaluating += seconds
        self._begun = min(self._begun, self._clock() - self._evaluating)
        self._update()

    @property
    def seconds(self) -> float | None:
        """None if nothing is known yet; between two calls it counts down."""
        return None if self._end is None else max(0.0, self._end - self._clock())

    def _update(self) -> None:
        now, trust = self._clock(), TRUST if self._estimate else 0
        if self._made + trust == 0:
            return
        measured, evaluation = (self._estimate.query, self._estimate.evaluation) if self._estimate else (0.0, 0.0)
        query = (trust * measured + now - self._begun - self._evaluating) / (trust + self._made)
        evaluation = self._evaluating / self._evaluated if self._evaluated else evaluation
        self._end = now + self.queries * query + self.evaluations * evaluation


def clock_time(seconds: float | None) -> str:
    """As 0:12:05."""
    if seconds is None:
        return "-:--:--"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
