"""Scores in words."""

from __future__ import annotations

import math

from forwardtune.experiments.scoring import Contest, WorkloadScore, contest


def sentence(score: WorkloadScore) -> str:
    """Who won a workload, and by how much."""
    missing = f" ({count(score.missing, 'run')} missing)" if score.missing else ""
    if not score.ranking:
        return f"{score.workload.name}: {count(score.missing, 'run')} missing."
    winner, *others = score.ranking
    assert winner.best is not None
    if winner.best.mean_loss == math.inf:
        return f"{score.workload.name}: runs of every method diverged{missing}."
    queries = winner.best.finished[0].curve.queries[-1]
    start = (
        f"{score.workload.name}{missing}: after {queries:,} queries {winner.method.title} has the lowest training loss"
    )
    gaps = [gap(pair) for other in others if (pair := contest(winner, other))]
    return f"{start}, {', '.join([number(winner.best.mean_loss), *gaps])}."


def gap(pair: Contest) -> str:
    """How far a is below b, and whether that may be chance."""
    assert pair.b.best is not None
    other = pair.b.method.title
    if pair.loss is None:
        return f"{other} diverged in {pair.b.best.diverged} of {len(pair.b.best.results)} runs"
    by = number(-pair.loss.mean)
    if pair.loss.interval is None:
        return f"below {other} by {by} (one seed, so this may be chance)"
    high, low = (number(-end) for end in pair.loss.interval)
    if not pair.loss.is_clear:
        return f"not clearly below {other} (by {by}, 95% interval {low} to {high}: inside the noise)"
    return f"{-pair.loss.mean / pair.b.best.mean_loss:.0%} below {other} (by {by}, 95% interval {low} to {high})"


def number(value: float) -> str:
    """Three digits."""
    return f"{value:#.3g}".rstrip(".") if 1e-4 <= abs(value) < 1000 or value == 0 else f"{value:.2e}"


def count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")
