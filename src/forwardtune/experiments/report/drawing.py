"""Charts drawn by matplotlib: as PNG, and as SVG within a page."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from forwardtune.experiments.report.charts import Chart
from forwardtune.experiments.result import Json

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "path.simplify": False,  # every value has its point
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # names are not formulas
}
NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that no document in XML may have."""
NARROW = 28
"""Letters of a name, at most, of which two fit beside each other."""
SERIES = "series-"
"""What marks a part of a picture as that of a series, before its number."""


def png(chart: Chart, file: Path) -> None:
    """The chart as a file, with its title."""
    from matplotlib import rc_context

    with rc_context(STYLE):
        figure = _drawn(chart)
        figure.suptitle(chart.title, x=0.01, ha="left")
        figure.savefig(file, format="png", dpi=160)


def svg(chart: Chart, key: str) -> tuple[str, Json]:
    """The chart as an `svg` element, whose ids all depend on the key, and what a page shows of it under the pointer."""
    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context({**STYLE, "svg.hashsalt": key}):
        figure = _drawn(chart)
        figure.savefig(text, format="svg", metadata={"Date": None})
    picture = ElementTree.fromstring(NOT_XML.sub("?", text.getvalue()))
    names = ", ".join(series.name for series in chart.series)
    return _inline(picture, key, f"{chart.title}: {names}"), _values(chart, figure)


def _drawn(chart: Chart) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.ticker import StrMethodFormatter

    names = [series.name for series in chart.series]
    columns = 2 if max(map(len, names)) <= NARROW else 1
    figure = Figure(figsize=(6.4, 3.6 + 0.2 * math.ceil(len(names) / columns)), layout="constrained")
    axes = figure.subplots()
    lines = []
    for number, series in enumerate(chart.series):
        (line,) = axes.plot(series.x, _numbers(series.y), color=series.color, linewidth=2)
        line.set(marker="o" if series.markers else "", markersize=5, gid=f"{SERIES}{number}")
        lines.append(line)
        if series.low:
            low, high = _numbers(series.low), _numbers(series.high)
            band = axes.fill_between(series.x, low, high, color=series.color, alpha=0.15, linewidth=0)
            band.set_gid(f"{SERIES}{number}")
    axes.set(xlabel=chart.x_label, ylabel=chart.y_label)
    if chart.log_x:
        axes.set_xscale("log")
        _label(axes.xaxis)
    else:
        axes.margins(x=0)
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    if chart.log_y:
        axes.set_yscale("log")
        _label(axes.yaxis)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    above: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1.01), "borderaxespad": 0, "borderpad": 0.2}
    axes.legend(lines, names, ncols=columns, frameon=False, **above)
    return figure


def _label(axis: Axis) -> None:
    """Plain numbers on a logarithmic axis; on one of less than a decade they are as far apart as on a linear one."""
    from matplotlib.ticker import AutoLocator, LogFormatter, NullLocator, StrMethodFormatter

    class Plain(LogFormatter):
        def __call__(self, x: float, pos: int | None = None) -> str:
            return f"{x:g}" if super().__call__(x, pos) else ""

    low, high = axis.get_view_interval()
    if high < 10 * low:
        axis.set_major_locator(AutoLocator())
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(StrMethodFormatter("{x:.6g}"))
    else:
        axis.set_major_formatter(Plain())
        axis.set_minor_formatter(Plain(minor_thresholds=(2.5, 1)))


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


def _inline(picture: ElementTree.Element, key: str, label: str) -> str:
    """The picture for a page that has others: its names and rules are its own, its numbers as long as one can see."""
    parts = list(picture.iter())
    targets = {name for part in parts for value in part.attrib.values() for name in re.findall(r"#(\w+)", value)}
    for part in parts:
        for child in [*part.findall("{*}metadata"), *part.findall("{*}defs/{*}style/..")]:
            part.remove(child)
        part.tag = _local(part.tag)
        part.text, part.tail = (part.text if part.tag == "text" else None), None
        name = part.attrib.pop("id", "")
        if name.startswith(SERIES):
            part.attrib["data-series"] = name.removeprefix(SERIES)
        elif name in targets:
            part.attrib["id"] = name
        part.attrib = {_local(name): _short(name, value) for name, value in part.attrib.items()}
    picture.attrib = {"id": key, "viewBox": picture.attrib["viewBox"], "role": "img", "aria-label": label}
    return ElementTree.tostring(picture, encoding="unicode")


def _local(name: str) -> str:
    """Without its namespace, which HTML knows."""
    return name.rpartition("}")[2]


def _short(name: str, value: str) -> str:
    if name not in ("d", "x", "y", "transform"):
        return value
    rounded = re.sub(r"-?\d+\.\d+", lambda number: f"{float(number[0]):.1f}".removesuffix(".0"), value)
    return re.sub(r"\s*([A-Za-z])\s*", r"\1", rounded).strip() if name == "d" else rounded


def _values(chart: Chart, figure: Figure) -> Json:
    """The series to six digits, and the ends of the axes as numbers and as places in the picture."""
    (axes,), (width, height) = figure.axes, 72 * figure.get_size_inches()
    box, (left, right), (bottom, top) = axes.get_position(), axes.get_xlim(), axes.get_ylim()
    series = [
        {
            "name": series.name,
            "color": series.color,
            "x": list(map(_digits, series.x)),
            "y": list(map(_digits, series.y)),
            **({"notes": list(series.notes)} if series.notes else {}),
        }
        for series in chart.series
    ]
    return {
        "label": chart.x_label,
        "x": _axis(chart.log_x, left, right, box.x0 * width, box.x1 * width),
        "y": _axis(chart.log_y, bottom, top, (1 - box.y0) * height, (1 - box.y1) * height),
        "series": series,
    }


def _axis(log: bool, low: float, high: float, start: float, end: float) -> Json:
    return {"log": log, "low": float(low), "high": float(high), "from": round(start, 1), "to": round(end, 1)}


def _digits(value: float | None) -> float | None:
    return value if value is None or isinstance(value, int) else float(f"{value:.6g}")
