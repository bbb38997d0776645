"""Intervals over a handful of seeds: plain floats."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from statistics import fmean, stdev
from typing import NamedTuple

ENUMERATED = 5
"""Up to so many seeds every resample is taken, beyond that RESAMPLES drawn ones."""
RESAMPLES = 4000


class Interval(NamedTuple):
    low: float
    high: float


def resamples(n: int) -> Iterator[tuple[int, ...]]:
    """Ways to draw n of n with replacement: all of them if they are few, otherwise many, always the same."""
    if n <= ENUMERATED:
        yield from product(range(n), repeat=n)
    else:
        draw = random.Random(0)
        for _ in range(RESAMPLES):
            yield tuple(draw.choices(range(n), k=n))


def bootstrap(statistic: Callable[[tuple[int, ...]], float], n: int) -> Interval | None:
    """The middle 95%, or just more, of a statistic of n seeds, given by their numbers; None for a single seed."""
    if n < 2:
        return None
    values = sorted(statistic(chosen) for chosen in resamples(n))
    last = len(values) - 1
    return Interval(values[math.floor(0.025 * last)], values[math.ceil(0.975 * last)])


def bootstrap_mean(values: Sequence[float]) -> Interval | None:
    return bootstrap(lambda chosen: fmean(values[i] for i in chosen), len(values))


class Paired(NamedTuple):
    """Differences of two methods seed by seed: their mean, and Student's 95% interval for it (None for one seed)."""

    differences: tuple[float, ...]
    mean: float
    interval: Interval | None

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.interval is not None and (self.interval.low > 0 or self.interval.high < 0)


def paired(a: Sequence[float], b: Sequence[float]) -> Paired:
    """a - b, seed by seed.

    Student's interval, not a bootstrap: of two or three differences a bootstrap knows nothing but their range, and
    would call a difference clear as soon as they have one sign.
    """
    differences = tuple(x - y for x, y in zip(a, b, strict=True))
    mean, n = fmean(differences), len(differences)
    if n < 2:
        return Paired(differences, mean, None)
    half = student(n - 1) * stdev(differences) / math.sqrt(n)
    return Paired(differences, mean, Interval(mean - half, mean + half))


def student(freedom: int) -> float:
    """The 97.5% quantile of Student's distribution, by bisection of its integral (Simpson's rule in an angle)."""

    def below(angle: float) -> float:
        """P(0 < T < sqrt(freedom) tan(angle)), whose density in the angle is in proportion to cos^(freedom - 1)."""
        n = 2000
        points = [math.cos(angle * i / n) ** (freedom - 1) for i in range(n + 1)]
        area = (points[0] + points[-1] + 4 * sum(points[1:-1:2]) + 2 * sum(points[2:-1:2])) * angle / (3 * n)
        scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
        return scale * area

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < 0.475 else (low, middle)
    return math.sqrt(freedom) * math.tan(low)
