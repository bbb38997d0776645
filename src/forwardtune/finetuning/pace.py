"""How long a run takes on this machine, measured before its first step without touching its weights.

A step of a run asks for queries and moves the weights between them. Queries are timed on the run's own batches, in
steps along a line of one weight that is none of the model's, or where examples have lines of their own in steps of a
rate of zero; moves on copies of the model's weights, a few at a time; an evaluation by making the first one, which the
run then need not repeat.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import Any

import torch
from torch import nn

from forwardtune.errors import NonFiniteLossError, NoOwnLinesError
from forwardtune.experiments.plan import Run
from forwardtune.experiments.result import Evaluation
from forwardtune.experiments.under_way import batch_indices
from forwardtune.methods import MeZO
from forwardtune.noise import Slot, Term
from forwardtune.optimizer import LineSearch
from forwardtune.tasks import Task

FEWEST, MOST = 3, 20
"""Rounds in which queries are timed: at least so many, unless they are slow, and at most so many."""
ENOUGH, TOO_LONG = 2.0, 10.0
"""Seconds after which no further round is made: of the fewest rounds, and of any."""
QUERIES = 2
"""Of a step of MeZO."""
GAIN = 0.95
"""More threads are taken if a query then takes at most so much of the time with one."""
PORTION = 1 << 26
"""Bytes of weights that are copied at a time, but at least one tensor."""


@dataclass(frozen=True)
class Pace:
    """Seconds of a query with its share of the moves, and of an evaluation, with so many threads.

    tried: seconds of a query by number of threads, where there was a choice.
    """

    threads: int
    query: float
    evaluation: float
    tried: Mapping[int, float]

    def seconds(self, queries: int, evaluations: int) -> float:
        return queries * self.query + evaluations * self.evaluation


def measure(run: Run, task: Task, model: nn.Module, threads: Sequence[int]) -> tuple[Pace, Evaluation]:
    """The pace with the best number of threads, which torch then has, and the evaluation of the base weights."""
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        timed = _queries(run, task, model, threads)
        tried = {number: median(seconds) for number, seconds in timed.items()}
        best = min(tried, key=lambda number: tried[number] * (GAIN if number == 1 else 1))
        torch.set_num_threads(best)
        optimizer = run.method.optimizer(model.named_parameters(), run.lr, seed=run.seed)
        move = seconds_per_move(optimizer, run.workload.batch)
        start = time.perf_counter()
        scores = task.evaluate(model)
        evaluation = Evaluation(0, 0, time.perf_counter() - start, scores)
    query = fmean(timed[best]) + move * _moves_per_query(run)
    return Pace(best, query, evaluation.seconds, tried if len(tried) > 1 else {}), evaluation


def _queries(run: Run, task: Task, model: nn.Module, threads: Sequence[int]) -> dict[int, list[float]]:
    """Seconds per query by number of threads, in turns on the same batches, after one that warms up."""
    timed: dict[int, list[float]] = {number: [] for number in threads}
    line, loss = _searched(run, task, model)
    spent = 0.0
    for made in range(MOST + 1):
        batch = task.batch(batch_indices(task.examples, run.workload.batch, run.seed, made))
        for number in threads:
            torch.set_num_threads(number)
            start = time.perf_counter()
            with suppress(NonFiniteLossError):
                line.step(partial(loss, model, batch))
            if made:
                timed[number].append((time.perf_counter() - start) / QUERIES)
                spent += time.perf_counter() - start
        if made and (spent > TOO_LONG or (made >= FEWEST and spent > ENOUGH)):
            break
    return timed


def _searched(run: Run, task: Task, model: nn.Module) -> tuple[LineSearch, Callable[..., Any]]:
    """Makes the steps whose queries are timed, and the loss that they query."""
    common: tuple[LineSearch, Callable[..., Any]] = MeZO([torch.zeros(1)], lr=1e-3), task.loss
    directions = run.method.settings["directions"]
    if isinstance(directions, int):
        return common
    own = MeZO(model.named_parameters(), lr=0.0, directions="per-example")
    batch = task.batch(batch_indices(task.examples, run.workload.batch, run.seed, 0))
    try:
        with suppress(NonFiniteLossError):
            own.step(partial(task.losses, model, batch))
    except NoOwnLinesError:
        if directions == "auto":
            return common
        raise
    return own, task.losses


def seconds_per_move(optimizer: LineSearch, batch: int) -> float:
    """A move of all weights along a common line, or along those of all examples, timed on copies of them."""
    zero, there = [0.0] * len(optimizer.param_groups), [1e-3] * len(optimizer.param_groups)
    terms = [Term(line, zero, there) for line in range(batch if optimizer.by_example else 1)]
    seconds = 0.0
    for number, slots in enumerate(_portions(optimizer.slots)):
        copies = [Slot(slot.tensor.detach().clone(), slot.parameter, slot.group, slot.scale) for slot in slots]
        part = optimizer.field.mover.part(copies)
        if number == 0:
            part.move(0, terms)  # compiles
        start = time.perf_counter()
        part.move(1, terms)
        seconds += time.perf_counter() - start
    return seconds


def _portions(slots: Sequence[Slot]) -> Iterator[list[Slot]]:
    portion: list[Slot] = []
    for slot in slots:
        if portion and sum(other.tensor.nbytes for other in portion) + slot.tensor.nbytes > PORTION:
            yield portion
            portion = []
        portion.append(slot)
    yield portion


def _moves_per_query(run: Run) -> float:
    """A step moves to each of its probes, unless examples have lines of their own, and on to where it ends.

    Reviews move about as often as all steps do. Weights of 16 bits are copied, moved and put back for a probe.
    """
    passes = 3 if getattr(run.workload, "dtype", "") in ("bfloat16", "float16") else 1
    to_probes = 0 if run.method.settings["directions"] == "per-example" else passes
    return (to_probes + 1 / run.method.queries_per_step) * (2 if run.method.is_auto else 1)
