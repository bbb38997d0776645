"""What `forwardtune finetune` says: what is tuned, how long it takes, every evaluation, and what it came to."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

from forwardtune.cli.options import console
from forwardtune.cli.progress import Live
from forwardtune.cli.remaining import clock_time
from forwardtune.experiments.events import Estimated, Evaluated, Event, Finished, Measuring, Started
from forwardtune.experiments.result import RunResult
from forwardtune.finetuning.kept import Kept
from forwardtune.metrics import is_better, is_lower_better, shown
from forwardtune.tasks.task import Scores
from forwardtune.tasks.texts.workload import LM

FALLEN = 0.99
"""A training loss has fallen if it is at most so much of what it was."""
TRY = "more steps (--steps, --minutes), a larger --batch, another --lr or --scale"
TRY_ASKING = ", another question (--template, --word) or --setup"
TRY_LAST = "--keep last saves the last weights instead"


class Tuning(Live):
    """Tells of a single run line by line, with a bar below them in a terminal."""

    def __init__(self) -> None:
        super().__init__(shown=sys.stdout.isatty() and sys.stderr.isatty())
        self.is_described = False
        self.total_queries, self.start = 0, 0.0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Finished):
            return  # the command tells what it came to
        match event:
            case Measuring():
                self._describe(event.about)
            case Started():
                self._describe(event.about)
                self.start, self.total_queries = time.perf_counter(), event.total
        super().__call__(event)
        if isinstance(event, Started) and event.probes == "layerwise":
            console.print("probes: layer by layer, which leaves every bit of the weights as it was")
        match event:
            case Started() if event.queries:
                left = clock_time(self.remaining[event.run].seconds)
                console.print(f"resumes after {event.queries:,} of {event.total:,} queries, about {left} left")
            case Started() if self.estimate:
                console.print(told_estimate(self.estimate), markup=False)
            case Evaluated():
                console.print(self._line(event), markup=False)

    def _describe(self, about: str) -> None:
        if not self.is_described:
            console.print(about, markup=False)
        self.is_described = True

    def _line(self, event: Evaluated) -> str:
        evaluation = event.evaluation
        told = told_scores(evaluation.scores)
        if evaluation.step == 0:
            return f"before tuning: {told}"
        left = clock_time(self.remaining[event.run].seconds)
        at = f"{evaluation.queries:,}/{self.total_queries:,} queries"
        return f"{at}: {told}, {clock_time(evaluation.seconds)} elapsed, {left} left"


def told_scores(scores: Scores) -> str:
    metrics = ", ".join(f"{name} {shown(name, value)}" for name, value in scores.metrics.items())
    return f"training loss {scores.train_loss:.4g}, test {metrics}"


def told_estimate(estimate: Estimated) -> str:
    """As: about 12 minutes: 1,000 queries of 0.7 s, 10 evaluations of 3 s, with 1 thread."""
    times = (
        f"{estimate.queries:,} queries of {_short(estimate.query)}, {estimate.evaluations} "
        f"evaluation{'s' if estimate.evaluations > 1 else ''} of {_short(estimate.evaluation)}"
    )
    others = [
        f"{_short(seconds)} with {number}" for number, seconds in estimate.tried.items() if number != estimate.threads
    ]
    threads = f"{estimate.threads} thread{'s' if estimate.threads > 1 else ''}"
    compared = f" (a query takes {others[0]})" if others else ""
    minutes = f"{estimate.minutes:g} minute{'' if estimate.minutes == 1 else 's'}" if estimate.minutes else ""
    planned = f"planned for {minutes}, of which the run takes " if minutes else ""
    return f"{planned}about {_long(estimate.seconds)}: {times}, with {threads}{compared}"


def _short(seconds: float) -> str:
    return f"{1000 * seconds:.2g} ms" if seconds < 0.0995 else f"{seconds:.2g} s" if seconds < 99 else _long(seconds)


def _long(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def outcome(result: RunResult, kept: Kept, queries_per_step: int) -> Iterator[tuple[str, str]]:
    """What a run came to, in lines with their styles."""
    changes = {name: (result.fitted(name), kept.scores.metrics[name]) for name in result.metrics}
    fits = {name: f"{shown(name, before)} to " for name, before in result.base.before.items()}
    told = ", ".join(f"{name} {fits.get(name, '')}{_change(name, *change)}" for name, change in changes.items())
    told += " (as it was, fitted, tuned)" if fits else ""
    majority = f" (majority class {100 * result.data.majority:.1f})" if result.data.majority else ""
    yield f"test {told}{majority}", ""
    if result.lines:
        kept_to = "had lines of their own in the end" if result.lines == "own" else "shared common lines to the end"
        yield f"examples {kept_to}{_agreed(result.agreement)}", ""
    steps = result.queries // queries_per_step
    if 2 * result.plateaus > steps:
        yield f"{result.plateaus} of {steps} steps saw no difference at all: raise --batch", "yellow"
    is_worse = is_better(result.metric, *changes[result.metric])
    end = result.final.metrics[result.metric]
    if kept.queries == 0:
        was = "as it was fitted" if fits else "as it was"
        yield f"no evaluation was better than before tuning: the model is saved {was} ({TRY_LAST})", "red"
    elif not kept.is_last:
        then = f"the last has {result.metric} {shown(result.metric, end)}"
        yield f"saved is the best evaluation, after {kept.queries:,} queries; {then}", ""
    if is_worse:
        where = "above" if is_lower_better(result.metric) else "below"
        change = _change(result.metric, *changes[result.metric])
        yield f"the test {result.metric} ended {where} where it began: {change}", "red"
    first, last = result.curve.column("train_loss")[0], result.final.train_loss
    if not last <= FALLEN * first:
        how = "has hardly fallen" if last < first else "has not fallen"
        yield f"the training loss {how}: {first:.4g} to {last:.4g}", "yellow"
    if kept.queries == 0 or is_worse or not last <= FALLEN * first:
        yield f"try {TRY}{'' if result.run.workload.get('setup') == LM else TRY_ASKING}", "yellow"


def _agreed(agreement: float | None) -> str:
    return "" if agreement is None else f"; their gradients agree by {agreement:.2g} (1: all alike, 0: unrelated)"


def _change(metric: str, before: float, after: float) -> str:
    return f"{shown(metric, before)} to {shown(metric, after)}"
