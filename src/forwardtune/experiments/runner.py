"""One run: from base weights to a result in the store, or as far as it gets before it is stopped.

Everything it does is a function of its description and the step's number (the batch, the rate, the directions), and the
ledger has the rest, so a run that was killed goes on as if it had not been.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from forwardtune import ledger as ledgers
from forwardtune.errors import ExperimentError, LedgerError, NonFiniteLossError
from forwardtune.experiments import provenance
from forwardtune.experiments.evaluations import EvaluationLog
from forwardtune.experiments.plan import Run
from forwardtune.experiments.spec import steps
from forwardtune.experiments.store import Store
from forwardtune.optimizer import LineSearch
from forwardtune.tasks import Sources, Task, digest, prepare

Event = dict[str, Any]
Tell = Callable[[Event], None]

DIVERGED = 10.0
"""A run is given up when its training loss is so many times that at its start (or that of guessing, if larger)."""
BINS = 100
"""Points of a trace."""
PAUSE = 0.2
"""Seconds between two events that tell how far a run is."""


def execute(run: Run, store: Store, sources: Sources, *, device: str = "cpu", tell: Tell = lambda event: None) -> Event:
    """Makes the run, or what is left of it, and saves its result; one that has finished is not run again."""
    done = store.result(run.id)
    if done is None:
        task = prepare(run.workload, sources, device)
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Step not taken|.* steps saw the same loss", RuntimeWarning)
            done = _Progress(run, store, task, tell).finish()
        store.save(done)
    tell({"event": "done", "run": run.id, "result": done})
    return done


def base_of(task: Task, store: Store) -> Path:
    """The file of base weights, made if it is not there, or not whole."""
    file = store.bases / f"{task.base_id}.safetensors"
    try:
        with safe_open(file, "pt"):
            return file
    except (OSError, SafetensorError):
        task.make_base(file)
    return file


def rate(decay: str, done: float) -> float:
    """The factor on the learning rate after a part of the steps."""
    return {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "none": 1.0}[decay]


def batch_numbers(examples: int, size: int, seed: int, step: int) -> Tensor:
    """The examples of a step's batch: every epoch goes through a new permutation, without its incomplete last batch."""
    epoch, place = divmod(step, examples // size)
    return _order(examples, seed, epoch)[place * size : (place + 1) * size]


_orders: dict[tuple[int, int, int], Tensor] = {}


def _order(examples: int, seed: int, epoch: int) -> Tensor:
    key = examples, seed, epoch
    if key not in _orders:
        _orders.clear()
        # Distinct for distinct pairs as long as a run has fewer than a million epochs.
        generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
        _orders[key] = torch.randperm(examples, generator=generator)
    return _orders[key]


class _Progress:
    """A run under way."""

    def __init__(self, run: Run, store: Store, task: Task, tell: Tell) -> None:
        self.run, self.task, self.tell = run, task, tell
        self.steps = steps(run.workload, run.method, task.queries)
        self.ledger = store.runs / f"{run.id}.ledger"
        self.base = base_of(task, store)
        self.looks = EvaluationLog(store.runs / f"{run.id}.looks")
        evaluations = run.workload.evaluations
        self.due = {round(i * self.steps / evaluations) for i in range(evaluations + 1)}
        provenance.forget_peak(task.device)
        provenance.code()  # what runs now, whatever becomes of the files

    def finish(self) -> Event:
        optimizer, model, step = self._begin()
        with _recorder(optimizer):
            reason = self._go_on(optimizer, model, step)
        return self._result(optimizer, model, reason)

    def _go_on(self, optimizer: LineSearch, model: nn.Module, step: int) -> str:
        """Steps and looks to the end; why there were no more, if the run is given up."""
        start, told = time.perf_counter() - self.looks.seconds, 0.0
        total = self.steps * self.run.method.queries_per_step
        about = self.task.describe(model)
        self._tell("start", title=self.run.title, queries=optimizer.queries, total=total, about=about)
        while True:
            reason = self._too_many_nonfinite(optimizer)
            if (step in self.due or reason) and step not in self.looks.at:
                found = self.task.evaluate(model)
                seconds = time.perf_counter() - start
                self._tell("look", **self.looks.add(step, optimizer.queries, seconds, found))
            reason = reason or self._diverged()
            if step == self.steps or reason:
                return reason
            for group in optimizer.param_groups:
                group["lr"] = self._lr(step)
            numbers = batch_numbers(self.task.examples, self.run.workload.batch, self.run.seed, step)
            loss = self._step(optimizer, model, self.task.batch(numbers))
            step += 1
            if time.perf_counter() - told > PAUSE:
                told = time.perf_counter()
                self._tell("progress", queries=optimizer.queries, loss=loss)

    def _tell(self, event: str, **more: Any) -> None:
        self.tell({"event": event, "run": self.run.id, **more})

    def _begin(self) -> tuple[LineSearch, nn.Module, int]:
        """From the start, or from where an earlier process left it."""
        torch.manual_seed(self.run.seed)  # where a run stopped in its very first step, nothing else sets the generator
        if self.ledger.exists():
            model = self.task.start(self.base)
            try:
                optimizer, step = ledgers.resume(model, self.ledger)
            except LedgerError as error:
                complaint = str(error)
                if not self._is_damaged():
                    raise ExperimentError(
                        f"{self.run.title} cannot go on: {complaint}. To make it anew, move {self.ledger} away"
                    ) from None
            else:
                self.looks.begin(step, self.task.base_id)
                if all(due in self.looks.at for due in self.due if due < step):
                    return optimizer, model, step
                _recorder(optimizer).close()
                complaint = "evaluations are missing"
            self._tell("note", text=f"{self.run.title} starts over: {complaint}")
            self._set_aside()
        self.looks = EvaluationLog(self.looks.file)
        self.looks.file.unlink(missing_ok=True)
        self.looks.begin(0, self.task.base_id)
        model = self.task.start(self.base)
        return self._optimizer(model, recorder=ledgers.Ledger(self.ledger, model)), model, 0

    def _is_damaged(self) -> bool:
        """Whether a crash of the machine has left a ledger of which only a part is sound."""
        try:
            run = ledgers.read(self.ledger)
        except LedgerError:
            return False
        return bool(run.damage) or run.state_end < run.end

    def _set_aside(self) -> None:
        for file in self.ledger.parent.glob(f"{self.run.id}.l*"):  # the ledger, its states, the evaluations
            file.rename(file.with_name(f"damaged.{file.name}"))

    def _optimizer(self, model: nn.Module, **options: Any) -> LineSearch:
        return self.run.method.optimizer(model.named_parameters(), self.run.lr, seed=self.run.seed, **options)

    def _lr(self, step: int) -> float:
        return self.run.lr * rate(self.run.decay, step / self.steps)

    def _step(self, optimizer: LineSearch, model: nn.Module, batch: Any) -> float:
        try:
            return float(optimizer.step(lambda: self.task.loss(model, batch)))
        except NonFiniteLossError:
            return math.nan

    def _too_many_nonfinite(self, optimizer: LineSearch) -> str:
        nonfinite: int = optimizer.param_groups[0]["run"]["nonfinite"]
        if nonfinite < optimizer.max_nonfinite:
            return ""
        return (
            f"{nonfinite} steps in a row met a loss that is not finite or would have gone too far, at "
            f"{optimizer.queries:,} queries"
        )

    def _diverged(self) -> str:
        """Why the run is to be given up, judging by its last look."""
        first, *_, last = [self.looks.at[0], *self.looks.at.values()]
        limit = DIVERGED * max(first["train_loss"] or 0.0, self.task.guessing)
        if last["train_loss"] is None or last["train_loss"] > limit:
            loss = "not finite" if last["train_loss"] is None else f"{last['train_loss']:.3g}, above {limit:.3g}"
            return f"the training loss is {loss}, at {last['queries']:,} queries"
        return ""

    def _result(self, optimizer: LineSearch, model: nn.Module, reason: str) -> Event:
        looks, device = self.looks, self.task.device
        last = list(looks.at.values())[-1]
        measured = ("train_loss", "test_loss", *self.task.metrics)
        return {
            "id": self.run.id,
            "title": self.run.title,
            "run": self.run.description,
            "status": "diverged" if reason else "finished",
            "reason": reason,
            "queries": optimizer.queries,
            "metrics": list(self.task.metrics),
            "final": {name: last[name] for name in measured},
            "curve": {name: looks.column(name) for name in ("queries", *measured)},
            "trace": self._trace(model),
            "plateaus": optimizer.plateaus,
            "weights": optimizer.field.dimension,
            "data": self.task.data,
            "base": {"id": self.base.stem, "digest": digest(self.base)},
            "code": provenance.code(),
            "device": str(device),
            "threads": torch.get_num_threads(),
            "circumstances": {
                "host": provenance.host(),
                "started": looks.sessions[0]["session"],
                "finished": datetime.now(UTC).isoformat(timespec="seconds"),
                "sessions": len(looks.sessions),
                "seconds": round(looks.seconds, 3),
                "peak_memory": provenance.peak_memory(device),
            },
        }

    def _trace(self, model: nn.Module) -> dict[str, list[Any]]:
        """What the method saw and did, in means over stretches of steps, from the ledger."""
        optimizer = self._optimizer(model)
        rows = []
        for record in ledgers.read(self.ledger).records():
            for group in optimizer.param_groups:
                group["lr"] = self._lr(record.step)
            optimizer.fast_forward(record)
            line = optimizer.last_step.lines[0][0] if optimizer.last_step and record.taken else None
            slope, spread = (line.gamma, line.sigma) if line else (None, None)
            rows.append((record.queries, record.loss, slope and abs(slope), spread, abs(line.t) if line else None))
        size = math.ceil(len(rows) / BINS) or 1
        stretches = [list(zip(*rows[i : i + size], strict=True)) for i in range(0, len(rows), size)]
        columns = [[_mean(stretch[i]) for stretch in stretches] for i in range(1, 5)]
        names = ("loss", "gamma", "sigma", "alpha")
        queries = [stretch[0][-1] for stretch in stretches]
        return {"queries": queries, **{name: c for name, c in zip(names, columns, strict=True) if any(c)}}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.fmean(known) if known else None


def _recorder(optimizer: LineSearch) -> ledgers.Ledger:
    assert isinstance(optimizer.recorder, ledgers.Ledger)
    return optimizer.recorder
