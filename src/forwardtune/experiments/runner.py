"""One run: from base weights to a result in the store, or as far as it gets before it is stopped.

Everything it does is a function of its description and the step's number (the batch, the rate, the directions), and the
ledger has the rest, so a run that was killed resumes as if it had not been.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from forwardtune import ledger as ledgers
from forwardtune.errors import ExperimentError, LedgerError, NonFiniteLossError
from forwardtune.experiments import provenance
from forwardtune.experiments.evaluations import EvaluationLog
from forwardtune.experiments.events import Evaluated, Finished, Noted, Paused, Progressed, Started, Tell, ignore
from forwardtune.experiments.plan import Run
from forwardtune.experiments.result import Base, Circumstances, Evaluation, RunResult, Tracer
from forwardtune.experiments.spec import steps
from forwardtune.experiments.store import Store
from forwardtune.optimizer import LineSearch
from forwardtune.tasks import Task
from forwardtune.tasks.identity import file_digest

DIVERGED = 10.0
"""A run is given up when its training loss is so many times that at its start (or that of guessing, if larger)."""
PAUSE = 0.2
"""Seconds between two events that tell how far a run is."""


class Executed(NamedTuple):
    """A run's result, and its model with the tuned weights; None if the run had finished before."""

    result: RunResult
    model: nn.Module | None


class Ready(NamedTuple):
    """What a run would begin by making: the model with the base weights, and its evaluation."""

    model: nn.Module
    evaluation: Evaluation


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
        result, model = _RunUnderWay(run, store, task, tell, ready, until).proceed()
    if result is not None:
        store.save(result)
    return result, model


def _is_beyond(step: int, run: Run, store: Store, task: Task) -> bool:
    """Whether the run has made this step, and so was evaluated before it if that was due."""
    EvaluationLog(store.evaluations(run.id)).read(step, task.base_id)
    return store.ledger(run.id).exists() and ledgers.read(store.ledger(run.id)).end > step


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


class _RunUnderWay:
    """A run in this process, from wherever an earlier one left it."""

    def __init__(self, run: Run, store: Store, task: Task, tell: Tell, ready: Ready | None, until: int | None) -> None:
        self.run, self.task, self.tell, self.until = run, task, tell, until
        self.steps = steps(run.workload, run.method, task.queries)
        self.ledger, self.base = store.ledger(run.id), store.base(task.base_id)
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
        optimizer, model, step = self._begin()
        with _recorder(optimizer):
            reason = self._train(optimizer, model, step)
        return None if reason is None else self._result(optimizer, reason), model

    def _begin(self) -> tuple[LineSearch, nn.Module, int]:
        """From the start, or from where an earlier process left off."""
        torch.manual_seed(self.run.seed)  # where a run stopped in its very first step, nothing else sets the generator
        if self.ledger.exists():
            model = self._model()
            try:
                optimizer, step = ledgers.resume(model, self.ledger)
            except LedgerError as error:
                complaint = str(error)
                if not self._is_damaged():
                    raise ExperimentError(
                        f"{self.run.title} cannot be resumed: {complaint}. To make it anew, move {self.ledger} away"
                    ) from None
                complaint = f"{self.ledger} is damaged"
            else:
                self.log.begin(step, self.task.base_id)
                queries = self._trace_again(model, step)
                if all(due in self.log.at for due in self._due_until(step, queries)):
                    return optimizer, model, step
                self.tracer = Tracer()
                _recorder(optimizer).close()
                complaint = "evaluations are missing"
            self.tell(Noted(f"{self.run.title} starts over: {complaint}", self.run.id))
            self._set_aside()
        self.log = EvaluationLog(self.log.file)
        self.log.file.unlink(missing_ok=True)
        self.log.begin(0, self.task.base_id)
        model = self._model()
        return self._optimizer(model, recorder=ledgers.Ledger(self.ledger, model)), model, 0

    def _model(self) -> nn.Module:
        """With the base weights: the model that they were just made with, or another from their file."""
        model, self.fresh_model = self.fresh_model or self.task.start(self.base), None
        return model

    def _is_damaged(self) -> bool:
        """Whether a crash of the machine has left a ledger of which only a part is sound."""
        try:
            recorded = ledgers.read(self.ledger)
        except LedgerError:
            return False
        return bool(recorded.damage) or recorded.state_end < recorded.end

    def _set_aside(self) -> None:
        """Keeps the ledger, its states and the evaluations under other names."""
        for file in (*self.ledger.parent.glob(f"{self.ledger.name}*"), self.log.file):
            if file.exists():
                file.rename(file.with_name(f"damaged.{file.name}"))

    def _trace_again(self, model: nn.Module, step: int) -> list[int]:
        """Traces what the method saw before the run was stopped, from its ledger; the queries before each step."""
        optimizer, queries = self._optimizer(model), [0]
        for record in ledgers.read(self.ledger).records(until=step):
            self._set_lr(optimizer, record.step)
            optimizer.fast_forward(record)
            self.tracer.add(optimizer.last_step)
            queries.append(record.queries)
        return queries

    def _is_due(self, step: int, queries: int, evaluated: int) -> bool:
        """Whether the weights are evaluated before a step: at equal distances, of steps or else of queries."""
        if self.run.lr != "auto":
            return step in self.due
        return queries >= evaluated * self.task.queries / self.evaluations or self._is_over(step, queries)

    def _is_over(self, step: int, queries: int) -> bool:
        if self.run.lr != "auto":
            return step == self.steps
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

    def _set_lr(self, optimizer: LineSearch, step: int) -> None:
        if self.run.lr != "auto":
            for group in optimizer.param_groups:
                group["lr"] = self.run.lr * decay_factor(self.run.decay, step / self.steps)

    def _train(self, optimizer: LineSearch, model: nn.Module, step: int) -> str | None:
        """Steps and evaluations to the end; the reason, if the run is given up. None if it pauses."""
        start, told = time.perf_counter() - self.log.seconds, 0.0
        if self.first and not self.log.at:
            start -= self.first.seconds
        last = self.steps if self.until is None else self.until
        total = self.task.queries if self.run.lr == "auto" else last * self.run.method.queries_per_step
        left = sum(due <= last for due in self.due) - len(self.log.at)
        self.tell(
            Started(
                self.run.id, self.run.title, optimizer.queries, total, self.task.describe(model), left, optimizer.probes
            )
        )
        while True:
            reason = self._too_many_nonfinite(optimizer)
            due = self._is_due(step, optimizer.queries, len(self.log.at))
            if (due or reason) and step not in self.log.at:
                self._evaluate(model, step, optimizer.queries, start)
            reason = reason or self._diverged()
            if self._is_over(step, optimizer.queries) or reason:
                return reason
            if step == self.until:
                self.tell(Paused(self.run.id, optimizer.queries))
                return None
            self._set_lr(optimizer, step)
            numbers = batch_indices(self.task.examples, self.run.workload.batch, self.run.seed, step)
            loss = self._step(optimizer, model, self.task.batch(numbers))
            self.tracer.add(optimizer.last_step)
            step += 1
            if time.perf_counter() - told > PAUSE:
                told = time.perf_counter()
                self.tell(Progressed(self.run.id, optimizer.queries, loss))

    def _evaluate(self, model: nn.Module, step: int, queries: int, start: float) -> None:
        """Evaluates the weights, unless they are those that were evaluated before the run began."""
        if step == 0 and self.first:
            evaluation, took = self.first, self.first.seconds
        else:
            before, scores = time.perf_counter(), self.task.evaluate(model)
            evaluation = Evaluation(step, queries, time.perf_counter() - start, scores)
            took = time.perf_counter() - before
        self.log.add(evaluation)
        self.tell(Evaluated(self.run.id, evaluation, took))

    def _step(self, optimizer: LineSearch, model: nn.Module, batch: Any) -> float:
        try:
            loss = self.task.losses if optimizer.by_example else self.task.loss
            return float(optimizer.step(lambda: loss(model, batch)))
        except NonFiniteLossError:
            return math.nan

    def _too_many_nonfinite(self, optimizer: LineSearch) -> str:
        if optimizer.nonfinite < optimizer.max_nonfinite:
            return ""
        return (
            f"{optimizer.nonfinite} steps in a row met a loss that is not finite or would have gone too far, at "
            f"{optimizer.queries:,} queries"
        )

    def _diverged(self) -> str:
        """Why the run is to be given up, judging by its last evaluation."""
        first, last = self.log.first.scores.train_loss, self.log.last.scores.train_loss
        limit = DIVERGED * max(first if math.isfinite(first) else 0.0, self.task.guessing) or math.inf
        if math.isfinite(last) and last <= limit:
            return ""
        loss = f"{last:.3g}, above {limit:.3g}" if math.isfinite(last) else "not finite"
        return f"the training loss is {loss}, at {self.log.last.queries:,} queries"

    def _result(self, optimizer: LineSearch, reason: str) -> RunResult:
        return RunResult(
            id=self.run.id,
            title=self.run.title,
            run=self.run.description,
            status="diverged" if reason else "finished",
            reason=reason,
            queries=optimizer.queries,
            metrics=self.task.metrics,
            final=self.log.last.scores,
            curve=self.log.curve,
            trace=self.tracer.trace(),
            plateaus=optimizer.plateaus,
            agreement=optimizer.agreement,
            lines={True: "common", False: "own"}[optimizer.shares_lines] if optimizer.directions == "auto" else "",
            weights=optimizer.field.dimension,
            data=self.task.data,
            base=Base(self.base.stem, file_digest(self.base)),
            code=provenance.code(),
            device=str(self.task.device),
            threads=torch.get_num_threads(),
            circumstances=Circumstances(
                host=provenance.host(),
                started=self.log.started,
                finished=datetime.now(UTC).isoformat(timespec="seconds"),
                sessions=self.log.sessions,
                seconds=round(self.log.seconds, 3),
                peak_memory=provenance.peak_memory(self.task.device),
            ),
        )


def _recorder(optimizer: LineSearch) -> ledgers.Ledger:
    assert isinstance(optimizer.recorder, ledgers.Ledger)
    return optimizer.recorder
