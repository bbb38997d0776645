"""Numbers of results as the cells and clauses of a page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean, stdev

from forwardtune.experiments.intervals import Interval
from forwardtune.experiments.report.tables import edge, markdown
from forwardtune.experiments.result import rate_name
from forwardtune.experiments.scoring import MethodScore, RateScore, WorkloadScore
from forwardtune.experiments.summary import number
from forwardtune.metrics import is_share, shown


def listed(items: Sequence[str]) -> str:
    """As people list things.

    >>> listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"])
    ('a', 'a and b', 'a, b and c')
    """
    *others, last = items
    return f"{', '.join(others)} and {last}" if others else last


def between(values: Sequence[float], show: Callable[[float], str] = "{:.1f}".format) -> str:
    """From the lowest to the highest, as far as digits tell them apart.

    >>> between([2.0, 1.0]), between([1.01, 1.02])
    ('1.0 to 2.0', '1.0')
    """
    return " to ".join(dict.fromkeys((show(min(values)), show(max(values)))))


def two_digits(value: float) -> str:
    """As deviations are told.

    >>> two_digits(0.01234), two_digits(12.0), two_digits(812.3)
    ('0.012', '12', '812')
    """
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.2g}".rstrip(".")


def spread(values: Sequence[float], show: Callable[[float], str], deviation: Callable[[float], str]) -> str:
    """Mean ± standard deviation; of a single value no deviation.

    >>> spread([1.0, 2.0, 3.0], "{:.2f}".format, two_digits), spread([1.0], "{:.2f}".format, two_digits)
    ('2.00 ± 1.0', '1.00')
    """
    if not all(map(math.isfinite, values)):
        return "not finite"
    return show(fmean(values)) + (f" ± {deviation(stdev(values))}" if len(values) > 1 else "")


def ends(interval: Interval | None, show: Callable[[float], str]) -> str:
    """An interval after the number that it is of; nothing where there is none.

    >>> ends(Interval(-1.0, 2.0), "{:+.1f}".format), ends(None, str)
    (' [-1.0, +2.0]', '')
    """
    return f" [{show(interval.low)}, {show(interval.high)}]" if interval else ""


def loss_text(best: RateScore) -> str:
    """The final training loss of a method at its best rate."""
    return (
        f"{best.diverged} of {len(best.results)} diverged" if best.diverged else spread(best.losses, number, two_digits)
    )


def score_text(best: RateScore) -> str:
    """Its test score; a run that diverged counts with the weights it had."""
    metric = best.finished[0].metric

    def show(value: float) -> str:
        return shown(metric, value)

    diverged = f", {best.diverged} of {len(best.results)} diverged" if best.diverged else ""
    return spread(best.accuracies, show, show if is_share(metric) else two_digits) + diverged


def rate_text(score: MethodScore) -> str:
    """The best rate, marked where it is at an end of its grid."""
    assert score.best is not None
    return "found" if score.method.is_auto else f"{rate_name(score.best.lr)}{edge(score)}"


def starts(workload: WorkloadScore, column: str) -> list[float]:
    """What the runs began with, by seed: all with the same where they start from the same weights."""
    by_seed = {result.run.seed: result.curve.column(column)[0] for result in workload.results}
    return [by_seed[seed] for seed in sorted(by_seed)]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In Markdown, without the columns that say nothing."""
    told = [i for i in range(len(header)) if any(row[i] for row in rows)]
    return markdown([header[i] for i in told], [[row[i] for i in told] for row in rows]) + "\n"
