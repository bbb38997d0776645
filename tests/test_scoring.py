"""Scores against cases worked out by hand."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from scipy import stats

from forwardtune.experiments import scoring, summary
from forwardtune.experiments import spec as specs
from forwardtune.experiments.intervals import Interval, bootstrap_mean, paired, resamples, student
from forwardtune.experiments.plan import plan
from forwardtune.experiments.report.charts import charts
from forwardtune.experiments.report.tables import edge, runs_table, tables
from forwardtune.experiments.result import Curve
from forwardtune.experiments.scoring import MethodScore, RateScore, WorkloadScore
from forwardtune.tasks import Scores
from tests.helpers.comparisons import TEXT, made_up

SPEC = specs.parse(TEXT, "test", Path())
VS2P, STP = SPEC.methods


def result(losses, accuracy=0.5, *, queries=None, diverged=False):
    """A run that was evaluated every ten queries."""
    scores = tuple(Scores(loss, loss, {"accuracy": accuracy}) for loss in losses)
    curve = Curve(tuple(queries or (10 * i for i in range(len(losses)))), scores)
    return made_up(curve, status="diverged" if diverged else "finished")


def flat(loss, accuracy=0.5, **more):
    return result([9.0, loss, loss, loss], accuracy, **more)


def method(rates, kind=VS2P):
    return MethodScore(kind, tuple(RateScore(lr, tuple(results)) for lr, results in rates.items()))


def test_losses_are_smoothed_over_a_tenth_of_the_evaluations_and_never_with_the_start():
    assert scoring.smoothed(result([6.0, 3.0, 0.0, 3.0])) == [6.0, 3.0, 0.0, 3.0]  # three evaluations: each for itself
    curve = [100.0, *map(float, range(20))]  # twenty: two at a time
    assert scoring.smoothed(result(curve)) == [100.0, 0.0, *(i + 0.5 for i in range(19))]
    assert scoring.smoothed(result([6.0, math.nan])) == [6.0, math.inf]


def test_the_best_rate_has_the_lowest_mean_loss_over_seeds():
    score = method({1.0: [flat(1.0), flat(3.0)], 2.5: [flat(1.5), flat(2.0)]})
    assert [rate.mean_loss for rate in score.rates] == [2.0, 1.75]
    assert score.best.lr == 2.5


@pytest.mark.parametrize(("losses", "beyond"), [([1, 2, 3], 0.25), ([3, 2, 1], 64.0), ([2, 1, 3], 0.0)])
def test_beyond_an_end_that_is_best_the_ratio_goes_on(losses, beyond):
    grid = replace(VS2P, lr=(8.0, 1.0, 0.5))  # in any order
    score = method({lr: [flat(loss)] for lr, loss in zip((0.5, 1.0, 8.0), losses, strict=True)}, grid)
    assert score.beyond == beyond
    assert score.at_edge == bool(beyond)


class Made:
    """Results of runs that a function knows a loss of; the others are missing."""

    def __init__(self, spec, loss):
        grid = [2.0**k for k in range(-9, 12)]
        wide = replace(
            spec, methods=tuple(replace(m, lr=tuple(m.lr[0] * factor for factor in grid)) for m in spec.methods)
        )
        self.runs, self.loss = {run.id: run for run in plan(wide)}, loss

    def result(self, run_id):
        loss = self.loss(self.runs[run_id])
        return None if loss is None else flat(loss)


def to_extend(text=TEXT):
    text = text.replace('title = "a test"', 'title = "a test"\nextend = true').replace("[1, 4]", "[1, 2]")
    return specs.parse(text, "test", Path())


@pytest.mark.parametrize(
    ("best", "grid"),
    [(8.0, [1, 2, 4, 8, 16]), (1.0, [0.5, 1, 2]), (2.0, [1, 2, 4]), (1e9, [2**k for k in range(8)])],
)
def test_a_grid_goes_on_until_its_best_rate_is_inside(best, grid):
    """Only the method whose best rate is at an end gets more of them, up to a limit."""
    spec = to_extend()
    made = Made(spec, lambda run: abs(math.log(run.lr / best)))
    assert [sorted(m.lr) for m in scoring.extended(spec, made).methods] == [grid, [1e-3]]
    assert scoring.extended(replace(spec, extend=False), made).methods[0].lr == (1.0, 2.0)
    scores = scoring.score(spec, made)
    assert scores.missing == 0
    assert scores.workloads[0].methods[0].at_edge == (best == 1e9)


def test_a_grid_goes_on_at_both_ends_where_workloads_differ():
    one = TEXT[TEXT.index("[[workloads]]") : TEXT.index("[[methods]]")]
    spec = to_extend(TEXT.replace(one, one + one.replace("[[workloads]]", '[[workloads]]\nname = "other"\nbatch = 9')))
    made = Made(spec, lambda run: abs(math.log(run.lr / (8.0 if run.workload.batch == 9 else 0.125))))
    assert sorted(scoring.extended(spec, made).methods[0].lr) == [2.0**k for k in range(-4, 5)]


def test_a_grid_is_not_extended_before_all_runs_have_finished():
    """What there is of a comparison under way is judged as ever: here one seed of two."""
    spec = to_extend()
    scores = scoring.score(spec, Made(spec, lambda run: 1 / run.lr if run.seed == 0 else None))
    vs2p = scores.workloads[0].methods[0]
    assert (vs2p.method.lr, vs2p.best.lr, scores.missing) == ((1.0, 2.0), 2.0, 3)


def test_an_end_is_marked_as_long_as_what_is_beyond_has_no_results():
    spec = to_extend()
    scores = scoring.score(spec, Made(spec, lambda run: 1 / run.lr if run.lr <= 2 else None))
    vs2p = scores.workloads[0].methods[0]
    assert (vs2p.method.lr, vs2p.best.lr, vs2p.at_edge, scores.missing) == ((1.0, 2.0, 4.0), 2.0, True, 2)
    assert edge(vs2p) == " \N{BLACK RIGHT-POINTING SMALL TRIANGLE}"


def test_of_equals_the_smaller_rate_is_the_best():
    for rates in ((2.5, 1.0), (1.0, 2.5)):
        score = method({lr: [flat(1.0), flat(3.0)] for lr in rates})
        assert score.best.lr == 1.0


def test_a_diverged_seed_makes_a_rate_the_last_choice():
    score = method({1.0: [flat(0.1), flat(0.1, diverged=True)], 2.5: [flat(5.0), flat(6.0)]})
    assert score.best.lr == 2.5
    assert score.rates[0].mean_loss == math.inf
    assert score.rates[0].diverged == 1


def test_if_every_rate_diverged_the_fewest_count_then_the_rest():
    gone = flat(1.0, 0.1, diverged=True)
    score = method({1.0: [gone, gone, flat(0.1)], 2.5: [gone, flat(4.0), flat(2.0)], 5.0: [flat(3.5), gone, flat(2.0)]})
    assert score.best.lr == 5.0
    reached = scoring.accuracy(score)
    assert (reached.diverged, reached.mean) == (1, pytest.approx((0.5 + 0.1 + 0.5) / 3))  # counted, not left out


def test_a_rate_that_lacks_a_seed_is_not_chosen():
    score = method({1.0: [flat(0.1), None], 2.5: [flat(5.0), flat(6.0)]})
    assert score.best.lr == 2.5
    assert method({1.0: [flat(0.1), None]}).best is None
    assert scoring.accuracy(method({1.0: [flat(0.1), None]})) is None


def test_accuracy_is_mean_and_sample_deviation():
    reached = scoring.accuracy(method({1.0: [flat(1.0, a) for a in (0.70, 0.74, 0.78)]}))
    assert reached.mean == pytest.approx(0.74)
    assert reached.std == pytest.approx(0.04)
    assert reached.interval == pytest.approx((0.70, 0.78))  # of 27 resamples 2.5% is less than one
    assert scoring.accuracy(method({1.0: [flat(1.0, 0.7)]})).std is None


def test_acceleration_by_hand():
    """The other ends at 2 after 40 queries; ours is at or below 2 at 20 queries for the first time."""
    other = method({1.0: [result([9.0, 3.0, 2.5, 1.5, 2.0])]})
    ours = method({1.0: [result([9.0, 2.5, 2.0, 2.2, 0.0])]})
    gain = scoring.acceleration(ours, other)
    assert (gain.ratio, gain.reason, gain.interval) == (40 / 20, "", None)


def test_acceleration_by_the_clock():
    """The other needs 80 seconds for its 40 queries; ours is at its final loss after 20 of 40 in 10 seconds."""
    other, ours = (
        method({1.0: [replace(run, circumstances=replace(run.circumstances, seconds=seconds))]})
        for run, seconds in ((result([9.0, 3.0, 2.5, 1.5, 2.0]), 80.0), (result([9.0, 2.5, 2.0, 2.2, 0.0]), 10.0))
    )
    assert scoring.acceleration(ours, other, scoring.seconds).ratio == 80 / 5
    assert scoring.acceleration(other, ours, scoring.seconds).ratio == 0.0


def test_acceleration_is_of_the_mean_over_seeds():
    other = method({1.0: [result([9.0, 2.0, 2.0, 2.0]), result([9.0, 4.0, 4.0, 4.0])]})  # ends at a mean of 3
    ours = method({1.0: [result([5.0, 1.0, 1.0, 1.0]), result([9.0, 9.0, 7.0, 5.0])]})  # 7, 5, 4, 3
    gain = scoring.acceleration(ours, other)
    assert gain.ratio == 1.0
    # the first seed twice: 2 is reached at 10 of 30 queries; the second twice: 4 is never reached
    assert gain.interval == (0.0, 3.0)


def test_acceleration_where_one_of_them_fails():
    ends_at_two = method({1.0: [flat(2.0), flat(2.0)]})
    never = scoring.acceleration(method({1.0: [flat(3.0), flat(3.0)]}), ends_at_two)
    assert (never.ratio, never.interval) == (0.0, (0.0, 0.0))
    assert "not reached" in never.reason
    gone = method({1.0: [flat(2.0, diverged=True), flat(2.0)]})
    assert scoring.acceleration(gone, ends_at_two).ratio == 0.0
    over = scoring.acceleration(ends_at_two, gone)
    assert (over.ratio, over.interval) == (
        math.inf,
        (1.0 * 3, math.inf),
    )  # 2 is reached at the first of three
    worse = method({1.0: [result([1.0, 20.0, 20.0, 20.0])] * 2})  # the other got nowhere: the first is enough
    assert scoring.acceleration(ends_at_two, worse).ratio == 3.0
    assert scoring.acceleration(method({1.0: [None]}), ends_at_two).reason == "runs are missing"


def test_stp_is_compared_at_equal_queries():
    """Its evaluations are at other queries than those of a two-point method, and the budget is counted in queries."""
    stp = method({1e-3: [result([9.0, 6.0, 6.0, 6.0], queries=[0, 21, 39, 60])]}, STP)
    vs2p = method({1.0: [result([9.0, 7.0, 3.0, 3.0], queries=[0, 20, 40, 60])]})
    assert scoring.acceleration(vs2p, stp).ratio == 60 / 40
    assert stp.method.title == "STP\N{PRIME}"
    assert specs.steps(SPEC.workloads[0], STP, 60) == 20


def test_paired_differences_and_students_interval():
    pair = paired([1.0, 2.0, 4.0], [0.5, 1.0, 2.5])
    assert pair.differences == (0.5, 1.0, 1.5)
    half = 4.302652729911275 * 0.5 / math.sqrt(3)
    assert pair.interval == pytest.approx((1 - half, 1 + half))
    assert not pair.is_clear
    assert paired([1.0, 2.0, 3.0], [0.0, 1.1, 1.9]).is_clear
    assert paired([1.0], [0.0]).interval is None
    assert not paired([1.0], [0.0]).is_clear
    assert paired([1.0, 1.0], [1.0, 1.0]).interval == Interval(0.0, 0.0)
    assert not paired([1.0, 1.0], [1.0, 1.0]).is_clear


@pytest.mark.parametrize("freedom", [1, 2, 3, 5, 9, 29, 200])
def test_students_quantile(freedom):
    assert student(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-6)


def test_resamples():
    assert list(resamples(2)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len(list(resamples(6))) == 4000
    assert list(resamples(6)) == list(resamples(6))
    assert bootstrap_mean([1.0]) is None
    # of 256 resamples the 7th from either end: one has a mean of 0, twelve one of 0.25
    assert bootstrap_mean([0.0, 1.0, 1.0, 1.0]) == (0.25, 1.0)
    assert bootstrap_mean([2.0, 2.0, 2.0]) == (2.0, 2.0)


def test_the_edge_of_a_grid_is_noted():
    assert method({1.0: [flat(1.0)], 2.5: [flat(2.0)]}).at_edge
    assert not method({1e-3: [flat(1.0)]}, STP).at_edge  # the only one
    assert method({4.0: [flat(1.0)]}).at_edge  # as another workload has chosen it
    wide = MethodScore(
        specs.parse(TEXT.replace("[1, 4]", "[1, 4, 6]"), "test", Path()).methods[0],
        tuple(RateScore(lr, (flat(loss),)) for lr, loss in ((1.0, 2.0), (2.5, 1.0), (6.0, 2.0))),
    )
    assert not wide.at_edge


def test_the_summary_says_who_won_and_whether_it_may_be_chance():
    def workload(ours, theirs):
        scores = (
            method({1.0: [flat(loss) for loss in ours]}),
            method({1e-3: [flat(loss) for loss in theirs]}, STP),
        )
        return WorkloadScore(SPEC.workloads[0], scores)

    clear = summary.sentence(workload([1.0, 1.1, 0.9], [2.0, 2.2, 1.8]))
    assert clear == (
        "digits-cnn: after 30 queries VS2P has the lowest training loss, 1.00, 50% below STP\N{PRIME} "
        "(by 1.00, 95% interval 0.752 to 1.25)."
    )
    assert "STP\N{PRIME} has the lowest" in summary.sentence(workload([2.0, 2.2, 1.8], [1.0, 1.1, 0.9]))
    noise = summary.sentence(workload([1.0, 2.0], [2.0, 1.9]))
    assert "1.50, not clearly below STP\N{PRIME} (by 0.450, 95% interval " in noise
    assert noise.endswith(": inside the noise).")
    one = summary.sentence(workload([1.0], [2.0]))
    assert one.endswith("1.00, below STP\N{PRIME} by 1.00 (one seed, so this may be chance).")
    gone = (method({1.0: [flat(1.0)]}), method({1e-3: [flat(1.0, diverged=True)]}, STP))
    text = summary.sentence(WorkloadScore(SPEC.workloads[0], gone))
    assert "STP\N{PRIME} diverged in 1 of 1 runs" in text
    missing = (method({1.0: [None]}), method({1e-3: [None]}, STP))
    assert summary.sentence(WorkloadScore(SPEC.workloads[0], missing, 2)) == "digits-cnn: 2 runs missing."


def test_numbers():
    shown = {
        0.0: "0.00",
        2.3: "2.30",
        2.3149: "2.31",
        100.0: "100",
        0.00123: "0.00123",
        12345.0: "1.23e+04",
        3e-5: "3.00e-05",
    }
    for value, text in shown.items():
        assert summary.number(value) == text


def test_an_automatic_rate_is_ranked_beside_a_grid():
    """Also where both have the same loss, and where other workloads have one rate only."""
    auto = specs.parse(TEXT.replace("[1, 4]", '"auto"'), "test", Path()).methods[0]
    scores = (MethodScore(auto, (RateScore("auto", (flat(1.0),)),)), method({1.0: [flat(1.0)]}, STP))
    workload = WorkloadScore(SPEC.workloads[0], scores)
    assert [score.method.label for score in workload.ranking] == ["VS2P", "STP"]
    assert {chart.name for chart in charts(workload)} >= {"loss", "sensitivity"}
    one_of_two = WorkloadScore(SPEC.workloads[0], (method({4.0: [flat(1.0)]}),))
    assert [
        list(series.x) for chart in charts(one_of_two) if chart.name == "sensitivity" for series in chart.series
    ] == [[1]]


def test_of_perplexities_the_lower_is_ahead():
    """And they are no shares, so that nothing is multiplied by a hundred."""

    def measured(value):
        scores = Scores(1.0, 1.0, {"perplexity": value})
        return made_up(Curve((0, 10), (scores, scores)), metrics=("perplexity",))

    low, high = ([measured(start + i / 10) for i in range(3)] for start in (20.0, 25.0))
    ours, theirs = method({1.0: low}), method({1.0: high}, STP)
    workload = WorkloadScore(SPEC.workloads[0], (ours, theirs))
    (pair,) = workload.contests
    assert pair.ahead(pair.accuracy) is ours
    scores = scoring.ComparisonScore(SPEC, (workload,))
    every = tables(scores)
    assert every["accuracy"].title == "Test perplexity"
    assert every["accuracy"].rows == (("VS2P", "20.1 ± 0.1"), ("STP\N{PRIME}", "25.1 ± 0.1"))
    assert every["differences"].header[-2] == "test perplexity"
    assert every["differences"].rows[0][-2:] == ("-5 [-5, -5]", "VS2P ahead")
    assert every["rates"].header[5] == "perplexity"
    assert [row[7] for row in runs_table([workload]).rows] == ["20", "20.1", "20.2", "25", "25.1", "25.2"]
    chart = next(chart for chart in charts(workload) if chart.name == "accuracy")
    assert (chart.y_label, chart.series[0].y) == ("test perplexity", [pytest.approx(20.1)] * 2)
    assert low[0].told_score == "test perplexity 20"
    assert flat(1.0, 0.605).told_score == "test accuracy 60.5%"
