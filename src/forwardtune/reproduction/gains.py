"""The second question: does tuning improve a real pretrained model in an hour of two cores?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist, fmean

from forwardtune.experiments.intervals import Interval, paired
from forwardtune.experiments.scoring import MethodScore, RateScore, WorkloadScore
from forwardtune.experiments.summary import count
from forwardtune.metrics import is_lower_better, is_share, scaled, shown, titled, unit
from forwardtune.reproduction.comparisons import Comparison
from forwardtune.reproduction.cost import is_backpropagation
from forwardtune.reproduction.words import between, ends, listed, score_text, table

FOLDERS = ("gains", "decide")
SECONDS, THREADS = 3600, 2
"""An hour of two cores."""
VERDICTS = {
    "better": "yes",
    "fitted": "yes, by the fit",
    "worse": "no, worse",
    "open": "not decided",
    "one seed": "one seed",
    "not finite": "",
}
IMPROVED = ("better", "fitted")
HEADER = (
    *("workload", "method", "metric", "at the start", "fitted", "after", "gain", "better?", "since the fit"),
    *("queries", "minutes", "threads", "test examples"),
)

QUESTION = "## Does tuning improve a pretrained model in an hour of two cores?\n"
NOTES = """
By forward passes alone, with the command of the preset. Each method is at its best rate, and the minutes are those of
one of its runs, with its evaluations, not those of the fit or of finding the rate. "Fitted" is the score after a new
head, how answers are read, or the last norm of a language model was fitted to training examples by one forward pass
each, where tuning then begins, and "since the fit" is what tuning adds to it. A gain is how much better the test score
is than before: points of a share, or how far a perplexity fell. The 95% interval of an accuracy has both errors, added
as squares: Student's over seeds, and the binomial one of two accuracies on this many test examples, as if each were
measured on examples of its own; they are the same ones, so it is rather too wide. That of another metric is over seeds
alone.
"""


@dataclass(frozen=True)
class Gain:
    """What a method makes of a pretrained model, at its best rate."""

    comparison: Comparison
    workload: WorkloadScore
    method: MethodScore
    best: RateScore

    @property
    def metric(self) -> str:
        return self.workload.metric

    @cached_property
    def starts(self) -> list[float]:
        return [result.first(self.metric) for result in self.best.finished]

    @property
    def fitted(self) -> list[float]:
        """Where something was fitted before tuning began: the scores with which it did."""
        return [result.fitted(self.metric) for result in self.best.finished if result.base.before]

    @property
    def examples(self) -> int:
        """On how many test examples the score is measured."""
        of = self.best.finished[0].data.test
        return min(self.workload.workload.test_examples or of, of)

    @cached_property
    def by_seed(self) -> list[float]:
        """How much better the score is than at the start, as it is told."""
        return self.over(self.starts)

    @cached_property
    def interval(self) -> Interval | None:
        return self.interval_over(self.starts)

    def over(self, before: Sequence[float]) -> list[float]:
        """How much better the score is than these, by seed."""
        sign = -1 if is_lower_better(self.metric) else 1
        pairs = zip(self.best.accuracies, before, strict=True)
        return [sign * (scaled(self.metric, after) - scaled(self.metric, was)) for after, was in pairs]

    def interval_over(self, before: Sequence[float]) -> Interval | None:
        """Of the mean gain; that of an accuracy has the error of the test set, too."""
        gained = self.over(before)
        if not all(map(math.isfinite, gained)):
            return None
        over_seeds = paired(gained, [0.0] * len(gained))
        if over_seeds.interval is None:
            return None
        half = math.hypot(over_seeds.mean - over_seeds.interval.low, self._half_of_test_set(before))
        return Interval(over_seeds.mean - half, over_seeds.mean + half)

    def _half_of_test_set(self, before: Sequence[float]) -> float:
        """Half the width of the binomial interval of a difference of two accuracies, in points."""
        if self.metric != "accuracy":
            return 0.0
        variance = sum(p * (1 - p) for p in (fmean(before), fmean(self.best.accuracies))) / self.examples
        return scaled(self.metric, NormalDist().inv_cdf(0.975) * math.sqrt(variance))

    @property
    def seconds(self) -> float:
        return fmean(result.circumstances.seconds for result in self.best.finished)

    @property
    def threads(self) -> list[int]:
        return [result.threads for result in self.best.finished]

    @property
    def outcome(self) -> str:
        """What the interval says of the score, one of VERDICTS."""
        if not all(map(math.isfinite, self.by_seed)):
            return "not finite"
        if self.interval is None:
            return "one seed"
        if self.interval.low <= 0:
            return "worse" if self.interval.high < 0 else "open"
        since = self.interval_over(self.fitted) if self.fitted else self.interval
        return "better" if since and since.low > 0 else "fitted"

    @property
    def in_time(self) -> bool:
        return self.seconds <= SECONDS and max(self.threads) <= THREADS


def gains(made: Sequence[Comparison]) -> str:
    """The answer, and its table."""
    every = [
        Gain(comparison, workload, method, method.best)
        for comparison in made
        if comparison.folder in FOLDERS
        for workload in comparison.workloads
        for method in workload.methods
        if method.best and not is_backpropagation(method)
    ]
    if not every:
        return f"{QUESTION}\nThere are no results yet that could tell.\n"
    rows = [_row(gain) for gain in every]
    return "\n".join([QUESTION, f"{_answer(every)}\n", table(HEADER, rows), f"{NOTES.strip()}\n"])


def _answer(every: Sequence[Gain]) -> str:
    by_workload: dict[str, list[Gain]] = {}
    for gain in every:
        by_workload.setdefault(gain.comparison.label(gain.workload), []).append(gain)
    improved = [
        max(better, key=lambda gain: fmean(gain.by_seed))
        for group in by_workload.values()
        if (better := [gain for gain in group if gain.outcome in IMPROVED and gain.in_time])
    ]
    if improved:
        where = "" if len(improved) == len(by_workload) else f", on {len(improved)} of {len(by_workload)} workloads"
        minutes = between([gain.seconds / 60 for gain in improved], _minutes)
        text = (
            f"**Yes{where}.** The largest gains whose interval leaves out zero: {'; '.join(map(_told, improved))}. "
            f"A run took {minutes} minutes on {_threads(improved)}."
        )
    else:
        tried = count(len(by_workload), "workload")
        text = f"**Not decidedly.** On {tried} no gain within the hour has an interval that leaves out zero."
    fitted = [interval for gain in every if gain.fitted and (interval := gain.interval_over(gain.fitted))]
    if fitted:
        up, down = sum(interval.low > 0 for interval in fitted), sum(interval.high < 0 for interval in fitted)
        rows = count(len(fitted), "row")
        text += f" What was fitted first is made decidedly better by tuning in {up} of {rows}, and worse in {down}."
    worse = sum(gain.outcome == "worse" for gain in every)
    return text + (f" In {worse} of {count(len(every), 'row')} the score is decidedly worse." if worse else "")


def _told(gain: Gain) -> str:
    name, after = gain.metric, fmean(gain.best.accuracies)
    where = f"{gain.comparison.label(gain.workload)} by {gain.method.method.title}"
    fitted = f" (fitted {_between(gain, gain.fitted)})" if gain.fitted else ""
    return f"{where}, {name} from {_start(gain)}{fitted} to {shown(name, after)}{unit(name)}"


def _row(gain: Gain) -> list[str]:
    name = gain.metric
    share = is_share(name)

    def signed(value: float) -> str:
        if share:
            return f"{value:+.1f}"
        return f"{value:+.0f}" if abs(value) >= 100 else f"{value:+#.3g}".rstrip(".")

    def told(before: Sequence[float]) -> str:
        mean = "" if gain.outcome == "not finite" else signed(fmean(gain.over(before)))
        return mean + ends(gain.interval_over(before), signed)

    return [
        gain.comparison.label(gain.workload),
        gain.method.method.title,
        titled(name),
        _start(gain),
        _between(gain, gain.fitted) if gain.fitted else "",
        score_text(gain.best),
        told(gain.starts),
        VERDICTS[gain.outcome],
        told(gain.fitted) if gain.fitted else "",
        f"{max(result.queries for result in gain.best.finished):,}",
        _minutes(gain.seconds / 60),
        listed([str(n) for n in sorted(set(gain.threads))]),
        f"{gain.examples:,}",
    ]


def _start(gain: Gain) -> str:
    return _between(gain, gain.starts)


def _between(gain: Gain, scores: Sequence[float]) -> str:
    return between(scores, lambda value: shown(gain.metric, value))


def _minutes(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


def _threads(every: Sequence[Gain]) -> str:
    used = sorted({threads for gain in every for threads in gain.threads})
    return f"{between(used, '{:.0f}'.format)} thread{'' if used == [1] else 's'}"
