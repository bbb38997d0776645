"""Charts as files, by matplotlib."""

from __future__ import annotations

from pathlib import Path

from forwardtune.experiments.report.charts import Chart


def draw(chart: Chart, file: Path) -> None:
    """The chart as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter, NullFormatter

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
    for axis, log in ((axes.xaxis, chart.log_x), (axes.yaxis, chart.log_y)):
        if log:
            axis.axes.set(**{f"{axis.axis_name}scale": "log"})
            axis.set_major_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.5)))
            axis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.5)))
    if not chart.log_x:
        axes.margins(x=0)
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_title(chart.title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=160)


def _numbers(values: object) -> list[float]:
    return [float("nan") if value is None else value for value in values]  # type: ignore[attr-defined]
