"""Tables of a comparison: cells to read, and the numbers behind them to compute with."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from forwardtune.experiments.intervals import Interval, Paired, bootstrap_mean
from forwardtune.experiments.result import Json, RunResult, rate_name, scores_to_json
from forwardtune.experiments.scoring import (
    Acceleration,
    Accuracy,
    ComparisonScore,
    Contest,
    MethodScore,
    WorkloadScore,
    acceleration,
    accuracy,
)
from forwardtune.experiments.spec import BACKPROPAGATION
from forwardtune.experiments.summary import number
from forwardtune.markup import csv_cell
from forwardtune.markup import markdown as as_text
from forwardtune.metrics import scaled, shown, titled

UNKNOWN: Json = dict.fromkeys(("mean", "std", "low", "high", "diverged"))


@dataclass(frozen=True)
class Table:
    """`rows` are what is shown, `records` what is behind them."""

    name: str
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    records: tuple[Json, ...]
    note: str = ""

    def markdown(self) -> str:
        return markdown(self.header, self.rows)

    def csv(self) -> str:
        return as_csv(self.records)


def as_csv(records: Iterable[Mapping[str, Any]]) -> str:
    """A row a record, a column for every name that occurs."""
    records, text = list(records), io.StringIO()
    names = dict.fromkeys(name for record in records for name in record)
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(csv_cell, names))
    writer.writerows([csv_cell(record.get(name, "")) for name in names] for record in records)
    return text.getvalue()


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(map(as_text, line))} |" for line in [header, ["---"] * len(header), *rows])


def tables(scores: ComparisonScore) -> dict[str, Table]:
    """Those that have something to show, by name."""
    makers = (_accuracy, _loss, _acceleration, _contests, _cost, _rates)
    every = [make(scores) for make in makers]
    return {table.name: table for table in every if table.rows}


def _by_workload(
    scores: ComparisonScore, name: str, title: str, note: str, cell: Callable[[MethodScore], tuple[str, Json]]
) -> Table:
    """Methods down, workloads across, as in the paper."""
    rows, records = [], []
    for i, method in enumerate(scores.spec.methods):
        cells = []
        for workload in scores.workloads:
            text, numbers = cell(workload.methods[i])
            cells.append(text)
            best = workload.methods[i].best
            records.append(
                {"workload": workload.workload.name, "method": method.title, "lr": best and best.lr, **numbers}
            )
        rows.append((method.title, *cells))
    header = ("method", *(workload.workload.name for workload in scores.workloads))
    return Table(name, title, header, tuple(rows), tuple(records), note)


def _accuracy(scores: ComparisonScore) -> Table:
    def cell(score: MethodScore) -> tuple[str, Json]:
        reached = accuracy(score)
        if reached is None:
            return "runs missing", UNKNOWN
        text = mean_and_deviation(reached)
        ends = _ends(reached.interval)
        return text + _marks(score), {"mean": reached.mean, "std": reached.std, **ends, "diverged": reached.diverged}

    return _by_workload(
        scores,
        "accuracy",
        f"Test {scores.metric_title()}",
        "Mean ± standard deviation over seeds, each method at the rate with the lowest mean final training loss. A run "
        f"that diverged counts with the {scores.metric} at which it was given up.",
        cell,
    )


def mean_and_deviation(reached: Accuracy) -> str:
    spread = f" ± {shown(reached.metric, reached.std)}" if reached.std is not None else ""
    return shown(reached.metric, reached.mean) + spread


def _loss(scores: ComparisonScore) -> Table:
    def cell(score: MethodScore) -> tuple[str, Json]:
        if score.best is None:
            return "runs missing", UNKNOWN
        losses = score.best.losses
        if score.best.diverged:
            return f"diverged{_marks(score)}", {**UNKNOWN, "diverged": score.best.diverged}
        std = stdev(losses) if len(losses) > 1 else None
        text = number(fmean(losses)) + (f" ± {std:.2g}" if std is not None else "")
        numbers = {"mean": fmean(losses), "std": std, **_ends(bootstrap_mean(losses)), "diverged": 0}
        return f"{text} at lr {rate_name(score.best.lr)}{edge(score)}", numbers

    return _by_workload(
        scores,
        "loss",
        "Final training loss",
        "Mean ± standard deviation over seeds; a run's is the mean over the last tenth of its evaluations. ◂ or ▸: the "
        "best rate is the smallest or largest of the grid, and one beyond it might do better.",
        cell,
    )


def _acceleration(scores: ComparisonScore) -> Table:
    rows, records = [], []
    for i, other in enumerate(scores.spec.methods[1:], 1):
        cells = []
        for workload in scores.workloads:
            gain = acceleration(workload.methods[0], workload.methods[i])
            cells.append(ratio_text(gain))
            record = {"workload": workload.workload.name, "over": other.title, "ratio": gain.ratio}
            records.append({**record, **_ends(gain.interval), "reason": gain.reason})
        rows.append((f"over {other.title}", *cells))
    return Table(
        "acceleration",
        f"Training acceleration of {scores.spec.methods[0].title}",
        ("", *(workload.workload.name for workload in scores.workloads)),
        tuple(rows),
        tuple(records),
        "The other method's whole budget of queries divided by the queries after which the method's training loss "
        "first reaches the other's final loss, in brackets the 95% bootstrap interval over seeds. N/A: it never "
        "does; ∞: a run of the other diverged. A ratio can be no larger than the number of evaluations.",
    )


def ratio_text(gain: Acceleration) -> str:
    def ratio(value: float) -> str:
        return "N/A" if value == 0 else "∞" if value == math.inf else f"{value:.1f}"

    interval = f" [{ratio(gain.interval.low)}, {ratio(gain.interval.high)}]" if gain.interval else ""
    return ratio(gain.ratio) + (interval if set(gain.interval or ()) != {gain.ratio} else "")


def _contests(scores: ComparisonScore) -> Table:
    rows, records = [], []
    for workload in scores.workloads:
        for pair in workload.contests:
            names = pair.a.method.title, pair.b.method.title
            rows.append((workload.workload.name, f"{names[0]} - {names[1]}", *_contest_cells(pair)))
            for of, paired in (("training loss", pair.loss), (f"test {workload.metric}", pair.accuracy)):
                record = {"workload": workload.workload.name, "a": names[0], "b": names[1], "of": of}
                numbers = {"mean": paired.mean, **_ends(paired.interval), "clear": paired.is_clear} if paired else {}
                records.append({**record, "mean": None, "low": None, "high": None, "clear": None, **numbers})
    return Table(
        "differences",
        "Differences, seed by seed",
        ("workload", "a - b", "training loss", "", f"test {scores.metric_title('points')}", ""),
        tuple(rows),
        tuple(records),
        "The methods share seeds, and with them batches and directions, so they are compared seed by seed: mean "
        "difference with Student's 95% interval. Where the interval holds zero, the difference may be chance. The "
        "intervals are for the rates that were chosen; they do not know that these were chosen on the same runs.",
    )


def _contest_cells(contest: Contest) -> list[str]:
    cells = []
    for pair, scale in ((contest.loss, 1.0), (contest.accuracy, scaled(contest.metric, 1.0))):
        if pair is None:
            cells += ["a run diverged", ""]
            continue
        cells += [_difference(pair, scale), _verdict(pair, contest)]
    return cells


def _difference(pair: Paired, scale: float) -> str:
    ends = f" [{_signed(scale * pair.interval.low)}, {_signed(scale * pair.interval.high)}]" if pair.interval else ""
    return _signed(scale * pair.mean) + ends


def _verdict(pair: Paired, contest: Contest) -> str:
    if pair.interval is None:
        return "one seed"
    if not pair.is_clear:
        return "inside the noise"
    return f"{contest.ahead(pair).method.title} ahead"


def _cost(scores: ComparisonScore) -> Table:
    rows, records = [], []
    for workload in scores.workloads:
        for score in workload.methods:
            if score.best is None:
                continue
            results = score.best.finished
            seconds = fmean(result.circumstances.seconds for result in results)
            speed = fmean(result.queries_per_second for result in results)
            memory = fmean(result.circumstances.peak_memory for result in results)
            names = workload.workload.name, score.method.title
            rows.append((*names, f"{seconds:,.1f}", f"{speed:,.1f}", f"{memory / 1e6:,.0f}"))
            cost = {"seconds": seconds, "queries_per_second": speed, "peak_memory": memory}
            records.append({"workload": names[0], "method": names[1], "lr": score.best.lr, **cost})
    return Table(
        "cost",
        "Time and memory of a run",
        ("workload", "method", "seconds", "queries per second", "peak MB"),
        tuple(rows),
        tuple(records),
        "Means over seeds, each method at its best rate. Seconds include evaluations, queries per second do not; a step"
        f" by backpropagation counts as {BACKPROPAGATION} queries. Peak memory is that of the device on a GPU, or of"
        " the whole process with its program and data. Times also depend on what else the machine did.",
    )


def _rates(scores: ComparisonScore) -> Table:
    rows, records = [], []
    for workload in scores.workloads:
        for score in workload.methods:
            for rate in score.rates:
                mean = rate.mean_loss
                text = "missing" if not rate.losses else "diverged" if mean == math.inf else number(mean)
                spread = f"{stdev(rate.losses):.2g}" if len(rate.losses) > 1 and mean < math.inf else ""
                accuracy = shown(workload.metric, fmean(rate.accuracies)) if rate.accuracies else ""
                diverged = f"{rate.diverged} of {len(rate.results)}" if rate.diverged else ""
                mark = "best" if rate is score.best else ""
                cells = (
                    workload.workload.name,
                    score.method.title,
                    rate_name(rate.lr),
                    text,
                    spread,
                    accuracy,
                    diverged,
                    mark,
                )
                rows.append(cells)
                record = {"workload": workload.workload.name, "method": score.method.title, "lr": rate.lr}
                finite = {"mean_loss": mean if math.isfinite(mean) else None, "diverged": rate.diverged}
                records.append({**record, **finite, "runs": len(rate.finished), "best": rate is score.best})
    return Table(
        "rates",
        "Every rate",
        ("workload", "method", "lr", "training loss", "±", scores.metric_title(), "diverged", ""),
        tuple(rows),
        tuple(records),
        "Means over seeds.",
    )


def _ends(interval: Interval | None) -> dict[str, float | None]:
    return {"low": interval.low, "high": interval.high} if interval else {"low": None, "high": None}


def _marks(score: MethodScore) -> str:
    assert score.best is not None
    return f" ({score.best.diverged} of {len(score.best.results)} diverged)" if score.best.diverged else ""


def edge(score: MethodScore) -> str:
    """A mark where the best rate is the smallest or the largest of its grid."""
    if not score.at_edge or score.best is None or isinstance(score.best.lr, str):
        return ""
    return " ◂" if score.beyond < score.best.lr else " ▸"


def _signed(value: float) -> str:
    return f"{value:+.2g}"


def runs_table(workloads: Sequence[WorkloadScore]) -> Table:
    """Every run, with where it comes from."""
    rows, records = [], []
    for workload in workloads:
        for score in workload.methods:
            for rate in score.rates:
                for result in rate.finished:
                    record = _run_record(workload, score, result)
                    records.append(record)
                    rows.append(_run_cells(record))
    header = (
        "workload",
        "method",
        "lr",
        "seed",
        "outcome",
        "queries",
        "training loss",
        titled(*dict.fromkeys(workload.metric for workload in workloads)),
        "seconds",
        "queries per second",
        "threads",
        "peak MB",
        "commit",
        "id",
    )
    return Table("runs", "Every run", header, tuple(rows), tuple(records))


def _run_record(workload: WorkloadScore, score: MethodScore, result: RunResult) -> Json:
    here, code = result.circumstances, result.code
    return {
        "workload": workload.workload.name,
        "method": score.method.title,
        "lr": result.run.lr,
        "seed": result.run.seed,
        "status": result.status,
        "reason": result.reason,
        "queries": result.queries,
        **scores_to_json(result.final),
        "metric": result.metric,
        "plateaus": result.plateaus,
        "seconds": here.seconds,
        "queries_per_second": result.queries_per_second,
        "peak_memory": here.peak_memory,
        "sessions": here.sessions,
        "started": here.started,
        "finished": here.finished,
        "host": here.host.name,
        "cpu": here.host.cpu,
        "threads": result.threads,
        "device": result.device,
        **{f"{package}_version": version for package, version in code.versions.items()},
        "commit": code.commit,
        "dirty": code.dirty,
        "id": result.id,
    }


def _run_cells(record: Json) -> tuple[str, ...]:
    commit = (record["commit"] or "")[:8] + (" (changed)" if record["dirty"] else "")
    loss = "not finite" if record["train_loss"] is None else number(record["train_loss"])
    metric, value = record["metric"], record[record["metric"]]
    outcome = f"diverged: {record['reason']}" if record["status"] == "diverged" else record["status"]
    return (
        record["workload"],
        record["method"],
        rate_name(record["lr"]),
        str(record["seed"]),
        outcome,
        f"{record['queries']:,}",
        loss,
        "not finite" if value is None else shown(metric, value),
        f"{record['seconds']:.1f}",
        f"{record['queries_per_second']:,.1f}",
        str(record["threads"]),
        f"{record['peak_memory'] / 1e6:,.0f}",
        commit,
        record["id"],
    )
