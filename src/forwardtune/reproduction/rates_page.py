"""The page that says what finding the rate while training costs and brings, made from results and nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean, median, stdev

from forwardtune import presets
from forwardtune.errors import ExperimentError
from forwardtune.experiments.intervals import paired
from forwardtune.experiments.report.tables import markdown
from forwardtune.experiments.result import rate_name
from forwardtune.experiments.scoring import ComparisonScore, MethodScore, RateScore, WorkloadScore, score
from forwardtune.experiments.summary import count, number
from forwardtune.markup import markdown as plain
from forwardtune.metrics import is_share, scaled, shown, spoken, titled, unit
from forwardtune.reproduction.comparisons import origin, results_of
from forwardtune.scales import SCALES

GRIDS = ("VS2P", "MeZO", "STP")
"""Methods that have grids of rates."""

INTRODUCTION = """# No rate to choose: what it comes to

This page is made from the results of runs by

```
forwardtune reproduction {folder} --about rates --out docs/rates.md
```

and the results by `forwardtune compare --preset PRESET --data DIR --keep {folder}`, with the presets named below.
All methods get the same number of queries, and all their queries count. A method with a grid is shown at its best rate,
the one with the lowest mean final training loss; the runs at its other rates are not charged to it. "A guess" is the
median of that loss over its rates, which is what half of all guesses reach. With `auto` nothing is chosen. Steps are in
absolute units, or relative to the size of the weights where a method says so or finds its rate. Losses and scores are
those at the end, mean and standard deviation over seeds. Differences are paired by seed, with Student's 95% interval;
one whose interval includes zero is not decided. Agreement is the mean cosine between the gradients of two examples
([lines](lines.md)) as a run has last measured it, where results have it.
"""


def rates_page(folder: Path) -> str:
    """The page, from a folder that has results of the presets `auto/...` and `lines/...` under their names."""
    names = [name for name in presets.files() if name.startswith(("auto/", "lines/"))]
    made = {name: results for name in names if (results := results_of(folder, name))}
    if not made:
        raise ExperimentError(
            f"{folder} holds no results of the presets {', '.join(names)}; make some by `forwardtune compare --preset "
            f"{names[0]} --out {folder}/{names[0]}`"
        )
    scored = {name: score(presets.load(name), results) for name, results in made.items()}
    parts = [INTRODUCTION.format(folder=folder), *_summary(scored)]
    for name, scores in scored.items():
        parts.append(f"## {scores.spec.title}\n\nPreset `{name}`. {' '.join(scores.spec.description.split())}\n")
        if scores.missing:
            parts.append(f"{count(scores.missing, 'run')} missing.\n")
        parts += [_workload(workload) for workload in scores.workloads if workload.results]
        parts.append(f"{origin(scores)}\n")
    return "\n".join(parts)


def _summary(scored: Mapping[str, ComparisonScore]) -> Iterator[str]:
    """Two tables: what finding the rate gains, and what units of the weights' own size do."""
    every = [(name, workload) for name, scores in scored.items() for workload in scores.workloads]
    every = [(name, workload) for name, workload in every if any(_grid(workload, kind) for kind in GRIDS)]
    yield "## In short\n"
    yield "Training loss without a rate, against each method at the best of its rates in either units and at a guess.\n"
    header = ["preset", "without a rate", *(f"{name}, best" for name in GRIDS), *(f"{name}, a guess" for name in GRIDS)]
    rows = []
    for name, workload in every:
        for auto in (method for method in workload.methods if method.method.is_auto and method.best):
            assert auto.best is not None
            ours, grids = auto.best.mean_loss, [_grid(workload, kind) for kind in GRIDS]
            best = [_share(ours, min(losses, default=math.nan)) for losses in grids]
            guess = [_share(ours, median(losses)) if losses else "" for losses in grids]
            rows.append([name, auto.method.title, *best, *guess])
    yield markdown(header, rows) + "\n"
    yield "Training loss in units of the weights' own size against absolute units, each at its best rate.\n"
    rows = []
    for name, workload in every:
        cells = []
        for kind in GRIDS:
            relative, absolute = (min(_grid(workload, kind, scale), default=math.nan) for scale in SCALES)
            cells.append(_share(relative, absolute))
        rows.append([name, *cells])
    yield markdown(["preset", *GRIDS], rows) + "\n"


def _grid(workload: WorkloadScore, kind: str, scale: str | None = None) -> list[float]:
    """The loss of every rate of a method, in these units or in any."""
    return [
        rate.mean_loss
        for score in workload.methods
        if score.method.method == kind and not score.method.is_auto and scale in (None, score.method.scale)
        for rate in score.rates
        if rate.is_complete
    ]


def _share(ours: float, other: float) -> str:
    return f"{ours / other - 1:+.0%}" if math.isfinite(ours) and other > 0 else ""


def _workload(workload: WorkloadScore) -> str:
    result = workload.results[0]
    first = result.curve.column("train_loss")[0], result.curve.column(workload.metric)[0]
    w = workload.workload
    seeds = max((len(method.best.results) for method in workload.methods if method.best), default=0)
    name = workload.metric
    start = plain(
        f"{w.name}: {w.queries:,} queries, {count(seeds, 'seed')}, {result.weights:,} weights. At the start the "
        f"training loss is {number(first[0])}, the test {spoken(name)} {shown(name, first[1])}{unit(name)}."
    )
    header = ["method", "rates", "training loss", titled(name), "best rate", "a guess"]
    rows = [_row(method, name) for method in workload.methods if method.best]
    agreements = [_agreement(method.best) for method in workload.methods if method.best]
    if any(agreements):
        header, rows = [*header, "agreement"], [[*row, own] for row, own in zip(rows, agreements, strict=True)]
    return "\n".join([start, "", markdown(header, rows), "", *(f"- {line}" for line in _findings(workload)), ""])


def _agreement(best: RateScore) -> str:
    """Of examples, where runs have measured it."""
    known = [result.agreement for result in best.finished if result.agreement is not None]
    return _spread(known, ".2f") if known else ""


def _row(score: MethodScore, metric: str) -> list[str]:
    best = score.best
    assert best is not None
    is_auto = score.method.is_auto
    name = score.method.title
    diverged = f", {best.diverged} diverged" if best.diverged else ""
    edge = ", an end of its grid" if score.at_edge else ""
    return [
        f"**{name}**" if is_auto else name,
        "none" if is_auto else str(len(score.rates)),
        _spread(best.losses) + diverged,
        _spread([scaled(metric, value) for value in best.accuracies], ".1f" if is_share(metric) else ".4g"),
        "found" if is_auto else f"{rate_name(best.lr)}{edge}",
        "" if is_auto else _shown(_guess(score)),
    ]


def _spread(values: list[float], digits: str = "") -> str:
    shown = [format(value, digits) if digits else _shown(value) for value in (fmean(values),)]
    if len(values) > 1 and all(map(math.isfinite, values)):
        shown.append(format(stdev(values), digits or "#.2g").rstrip("."))
    return " ± ".join(shown)


def _shown(value: float) -> str:
    return number(value) if math.isfinite(value) else "diverged"


def _guess(score: MethodScore) -> float:
    """The loss that half of the rates reach."""
    return median(rate.mean_loss for rate in score.rates if rate.is_complete)


def _findings(workload: WorkloadScore) -> Iterator[str]:
    """What finding the rate gains on the best one of every grid, and on a guess; and what units gain."""
    complete = [method for method in workload.methods if method.best]
    autos = [method for method in complete if method.method.is_auto]
    for before, auto in enumerate(autos):
        for other in [*autos[:before], *(method for method in complete if not method.method.is_auto)]:
            yield f"{auto.method.title} {_against(auto, other)}"
    for relative in (method for method in complete if method.method.scale == "relative"):
        for other in complete:
            same = other.method.method == relative.method.method and not relative.method.is_auto
            if same and other.method.scale == "absolute" and not other.method.is_auto:
                yield f"{relative.method.title} {_against(relative, other)}"


def _against(ours: MethodScore, other: MethodScore) -> str:
    assert ours.best is not None
    assert other.best is not None
    if other.method.is_auto:
        return f"against {other.method.title}: {_difference(ours.best, other.best)}."
    than_a_guess = ours.best.mean_loss / _guess(other) - 1
    guess = "" if math.isnan(than_a_guess) else f"; against a guess of its rate {than_a_guess:+.0%}"
    return f"against {other.method.title} at its best rate: {_difference(ours.best, other.best)}{guess}."


def _difference(ours: RateScore, other: RateScore) -> str:
    if not all(map(math.isfinite, [*ours.losses, *other.losses])):
        return "runs diverged"
    difference = paired(ours.losses, other.losses)
    share = f"{difference.mean / other.mean_loss:+.0%}"
    if difference.interval is None:
        return f"{share} training loss (one seed)"
    low, high = (f"{end / other.mean_loss:+.0%}" for end in difference.interval)
    decided = "" if difference.is_clear else ", not decided"
    return f"{share} training loss ({low} to {high}{decided})"
