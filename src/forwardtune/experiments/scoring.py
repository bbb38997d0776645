"""Results as scores, by rules that are the same for every method.

- The training loss of a run is smoothed: the mean of its evaluations over the last tenth of the budget, at least one.
- A run that diverged has an infinite training loss, and the accuracy of the weights at which it was given up. It is
  never left out.
- A method's rate is the one with the lowest mean training loss over the seeds; of equals the smaller. If runs of every
  rate diverged, it is the one with the fewest of them, and of those the one with the lowest mean of the others.
- All methods have the same budget of queries, so one that asks for three a step gets two thirds of the steps (STP').
- The acceleration of one method over another is the other's whole budget divided by the queries after which the
  method's loss, smoothed and averaged over seeds, first is where the other's ended. It is N/A if it never gets there,
  and infinite if the other diverged. It can be no larger than the number of evaluations. In seconds instead of queries
  it is that by the clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean, stdev

from forwardtune.experiments.intervals import Interval, Paired, bootstrap, bootstrap_mean, paired
from forwardtune.experiments.plan import plan, rates
from forwardtune.experiments.result import Rate, Results, RunResult
from forwardtune.experiments.spec import Method, Spec
from forwardtune.metrics import is_better, spoken, titled
from forwardtune.tasks import Workload

FURTHEST = 6
"""Rates by which a grid is extended at most."""
SMOOTHING = 0.1
"""The part of a run's evaluations that its loss is smoothed over."""


@dataclass(frozen=True)
class RateScore:
    """A method with one rate: its results in the order of the seeds, None for a run that is missing."""

    lr: Rate
    results: tuple[RunResult | None, ...]

    @property
    def is_complete(self) -> bool:
        return None not in self.results

    @cached_property
    def finished(self) -> tuple[RunResult, ...]:
        return tuple(result for result in self.results if result is not None)

    @property
    def diverged(self) -> int:
        return sum(result.diverged for result in self.finished)

    @cached_property
    def losses(self) -> list[float]:
        """Final training loss by seed."""
        return [math.inf if r.diverged else smoothed(r)[-1] for r in self.finished]

    @property
    def mean_loss(self) -> float:
        return fmean(self.losses) if self.losses else math.nan

    @property
    def accuracies(self) -> list[float]:
        """Final test accuracy by seed, or another metric of the workload."""
        return [result.score for result in self.finished]

    @property
    def rank(self) -> tuple[float, int, float, float]:
        """The smallest is the best."""
        finite = [loss for loss in self.losses if loss < math.inf]
        return (
            self.mean_loss,
            self.diverged,
            fmean(finite) if finite else math.inf,
            0.0 if isinstance(self.lr, str) else self.lr,
        )


@dataclass(frozen=True)
class MethodScore:
    """A method with all its rates on one workload."""

    method: Method
    rates: tuple[RateScore, ...]

    @cached_property
    def best(self) -> RateScore | None:
        """The rate that it is judged by; None until all seeds of some rate have finished."""
        return min((rate for rate in self.rates if rate.is_complete), key=lambda rate: rate.rank, default=None)

    @property
    def is_complete(self) -> bool:
        return all(rate.is_complete for rate in self.rates)

    @property
    def at_edge(self) -> bool:
        """Whether a rate beyond the grid might have done better."""
        return bool(self.beyond)

    @property
    def beyond(self) -> float:
        """The next rate outside the grid, if the best one is at an end of it; otherwise zero."""
        tried = [rate.lr for rate in self.rates if rate.is_complete and not isinstance(rate.lr, str)]
        grid = sorted(tried if len(self.rates) > 1 else self.method.grid)  # of a single rate, chosen elsewhere
        if self.best is None or len(grid) < 2 or self.best.lr not in (grid[0], grid[-1]):
            return 0.0
        end, inner = grid[:2] if self.best.lr == grid[0] else grid[:-3:-1]
        return float(f"{end * end / inner:.6g}")


@dataclass(frozen=True)
class Accuracy:
    """Test accuracy, or another metric, at the best rate: mean, deviation and interval over seeds."""

    metric: str
    mean: float
    std: float | None
    interval: Interval | None
    diverged: int


def accuracy(score: MethodScore) -> Accuracy | None:
    if score.best is None:
        return None
    values = score.best.accuracies
    std = stdev(values) if len(values) > 1 else None
    return Accuracy(score.best.finished[0].metric, fmean(values), std, bootstrap_mean(values), score.best.diverged)


Spent = Callable[[RunResult], Sequence[float]]
"""What a run has used up at each of its evaluations."""


def queries(result: RunResult) -> Sequence[float]:
    return result.curve.queries


def seconds(result: RunResult) -> Sequence[float]:
    """Those of the whole run, spread evenly over its queries."""
    pace = seconds_of(result) / (result.curve.queries[-1] or 1)
    return [pace * query for query in result.curve.queries]


def seconds_of(result: RunResult) -> float:
    """Those of its steps and evaluations, never zero: results have milliseconds."""
    return max(result.circumstances.seconds, 1e-3)


@dataclass(frozen=True)
class Acceleration:
    """How many times fewer queries or seconds, with the interval over seeds.

    Zero is N/A, infinite that the other diverged.
    """

    ratio: float
    reason: str = ""
    interval: Interval | None = None


def acceleration(fast: MethodScore, other: MethodScore, spent: Spent = queries) -> Acceleration:
    """Of a method over another, both at their best rates."""
    if fast.best is None or other.best is None:
        return Acceleration(0.0, "runs are missing")
    ours, theirs = fast.best.finished, other.best.finished
    ratio, reason = _ratio(ours, theirs, spent)

    def resampled(chosen: tuple[int, ...]) -> float:
        return _ratio([ours[i] for i in chosen], [theirs[i] for i in chosen], spent)[0]

    return Acceleration(ratio, reason, bootstrap(resampled, len(ours)))


def _ratio(ours: Sequence[RunResult], theirs: Sequence[RunResult], spent: Spent) -> tuple[float, str]:
    if any(result.diverged for result in ours):
        return 0.0, "a run of the method diverged"
    if any(result.diverged for result in theirs):
        return math.inf, "a run of the other method diverged"
    goal, budget = mean_curve(theirs)[-1], fmean(spent(result)[-1] for result in theirs)
    for used, loss in list(zip(_means(map(spent, ours)), mean_curve(ours), strict=False))[1:]:
        if loss <= goal:
            return budget / used, ""
    return 0.0, "the other method's final loss was not reached"


def mean_curve(results: Sequence[RunResult]) -> list[float]:
    """Smoothed training loss, the mean over seeds, as far as all of them go."""
    return _means(map(smoothed, results))


def _means(columns: Iterable[Sequence[float]]) -> list[float]:
    return [fmean(values) for values in zip(*columns, strict=False)]


def smoothed(result: RunResult) -> list[float]:
    """The training loss at every evaluation, the mean of it and some before, but never with the start among them."""
    losses = [loss if math.isfinite(loss) else math.inf for loss in result.curve.column("train_loss")]
    size = max(1, round(SMOOTHING * (len(losses) - 1)))
    return losses[:1] + [fmean(losses[max(1, i + 1 - size) : i + 1]) for i in range(1, len(losses))]


@dataclass(frozen=True)
class Contest:
    """Two methods at their best rates, seed by seed; a difference is a - b. None where a run diverged."""

    a: MethodScore
    b: MethodScore
    loss: Paired | None
    accuracy: Paired

    @property
    def metric(self) -> str:
        """What `accuracy` is about."""
        assert self.a.best is not None
        return self.a.best.finished[0].metric

    def ahead(self, pair: Paired) -> MethodScore:
        """The better of the two by its loss or by its metric."""
        is_a = pair.mean < 0 if pair is self.loss else is_better(self.metric, pair.mean, 0.0)
        return self.a if is_a else self.b


def contest(a: MethodScore, b: MethodScore) -> Contest | None:
    if a.best is None or b.best is None:
        return None
    losses = None if a.best.diverged or b.best.diverged else paired(a.best.losses, b.best.losses)
    return Contest(a, b, losses, paired(a.best.accuracies, b.best.accuracies))


@dataclass(frozen=True)
class WorkloadScore:
    """All methods on one workload, and how many of its runs are missing."""

    workload: Workload
    methods: tuple[MethodScore, ...]
    missing: int = 0

    @property
    def ranking(self) -> list[MethodScore]:
        """Methods that can be judged, the one with the lowest training loss first."""
        judged = [score for score in self.methods if score.best is not None]
        return sorted(judged, key=lambda score: score.best.rank if score.best else ())

    @property
    def results(self) -> list[RunResult]:
        return [result for score in self.methods for rate in score.rates for result in rate.finished]

    @property
    def metric(self) -> str:
        """What methods are compared by on the test set."""
        return next((result.metric for result in self.results), "accuracy")

    @property
    def contests(self) -> list[Contest]:
        """The first method of the spec against each of the others."""
        against = (contest(self.methods[0], other) for other in self.methods[1:])
        return [entry for entry in against if entry is not None]


@dataclass(frozen=True)
class ComparisonScore:
    """All that a report tells."""

    spec: Spec
    workloads: tuple[WorkloadScore, ...]

    @property
    def missing(self) -> int:
        return sum(workload.missing for workload in self.workloads)

    @property
    def results(self) -> list[RunResult]:
        return [result for workload in self.workloads for result in workload.results]

    @property
    def metric(self) -> str:
        """What the workloads' metrics are called together."""
        return " or ".join(map(spoken, self._metrics))

    def metric_title(self, share: str = "%") -> str:
        """The same with their units."""
        return titled(*self._metrics, share=share)

    @property
    def _metrics(self) -> list[str]:
        return list(dict.fromkeys(workload.metric for workload in self.workloads))


def extended(spec: Spec, store: Results) -> Spec:
    """With every grid as far beyond an end as the results of the rates before are best there, if the spec says so.

    Nothing is decided before all runs at these rates have finished.
    """
    if not spec.extend:
        return spec
    for _ in range(FURTHEST):
        workloads = _where_rates_are_chosen(spec, store)
        scores = [score for workload in workloads for score in workload.methods]
        if any(workload.missing for workload in workloads) or not any(score.at_edge for score in scores):
            break
        methods = []
        for method in spec.methods:
            beyond = sorted({score.beyond for score in scores if score.method.label == method.label and score.at_edge})
            methods.append(replace(method, lr=(*method.lr, *beyond)))
        spec = replace(spec, methods=tuple(methods))
    return spec


def _where_rates_are_chosen(spec: Spec, store: Results) -> tuple[WorkloadScore, ...]:
    """The scores of the workload that the others take their rates from, or else of all."""
    workloads = (spec.workload(spec.rates_from),) if spec.rates_from else spec.workloads
    return score(replace(spec, workloads=workloads, rates_from="", extend=False), store).workloads


def chosen_rates(spec: Spec, store: Results) -> dict[str, Rate]:
    """The best rates of the workload that the others take theirs from, by method; of none whose runs are missing."""
    if not spec.rates_from:
        return {}
    (scored,) = _where_rates_are_chosen(spec, store)
    return {entry.method.label: entry.best.lr for entry in scored.methods if entry.best and entry.is_complete}


def score(spec: Spec, store: Results) -> ComparisonScore:
    """What the store has of a comparison; of one that is not finished, the seeds that are."""
    spec = extended(spec, store)
    chosen = chosen_rates(spec, store)
    results = {
        (run.workload.name, run.method.label, run.lr, run.seed): store.result(run.id) for run in plan(spec, chosen)
    }
    workloads = []
    for workload in spec.workloads:
        grid = {method.label: rates(spec, workload, method, chosen) for method in spec.methods}
        keys = [(workload.name, method.label, lr) for method in spec.methods for lr in grid[method.label]]
        absent = {seed: sum(results[*key, seed] is None for key in keys) for seed in workload.seeds}
        seeds = [seed for seed in workload.seeds if not absent[seed]] or workload.seeds
        scores = tuple(
            MethodScore(
                method,
                tuple(
                    RateScore(lr, tuple(results[workload.name, method.label, lr, seed] for seed in seeds))
                    for lr in grid[method.label]
                ),
            )
            for method in spec.methods
        )
        undecided = sum(not grid[method.label] for method in spec.methods) * len(workload.seeds)
        workloads.append(WorkloadScore(workload, scores, sum(absent.values()) + undecided))
    return ComparisonScore(spec, tuple(workloads))
