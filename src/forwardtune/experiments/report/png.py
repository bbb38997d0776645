"""Charts as files, by matplotlib."""

from __future__ import annotations

from pathlib import Path

from forwardtune.experiments.report.charts import Chart


def draw(chart: Chart, file: Path) -> None:
    """The chart as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for series in chart.series:
        y = _numbers(series.y)
        axes.plot(
            series.x, y, color=series.color, linewidth=2, label=series.name, marker="o" if series.markers else None
        )
        if series.low:
            low, high = _numbers(series.low), _numbers(series.high)
            axes.fill_between(series.x, low, high, color=series.color, alpha=0.15, linewidth=0)
    axes.set(xlabel=chart.x_label, ylabel=chart.y_label)
    for axis, ticks in (("x", chart.x_ticks), ("y", chart.y_ticks)):
        if ticks:
            axes.set(**{f"{axis}scale": "log"})
            limits = getattr(axes, f"get_{axis}lim")()
            axes.set(**{f"{axis}ticks": ticks, f"{axis}ticklabels": [f"{tick:g}" for tick in ticks]})
            axes.set(**{f"{axis}lim": limits})
    axes.minorticks_off()
    if not chart.log_x:
        axes.margins(x=0)
    axes.set_title(chart.title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=160, format="png")


def _numbers(values: object) -> list[float]:
    return [float("nan") if value is None else value for value in values]  # type: ignore[attr-defined]
