"""Scores in words."""

from __future__ import annotations

import math

from forwardtune.experiments.intervals import Paired
from forwardtune.experiments.scoring import Contest, WorkloadScore, contest


def sentence(score: WorkloadScore) -> str:
    """Who won a workload, and by how much."""
    ranking = score.ranking
    if score.missing or not ranking:
        return f"{score.workload.name}: {count(score.missing, 'run')} missing."
    winner, *others = ranking
    assert winner.best is not None
    if winner.best.mean_loss == math.inf:
        return f"{score.workload.name}: runs of every method diverged."
    queries = winner.best.found[0]["curve"]["queries"][-1]
    loss = number(winner.best.mean_loss)
    start = (
        f"{score.workload.name}: after {queries:,} queries {winner.method.title} has the lowest training loss, {loss}"
    )
    gaps = [gap(found) for other in others if (found := contest(winner, other))]
    return f"{start}: {', '.join(gaps)}." if gaps else f"{start}."


def gap(found: Contest) -> str:
    """How far a is below b."""
    assert found.b.best is not None
    if found.loss is None:
        return f"{found.b.method.title} diverged in {found.b.best.diverged} of {len(found.b.best.results)} runs"
    below = -found.loss.mean / found.b.best.mean_loss
    return f"{below:.0%} below {found.b.method.title} ({difference(found.loss, -1)})"


def difference(found: Paired, sign: int = 1) -> str:
    """The mean difference with its interval, and whether it may be chance."""
    if found.interval is None:
        return f"by {number(sign * found.mean)}, one seed"
    low, high = sorted(sign * end for end in found.interval)
    noise = "" if found.is_clear else ", inside the noise"
    return f"by {number(sign * found.mean)}, 95% interval {number(low)} to {number(high)}{noise}"


def number(value: float) -> str:
    """Three digits."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.2e}"


def count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")
