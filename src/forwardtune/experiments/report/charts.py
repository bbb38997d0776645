"""Charts of a comparison, as data: drawn by plotly in the browser and by matplotlib into files."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from forwardtune.experiments.result import Json, RunResult, rate_name
from forwardtune.experiments.scoring import MethodScore, WorkloadScore
from forwardtune.metrics import scaled

COLORS = ("#0b6e4f", "#c8553d", "#4a6fa5", "#8f5aa8", "#b8860b", "#5a5a5a", "#2a9d9d", "#a84a6b")


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

    @property
    def x_ticks(self) -> list[float] | None:
        return log_ticks([x for series in self.series for x in series.x]) if self.log_x else None

    @property
    def y_ticks(self) -> list[float] | None:
        values = [y for series in self.series for y in (*series.y, *series.low, *series.high) if y is not None]
        return log_ticks(values) if self.log_y else None


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


def log_ticks(values: Sequence[float]) -> list[float] | None:
    """Places for labels on a logarithmic axis, the more digits the shorter it is; None if it is too short for one."""
    positive = [value for value in values if value > 0]
    if not positive:
        return None
    low, high = min(positive), max(positive)
    span = math.log10(high / low)
    digits = (1,) if span > 3 else (1, 2, 5) if span > 0.9 else (1, 1.5, 2, 3, 4, 5, 6, 8)
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    ticks = [float(f"{digit}e{power}") for power in powers for digit in digits]
    return ticks if sum(low <= tick <= high for tick in ticks) >= 3 else None


def plotly(chart: Chart) -> Json:
    """The chart in plotly's terms."""
    data: list[Json] = []
    for series in chart.series:
        base = {"x": list(series.x), "legendgroup": series.name, "mode": "lines"}
        if series.low:
            edge = {**base, "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
            data.append({**edge, "y": list(series.low)})
            data.append({**edge, "y": list(series.high), "fill": "tonexty", "fillcolor": _faint(series.color)})
        line = {"color": series.color, "width": 2}
        hover = {"text": list(series.notes), "hovertemplate": "%{y:.4g} (%{text})"} if series.notes else {}
        mode = "lines+markers" if series.markers else "lines"
        data.append({**base, "y": list(series.y), "name": series.name, "line": line, "mode": mode, **hover})
    axes: dict[str, Json] = {
        "xaxis": {"title": {"text": chart.x_label}},
        "yaxis": {"title": {"text": chart.y_label}},
    }
    for axis, ticks in (("xaxis", chart.x_ticks), ("yaxis", chart.y_ticks)):
        if ticks:
            axes[axis] |= {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}
    return {"data": data, "layout": axes}


def _faint(color: str) -> str:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.15)"
