"""What is shown while runs are made: bars, nothing, JSON, and TensorBoard's files."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from forwardtune.cli.options import Console
from forwardtune.cli.remaining import Remaining, clock_time
from forwardtune.errors import ExperimentError
from forwardtune.experiments.events import (
    Estimated,
    Evaluated,
    Event,
    Finished,
    Judged,
    MakingBase,
    Noted,
    Paused,
    Planned,
    Progressed,
    Started,
    SweepPlanned,
)
from forwardtune.experiments.result import rate_name, scores_to_json


class Listener:
    """Hears of all events, and is entered while there are any."""

    def __call__(self, event: Event) -> None:
        raise NotImplementedError

    def __enter__(self) -> Listener:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class Quiet(Listener):
    """Tells only what the user should know."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)

    def __call__(self, event: Event) -> None:
        if isinstance(event, Noted):
            self.console.print(f"note: {event.text}", style="yellow", markup=False)


class JsonLines(Listener):
    """One JSON object per line, on standard output."""

    def __call__(self, event: Event) -> None:
        print(json.dumps(event.to_json(), allow_nan=False), flush=True)


FIXED = 64
"""Columns that a bar needs beside what it is called: a short bar, counts, a loss and two times."""


class Live(Quiet):
    """A bar for each run under way, and one for all."""

    def __init__(self, *, shown: bool = True) -> None:
        super().__init__()
        self.bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None, table_column=Column(max_width=24)),
            _Text(lambda task: f"{task.completed:,.0f}/{task.total or 0:,.0f} queries{task.fields['text']}"),
            _Text(lambda task: f"{clock_time(task.finished_time or task.elapsed or 0.0)},"),
            _Text(lambda task: f"{clock_time(task.fields['remaining'].seconds)} left"),
            console=self.console,
            transient=True,
            disable=not shown,
        )
        self.total: TaskID | None = None
        self.tasks: dict[str, TaskID] = {}
        self.seen: dict[str, int] = {}
        self.remaining: dict[str, Remaining] = {}
        self.estimate: Estimated | None = None
        self.begun: float | None = None
        self.are_several = False
        self.queries = self.made = self.left = 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.begun is not None or self.total is not None:
            self.bars.stop()

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        match event:
            case Planned():
                self._plan(event)
            case MakingBase() if self.total is not None:
                self.bars.update(self.total, text=", making base weights")
            case Estimated():
                self.estimate = event
            case Started():
                self._start(event)
            case Progressed():
                self._advance(event.run, event.queries)
                self.bars.update(self.tasks[event.run], text=f", loss {event.loss:.3g}")
            case SweepPlanned():
                self.are_several = True
                last = f"of which the last one left gets {event.queries[-1]:,}"
                self.console.print(
                    f"{event.title}: {len(event.lr)} rates on {event.budget:,} queries, {last}", markup=False
                )
            case Judged():
                kept = ", ".join(map(rate_name, event.kept)) or "none"
                self.console.print(
                    f"after {event.queries:,} queries of each: lr {kept} kept of {len(event.losses)}", markup=False
                )
            case Paused():
                self.bars.remove_task(self.tasks.pop(event.run))
            case Evaluated():
                self.remaining[event.run].evaluated(event.took)
                self._advance(event.run, event.evaluation.queries)
            case Finished():
                self._finish(event)

    def _plan(self, event: Planned) -> None:
        left = event.runs - event.finished
        done = f", {event.finished} of them made before" if event.finished else ""
        self.console.print(f"{event.spec}: {event.runs} runs{done}", markup=False)
        if left:
            self.bars.start()
            self.left, self.are_several = left, True
            all_left = self.remaining[""] = Remaining(event.queries)
            self.total = self.bars.add_task(f"0 of {left} runs", total=event.queries, text="", remaining=all_left)

    def _start(self, event: Started) -> None:
        self.bars.start()
        self.begun = self.begun or time.perf_counter()
        self.seen[event.run] = event.queries
        if event.queries and self.total is not None:
            self.bars.advance(self.total, event.queries)
            self.remaining[""].queries -= event.queries
        left = self.remaining[event.run] = Remaining(event.total - event.queries, event.evaluations, self.estimate)
        self.tasks[event.run] = self.bars.add_task(
            self._called(event.title), total=event.total, completed=event.queries, text="", remaining=left
        )

    def _called(self, title: str) -> str:
        """The title as far as there is room for it; a single run needs none."""
        room = max(8, self.console.width - FIXED) if self.are_several else 0
        return title if len(title) <= room else f"{title[: room - 1]}\N{HORIZONTAL ELLIPSIS}" if room else ""

    def _advance(self, run: str, queries: int) -> None:
        gained, self.seen[run] = queries - self.seen[run], queries
        self.queries += gained
        self.remaining[run].progressed(gained)
        self.bars.update(self.tasks[run], completed=queries)
        if self.total is not None:
            self.remaining[""].progressed(gained)
            speed = self.queries / (time.perf_counter() - (self.begun or 0.0))
            self.bars.update(self.total, advance=gained, text=f", {speed:,.0f}/s")

    def _finish(self, event: Finished) -> None:
        result = event.result
        if event.run in self.tasks:
            task = self.tasks[event.run]
            self._advance(event.run, result.queries)
            left = self._task(task).total or 0
            if self.total is not None:  # with the queries that a run which was given up did not use
                self.made += 1
                runs = f"{self.made} of {self.left} runs"
                self.bars.update(self.total, advance=left - result.queries, description=runs)
                self.remaining[""].queries -= int(left) - result.queries
            self.bars.remove_task(task)
        text = f"training loss {result.final.train_loss:.3g}, {result.told_score}"
        if result.diverged:
            text = f"diverged: {result.reason}"
        self.console.print(f"{result.title}: {text}", markup=False, style="yellow" if result.diverged else "")

    def _task(self, number: TaskID) -> Task:
        return next(task for task in self.bars.tasks if task.id == number)


class _Text(ProgressColumn):
    """A text that is never cut: if there is no room it is the bar that becomes shorter."""

    max_refresh = 0.2

    def __init__(self, text: Callable[[Task], str]) -> None:
        super().__init__(Column(no_wrap=True))
        self.text = text

    def render(self, task: Task) -> Text:
        return Text(self.text(task))


class TensorBoard(Listener):
    """Writes every evaluation to TensorBoard's files, and passes all events on."""

    def __init__(self, folder: Path, then: Listener) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ExperimentError("--tensorboard needs tensorboard; install it: pip install tensorboard") from None
        self.folder, self.then, self.make = folder, then, SummaryWriter
        self.writers: dict[str, Any] = {}

    def __enter__(self) -> TensorBoard:
        self.then.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for writer in self.writers.values():
            writer.close()
        self.then.__exit__(kind, error, trace)

    def __call__(self, event: Event) -> None:
        self.then(event)
        match event:
            case Started():
                name = event.title.replace(" ", "_").replace("\N{PRIME}", "")
                self.writers[event.run] = self.make(str(self.folder / f"{name}_{event.run[:6]}"))
            case Evaluated():
                for tag, value in scores_to_json(event.evaluation.scores).items():
                    if value is not None:
                        self.writers[event.run].add_scalar(tag, value, event.evaluation.queries)
            case Finished() if event.run in self.writers:
                self.writers.pop(event.run).close()
