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
    queries = winner.best.found[0]["curve"]["queries"][-1]
    start = (
        f"{score.workload.name}{missing}: after {queries:,} queries {winner.method.title} has the lowest training loss"
    )
    gaps = [gap(found) for other in others if (found := contest(winner, other))]
    return f"{start}, {', '.join([number(winner.best.mean_loss), *gaps])}."


def gap(found: Contest) -> str:
    """How far a is below b, and whether that may be chance."""
    assert found.b.best is not None
    other = found.b.method.title
    if found.loss is None:
        return f"{other} diverged in {found.b.best.diverged} of {len(found.b.best.results)} runs"
    by = number(-found.loss.mean)
    if found.loss.interval is None:
        return f"below {other} by {by} (one seed, so this may be chance)"
    high, low = (number(-end) for end in found.loss.interval)
    if not found.loss.is_clear:
        return f"not clearly below {other} (by {by}, 95% interval {low} to {high}: inside the noise)"
    return f"{-found.loss.mean / found.b.best.mean_loss:.0%} below {other} (by {by}, 95% interval {low} to {high})"


def number(value: float) -> str:
    """Three digits."""
    return f"{value:#.3g}".rstrip(".") if 1e-4 <= abs(value) < 1000 or value == 0 else f"{value:.2e}"


def count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")
