"""What every run does, however its steps are made: it begins or goes on, is evaluated, and may be given up.

Everything it does is a function of its description and the step's number (the batch, the rate, the directions), and its
file has the rest, so a run that was killed resumes as if it had not been.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from forwardtune.experiments import provenance
from forwardtune.experiments.evaluations import EvaluationLog
from forwardtune.experiments.events import Evaluated, Noted, Paused, Progressed, Started, Tell
from forwardtune.experiments.plan import Run
from forwardtune.experiments.result import Base, Circumstances, Evaluation, RunResult, Tracer
from forwardtune.experiments.spec import steps
from forwardtune.experiments.store import Store
from forwardtune.tasks import Task
from forwardtune.tasks.identity import file_digest
from forwardtune.tasks.task import before_fit

DIVERGED = 10.0
"""A run is given up when its training loss is so many times that at its start (or that of guessing, if larger)."""
PAUSE = 0.2
"""Seconds between two events that tell how far a run is."""


class Ready(NamedTuple):
    """What a run would begin by making: the model with the base weights, and its evaluation."""

    model: nn.Module
    evaluation: Evaluation


class StartOver(Exception):  # noqa: N818
    """What is left of a run cannot be gone on with, and why; so it is made from its start."""


def make_base(task: Task, store: Store) -> nn.Module | None:
    """Makes the file of base weights if it does not exist or is not whole; the model that it was made with."""
    file = store.base(task.base_id)
    try:
        with safe_open(file, "pt"):
            return None
    except (OSError, SafetensorError):
        return task.make_base(file)


def decay_factor(decay: str, done: float) -> float:
    """The factor on the learning rate after a part of the steps."""
    return {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "none": 1.0}[decay]


def batch_indices(examples: int, size: int, seed: int, step: int) -> Tensor:
    """The examples of a step's batch: every epoch is a new permutation, without its incomplete last batch."""
    epoch, index = divmod(step, examples // size)
    return _order(examples, seed, epoch)[index * size : (index + 1) * size]


_orders: dict[tuple[int, int, int], Tensor] = {}


def _order(examples: int, seed: int, epoch: int) -> Tensor:
    key = examples, seed, epoch
    if key not in _orders:
        _orders.clear()
        # Distinct for distinct pairs as long as a run has fewer than a million epochs.
        generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
        _orders[key] = torch.randperm(examples, generator=generator)
    return _orders[key]


class RunUnderWay(ABC):
    """A run in this process, from wherever an earlier one left it in `file`."""

    optimizer: torch.optim.Optimizer

    def __init__(
        self,
        run: Run,
        store: Store,
        task: Task,
        tell: Tell,
        file: Path,
        ready: Ready | None = None,
        until: int | None = None,
    ) -> None:
        self.run, self.task, self.tell, self.file, self.until = run, task, tell, file, until
        self.steps = steps(run.workload, run.method, task.queries)
        self.base = store.base(task.base_id)
        self.fresh_model = ready.model if ready else make_base(task, store)
        self.first = ready.evaluation if ready else None
        self.log = EvaluationLog(store.evaluations(run.id))
        self.tracer = Tracer()
        self.evaluations = run.workload.evaluations
        self.due = {round(i * self.steps / self.evaluations) for i in range(self.evaluations + 1)}
        provenance.reset_peak_memory(task.device)
        provenance.code()  # what runs now, whatever becomes of the files

    def proceed(self) -> tuple[RunResult | None, nn.Module]:
        """To the end, or to where it pauses: then there is no result."""
        model, step = self._begin()
        with self._recording():
            reason = self._train(model, step)
        return None if reason is None else self._result(reason), model

    @property
    @abstractmethod
    def queries(self) -> int:
        """Made up to now."""

    @property
    @abstractmethod
    def weights(self) -> int:
        """How many are tuned."""

    @property
    def probes(self) -> str:
        """As `Started` tells them."""
        return "in-place"

    @abstractmethod
    def _start(self, model: nn.Module) -> None:
        """Makes the optimizer of a run that begins."""

    @abstractmethod
    def _take_up(self, model: nn.Module) -> int:
        """Makes the model, the optimizer, the log and the trace those of the run where it was left, after so many
        steps."""

    @abstractmethod
    def _step(self, model: nn.Module, batch: Any) -> float:
        """Makes a step, which is traced; its loss."""

    def _keep(self, model: nn.Module, step: int) -> None:  # noqa: B027
        """Writes what `_take_up` reads, if that is done at evaluations."""

    def _recording(self) -> AbstractContextManager[Any]:
        """Is left when no more steps are made."""
        return nullcontext()

    def _stuck(self) -> str:
        """Why the run is to be given up, judging by its last steps."""
        return ""

    def _begin(self) -> tuple[nn.Module, int]:
        """From the start, or from where an earlier process left off."""
        torch.manual_seed(self.run.seed)  # where a run stopped in its very first step, nothing else sets the generator
        if self.file.exists():
            model = self._model()
            try:
                return model, self._take_up(model)
            except StartOver as reason:
                self.tell(Noted(f"{self.run.title} starts over: {reason}", self.run.id))
            self.tracer = Tracer()
            self._set_aside()
        self.log = EvaluationLog(self.log.file)
        self.log.file.unlink(missing_ok=True)
        self.log.begin(0, self.task.base_id)
        model = self._model()
        self._start(model)
        return model, 0

    def _model(self) -> nn.Module:
        """With the base weights: the model that they were just made with, or another from their file."""
        model, self.fresh_model = self.fresh_model or self.task.start(self.base), None
        return model

    def _check_evaluations(self, due: Collection[int]) -> None:
        """Refuses to go on without those that were due."""
        if not self.log.at.keys() >= set(due):
            raise StartOver("evaluations are missing")

    def _set_aside(self) -> None:
        """Keeps the run's files and its evaluations under other names."""
        for file in (*self.file.parent.glob(f"{self.file.name}*"), self.log.file):
            if file.exists():
                file.rename(file.with_name(f"damaged.{file.name}"))

    def _is_due(self, step: int, queries: int, evaluated: int) -> bool:
        """Whether the weights are evaluated before a step."""
        return step in self.due

    def _is_over(self, step: int, queries: int) -> bool:
        return step == self.steps

    def _set_lr(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        if self.run.lr != "auto":
            for group in optimizer.param_groups:
                group["lr"] = self.run.lr * decay_factor(self.run.decay, step / self.steps)

    def _train(self, model: nn.Module, step: int) -> str | None:
        """Steps and evaluations to the end; the reason, if the run is given up. None if it pauses."""
        start, told = time.perf_counter() - self.log.seconds, 0.0
        if self.first and not self.log.at:
            start -= self.first.seconds
        last = self.steps if self.until is None else self.until
        total = self.task.queries if self.run.lr == "auto" else last * self.run.method.queries_per_step
        left = sum(due <= last for due in self.due) - len(self.log.at)
        about = self.task.describe(model)
        self.tell(Started(self.run.id, self.run.title, self.queries, total, about, left, self.probes))
        while True:
            reason = self._stuck()
            due = self._is_due(step, self.queries, len(self.log.at))
            if (due or reason) and step not in self.log.at:
                self._evaluate(model, step, start)
            reason = reason or self._diverged()
            if self._is_over(step, self.queries) or reason:
                return reason
            if step == self.until:
                self.tell(Paused(self.run.id, self.queries))
                return None
            self._set_lr(self.optimizer, step)
            numbers = batch_indices(self.task.examples, self.run.workload.batch, self.run.seed, step)
            loss = self._step(model, self.task.batch(numbers))
            step += 1
            if time.perf_counter() - told > PAUSE:
                told = time.perf_counter()
                self.tell(Progressed(self.run.id, self.queries, loss))

    def _evaluate(self, model: nn.Module, step: int, start: float) -> None:
        """Evaluates the weights, unless they are those that were evaluated before the run began."""
        if step == 0 and self.first:
            evaluation, took = self.first, self.first.seconds
        else:
            before, scores = time.perf_counter(), self.task.evaluate(model)
            self._keep(model, step)
            evaluation = Evaluation(step, self.queries, time.perf_counter() - start, scores)
            took = time.perf_counter() - before
        self.log.add(evaluation, took)
        self.tell(Evaluated(self.run.id, evaluation, took))

    def _diverged(self) -> str:
        """Why the run is to be given up, judging by its last evaluation."""
        first, last = self.log.first.scores.train_loss, self.log.last.scores.train_loss
        limit = DIVERGED * max(first if math.isfinite(first) else 0.0, self.task.guessing) or math.inf
        if math.isfinite(last) and last <= limit:
            return ""
        loss = f"{last:.3g}, above {limit:.3g}" if math.isfinite(last) else "not finite"
        return f"the training loss is {loss}, at {self.log.last.queries:,} queries"

    def _result(self, reason: str) -> RunResult:
        return RunResult(
            id=self.run.id,
            title=self.run.title,
            run=self.run.description,
            status="diverged" if reason else "finished",
            reason=reason,
            queries=self.queries,
            metrics=self.task.metrics,
            final=self.log.last.scores,
            curve=self.log.curve,
            trace=self.tracer.trace(),
            weights=self.weights,
            data=self.task.data,
            base=Base(self.base.stem, file_digest(self.base), before_fit(self.base)),
            code=provenance.code(),
            device=str(self.task.device),
            threads=torch.get_num_threads(),
            circumstances=Circumstances(
                host=provenance.host(),
                started=self.log.started,
                finished=datetime.now(UTC).isoformat(timespec="seconds"),
                sessions=self.log.sessions,
                seconds=round(self.log.seconds, 3),
                evaluating=round(self.log.evaluating, 3),
                peak_memory=provenance.peak_memory(self.task.device),
            ),
        )
