"""One run: from base weights to a result in the store, or as far as it gets before it is stopped."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from forwardtune import ledger as ledgers
from forwardtune.errors import ExperimentError, LedgerError, NonFiniteLossError
from forwardtune.experiments.backpropagation import BackpropagationUnderWay
from forwardtune.experiments.evaluations import EvaluationLog
from forwardtune.experiments.events import Finished, Noted, Tell, ignore
from forwardtune.experiments.plan import Run
from forwardtune.experiments.result import RunResult
from forwardtune.experiments.spec import Backpropagation
from forwardtune.experiments.store import Store
from forwardtune.experiments.under_way import Ready, RunUnderWay, StartOver
from forwardtune.optimizer import LineSearch
from forwardtune.tasks import Task


class Executed(NamedTuple):
    """A run's result, and its model with the tuned weights; None if the run had finished before."""

    result: RunResult
    model: nn.Module | None


def execute(run: Run, store: Store, task: Task, tell: Tell = ignore, ready: Ready | None = None) -> Executed:
    """Makes the run, or what is left of it, and saves its result; one that has finished is not run again."""
    result, model = store.result(run.id), None
    if result is None:
        result, model = _make(run, store, task, tell, ready)
        assert result is not None
    tell(Finished(run.id, result))
    return Executed(result, model)


def execute_until(step: int, run: Run, store: Store, task: Task, tell: Tell = ignore) -> None:
    """Makes the run up to a step, where it pauses unless it ends before; one that is beyond that step is left alone."""
    if store.result(run.id) is not None or _is_beyond(step, run, store, task):
        return
    result, _ = _make(run, store, task, tell, until=step)
    if result is not None:
        tell(Finished(run.id, result))


def _make(
    run: Run, store: Store, task: Task, tell: Tell, ready: Ready | None = None, until: int | None = None
) -> tuple[RunResult | None, nn.Module]:
    """What is left of a run, to its end or to a step; it has a result in the store if that was its end."""
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Step not taken|.* steps saw the same loss", RuntimeWarning)
        warnings.showwarning = lambda message, *_: tell(Noted(str(message), run.id))
        kind, file = (
            (BackpropagationUnderWay, store.checkpoint(run.id))
            if isinstance(run.method, Backpropagation)
            else (_LineSearchUnderWay, store.ledger(run.id))
        )
        result, model = kind(run, store, task, tell, file, ready, until).proceed()
    if result is not None:
        store.save(result)
    return result, model


def _is_beyond(step: int, run: Run, store: Store, task: Task) -> bool:
    """Whether the run has made this step, and so was evaluated before it if that was due."""
    EvaluationLog(store.evaluations(run.id)).read(step, task.base_id)
    return store.ledger(run.id).exists() and ledgers.read(store.ledger(run.id)).end > step


class _LineSearchUnderWay(RunUnderWay):
    """A run by forward passes; its steps are in its ledger."""

    optimizer: LineSearch

    @property
    def queries(self) -> int:
        return self.optimizer.queries

    @property
    def weights(self) -> int:
        return self.optimizer.field.dimension

    @property
    def probes(self) -> str:
        return self.optimizer.probes

    def _start(self, model: nn.Module) -> None:
        self.optimizer = self._optimizer(model, recorder=ledgers.Ledger(self.file, model))

    def _take_up(self, model: nn.Module) -> int:
        try:
            self.optimizer, step = ledgers.resume(model, self.file)
        except LedgerError as error:
            if not self._is_damaged():
                raise ExperimentError(
                    f"{self.run.title} cannot be resumed: {error}. To make it anew, move {self.file} away"
                ) from None
            raise StartOver(f"{self.file} is damaged") from None
        self.log.begin(step, self.task.base_id)
        queries = self._trace_again(model, step)
        try:
            self._check_evaluations(self._due_until(step, queries))
        except StartOver:
            self._recording().close()
            raise
        return step

    def _is_damaged(self) -> bool:
        """Whether a crash of the machine has left a ledger of which only a part is sound."""
        try:
            recorded = ledgers.read(self.file)
        except LedgerError:
            return False
        return bool(recorded.damage) or recorded.state_end < recorded.end

    def _trace_again(self, model: nn.Module, step: int) -> list[int]:
        """Traces what the method saw before the run was stopped, from its ledger; the queries before each step."""
        optimizer, queries = self._optimizer(model), [0]
        for record in ledgers.read(self.file).records(until=step):
            self._set_lr(optimizer, record.step)
            optimizer.fast_forward(record)
            self.tracer.add(optimizer.last_step)
            queries.append(record.queries)
        return queries

    def _is_due(self, step: int, queries: int, evaluated: int) -> bool:
        """At equal distances, of steps or else of queries."""
        if self.run.lr != "auto":
            return super()._is_due(step, queries, evaluated)
        return queries >= evaluated * self.task.queries / self.evaluations or self._is_over(step, queries)

    def _is_over(self, step: int, queries: int) -> bool:
        if self.run.lr != "auto":
            return super()._is_over(step, queries)
        return queries + self.run.method.most_queries > self.task.queries

    def _due_until(self, step: int, queries: Sequence[int]) -> list[int]:
        """The steps before this one at which the weights were to be evaluated."""
        due: list[int] = []
        for past in range(step):
            if self._is_due(past, queries[past], len(due)):
                due.append(past)
        return due

    def _optimizer(self, model: nn.Module, **options: Any) -> LineSearch:
        return self.run.method.optimizer(model.named_parameters(), self.run.lr, seed=self.run.seed, **options)

    def _recording(self) -> ledgers.Ledger:
        assert isinstance(self.optimizer.recorder, ledgers.Ledger)
        return self.optimizer.recorder

    def _step(self, model: nn.Module, batch: Any) -> float:
        try:
            loss = self.task.losses if self.optimizer.by_example else self.task.loss
            return float(self.optimizer.step(lambda: loss(model, batch)))
        except NonFiniteLossError:
            return math.nan
        finally:
            self.tracer.add(self.optimizer.last_step)

    def _stuck(self) -> str:
        if self.optimizer.nonfinite < self.optimizer.max_nonfinite:
            return ""
        return (
            f"{self.optimizer.nonfinite} steps in a row met a loss that is not finite or would have gone too far, at "
            f"{self.queries:,} queries"
        )

    def _result(self, reason: str) -> RunResult:
        by = self.optimizer
        lines = {True: "common", False: "own"}[by.shares_lines] if by.directions == "auto" else ""
        return replace(super()._result(reason), plateaus=by.plateaus, agreement=by.agreement, lines=lines)
