"""What is shown while runs are made: bars, nothing, JSON, and TensorBoard's files."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from forwardtune.errors import ExperimentError
from forwardtune.experiments.events import (
    Evaluated,
    Event,
    Finished,
    MakingBase,
    Noted,
    Planned,
    Progressed,
    Started,
)
from forwardtune.experiments.result import scores_to_json


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


class Live(Quiet):
    """A bar for each run under way, and one for all."""

    def __init__(self) -> None:
        super().__init__()
        self.bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("queries, {task.fields[text]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
        )
        self.total: TaskID | None = None
        self.tasks: dict[str, TaskID] = {}
        self.seen: dict[str, int] = {}
        self.begun: float | None = None
        self.queries = self.made = self.left = 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.tasks or self.total is not None:
            self.bars.stop()

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        match event:
            case Planned():
                self._plan(event)
            case MakingBase() if self.total is not None:
                self.bars.update(self.total, text=f"making the base weights of {event.workload}")
            case Started():
                self._start(event)
            case Progressed():
                self._advance(event.run, event.queries)
                self.bars.update(self.tasks[event.run], text=f"loss {event.loss:.3g}")
            case Finished():
                self._finish(event)

    def _plan(self, event: Planned) -> None:
        left = event.runs - event.finished
        done = f", {event.finished} of them made before" if event.finished else ""
        self.console.print(f"{event.spec}: {event.runs} runs{done}", markup=False)
        if left:
            self.bars.start()
            self.left = left
            self.total = self.bars.add_task(f"0 of {left} runs", total=event.queries, text="")

    def _start(self, event: Started) -> None:
        self.bars.start()
        self.begun = self.begun or time.perf_counter()
        self.seen[event.run] = event.queries
        if event.queries and self.total is not None:
            self.bars.advance(self.total, event.queries)
        self.tasks[event.run] = self.bars.add_task(event.title, total=event.total, completed=event.queries, text="")

    def _advance(self, run: str, queries: int) -> None:
        gained, self.seen[run] = queries - self.seen[run], queries
        self.queries += gained
        self.bars.update(self.tasks[run], completed=queries)
        if self.total is not None:
            speed = self.queries / (time.perf_counter() - (self.begun or 0.0))
            self.bars.update(self.total, advance=gained, text=f"{speed:,.0f} queries/s")

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
            self.bars.remove_task(task)
        text = f"training loss {result.final.train_loss:.3g}, test {result.metric} {result.score:.1%}"
        if result.diverged:
            text = f"diverged: {result.reason}"
        self.console.print(f"{result.title}: {text}", markup=False, style="yellow" if result.diverged else "")

    def _task(self, number: TaskID) -> Task:
        return next(task for task in self.bars.tasks if task.id == number)


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
