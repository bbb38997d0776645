"""The third question: what does it cost beside backpropagation?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from forwardtune.experiments.scoring import MethodScore, RateScore, WorkloadScore, seconds_of
from forwardtune.experiments.summary import count
from forwardtune.metrics import unit
from forwardtune.reproduction.comparisons import Comparison
from forwardtune.reproduction.words import between, loss_text, score_text, table

QUESTION = "## What does it cost beside backpropagation?\n"
NOTES = """
Each method is at its best rate; numbers are means over seeds. A step of backpropagation counts as three queries.
Seconds are those of a run with its evaluations, and memory is the peak of the whole process, with Python, torch and the
data.
"""


def is_backpropagation(score: MethodScore) -> bool:
    """Whether a method needs gradients."""
    return score.method.method == "AdamW"


@dataclass(frozen=True)
class Match:
    """On one workload, backpropagation and the best method without it."""

    backward: RateScore
    forward: RateScore

    @property
    def is_lower(self) -> bool:
        """Whether backpropagation ends with the lower training loss."""
        return self.backward.mean_loss < self.forward.mean_loss

    @property
    def memory(self) -> float:
        """How many times as much backpropagation takes."""
        return peak_memory(self.backward) / peak_memory(self.forward)

    @property
    def seconds(self) -> float:
        """How many times as many a query of backpropagation takes."""
        return pace(self.forward) / pace(self.backward)


def cost(made: Sequence[Comparison]) -> str:
    """The answer, and its table."""
    every = [(c, workload, match) for c in made for workload in c.workloads if (match := _match(workload))]
    if not every:
        return f"{QUESTION}\nNo workload has results both with backpropagation and without.\n"
    header = ["workload", "method", "training loss", "score", "queries", "seconds", "queries/s", "peak memory (MB)"]
    rows = [
        [comparison.label(workload), *_cells(score, score.best)]
        for comparison, workload, _ in every
        for score in workload.methods
        if score.best
    ]
    answer = _answer([match for _, _, match in every])
    return "\n".join([QUESTION, f"{answer}\n", table(header, rows), NOTES.strip() + "\n"])


def peak_memory(best: RateScore) -> float:
    """Bytes, the mean over seeds; never zero."""
    return fmean(result.circumstances.peak_memory for result in best.finished) or 1.0


def pace(best: RateScore) -> float:
    """Queries a second over all seeds, evaluations included."""
    return sum(result.queries for result in best.finished) / sum(map(seconds_of, best.finished))


def pace_text(best: RateScore) -> str:
    return f"{pace(best):,.0f}" if pace(best) >= 100 else f"{pace(best):.3g}"


def _match(workload: WorkloadScore) -> Match | None:
    backward, forward = (
        next((score.best for score in workload.ranking if is_backpropagation(score) is kind), None)
        for kind in (True, False)
    )
    return Match(backward, forward) if backward and forward else None


def _answer(matches: Sequence[Match]) -> str:
    lower = sum(match.is_lower for match in matches)
    where = f" on {lower} of {count(len(matches), 'workload')}" if len(matches) > 1 else ""
    ends = "ends" if lower or where else "does not end"
    return (
        f"Backpropagation {ends} with the lower training loss{where}, compared with the best method without it on the "
        f"same budget of queries. It takes {between([match.memory for match in matches])} times as much memory, and "
        f"{between([match.seconds for match in matches])} times as long per query."
    )


def _cells(score: MethodScore, best: RateScore) -> list[str]:
    metric = best.finished[0].metric
    return [
        score.method.title,
        loss_text(best),
        f"{metric} {score_text(best)}{unit(metric)}",
        f"{max(result.queries for result in best.finished):,}",
        f"{fmean(map(seconds_of, best.finished)):,.0f}",
        pace_text(best),
        f"{peak_memory(best) / 1e6:,.0f}",
    ]
