"""Charts of a comparison, as data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from forwardtune.experiments.result import RunResult, rate_name
from forwardtune.experiments.scoring import MethodScore, WorkloadScore
from forwardtune.metrics import scaled

COLORS = ("#0b6e4f", "#c8553d", "#4a6fa5", "#8f5aa8", "#b8860b", "#5a5a5a", "#2a9d9d", "#a84a6b", "#7a4b2a", "#8a9a1f")


@dataclass(frozen=True)
class Series:
    """A line, and around it the range over seeds. `notes` are shown beside a point."""

    name: str
    color: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    notes: Sequence[str] = ()
    markers: bool = False


@dataclass(frozen=True)
class Chart:
    name: str
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log_x: bool = False
    log_y: bool = False
    note: str = ""


def charts(score: WorkloadScore) -> list[Chart]:
    """Every chart of a workload that has something to show."""
    metric = score.metric
    every = [
        _curves(score, "loss", "Training loss", "train_loss", log=True),
        _curves(score, "accuracy", f"Test {metric}", metric, scale=scaled(metric, 1.0)),
        _sensitivity(score),
        _traces(score, "gamma", "Slope measured", "|gamma|"),
        _traces(score, "sigma", "Spread of recent slopes", "sigma"),
        _traces(score, "alpha", "Distance moved along the direction", "|t*|"),
    ]
    return [chart for chart in every if chart.series]


def _judged(score: WorkloadScore) -> list[tuple[MethodScore, str]]:
    pairs = zip(score.methods, [COLORS[i % len(COLORS)] for i in range(len(score.methods))], strict=True)
    return [(method, color) for method, color in pairs if method.best is not None]


def _label(score: MethodScore) -> str:
    if score.best is None or score.method.is_auto:
        return score.method.title
    return f"{score.method.title}, lr {rate_name(score.best.lr)}"


def _curves(score: WorkloadScore, name: str, title: str, column: str, *, log: bool = False, scale: float = 1) -> Chart:
    series = [
        _band(
            _label(method),
            color,
            method.best.finished,
            lambda r: r.curve.queries,
            lambda r: r.curve.column(column),
            scale=scale,
            log=log,
        )
        for method, color in _judged(score)
        if method.best
    ]
    return Chart(
        name,
        f"{title} against queries",
        "queries",
        title.lower() + (" (%)" if scale == 100 else ""),
        tuple(series),
        log_y=log,
        note="Each method at its best rate: the mean over seeds and, as a band, their range.",
    )


def _traces(score: WorkloadScore, column: str, title: str, label: str) -> Chart:
    series = [
        _band(
            _label(method), color, method.best.finished, lambda r: r.trace.queries, lambda r: getattr(r.trace, column)
        )
        for method, color in _judged(score)
        if method.best and all(getattr(result.trace, column) for result in method.best.finished)
    ]
    return Chart(
        column,
        f"{title}, {label}",
        "queries",
        label,
        tuple(series),
        log_y=True,
        note="Means over stretches of steps; a stretch without any has no point.",
    )


def _band(
    name: str,
    color: str,
    results: Sequence[RunResult],
    x: Callable[[RunResult], Sequence[float]],
    y: Callable[[RunResult], Sequence[float | None]],
    *,
    scale: float = 1,
    log: bool = True,
) -> Series:
    """The mean over runs and their range, where all of them have a value (above zero, for a logarithmic axis)."""
    columns = list(zip(*map(y, results), strict=False))
    known = [
        [scale * v for v in column if v is not None and math.isfinite(v) and (v > 0 or not log)] for column in columns
    ]
    complete = [len(values) == len(results) for values in known]
    middle, low, high = (
        [function(values) if whole else None for values, whole in zip(known, complete, strict=True)]
        for function in (fmean, min, max)
    )
    return Series(name, color, list(x(results[0]))[: len(columns)], middle, low, high)


def _sensitivity(score: WorkloadScore) -> Chart:
    series = []
    for method, color in _judged(score):
        assert method.best is not None
        if method.method.is_auto:
            continue
        grid = {rate.lr: rate for rate in method.rates if rate.is_complete and not isinstance(rate.lr, str)}
        rates = [grid[lr] for lr in sorted(grid)]
        best = next(lr for lr, rate in grid.items() if rate is method.best)
        x = [lr / best for lr in sorted(grid)]
        whole = [None if rate.diverged else rate for rate in rates]
        notes = [f"lr {rate_name(rate.lr)}" for rate in rates]
        series.append(
            Series(
                f"{method.method.title}, best lr {best:g}",
                color,
                x,
                [rate.mean_loss if rate else None for rate in whole],
                [min(rate.losses) if rate else None for rate in whole],
                [max(rate.losses) if rate else None for rate in whole],
                notes,
                markers=True,
            )
        )
    return Chart(
        "sensitivity",
        "Sensitivity to the learning rate",
        "learning rate, in units of the method's best",
        "final training loss",
        tuple(series),
        log_x=True,
        log_y=True,
        note="A rate at which a run diverged has no point.",
    )
