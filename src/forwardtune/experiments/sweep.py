"""A search over rates on the budget of a single run: successive halving.

All rates start from the base weights with the same noise and batches. At every rung each that is left has made so many
steps; the best of them go on, one in `eta`, and make `eta` times as many. The last one left gets what remains of the
budget. Nothing is repeated: a rate is one ordinary run, as long as the winner's, that pauses at every rung and is
resumed or not. So the winner's result is that of a run of its rate alone, and a sweep that was killed resumes.

Rates are judged by the losses that their steps have seen, in the second half of the way to the rung. Those are paid for
already, and on the same batches for all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

from forwardtune import ledger as ledgers
from forwardtune.errors import ExperimentError
from forwardtune.experiments.comparison import check_base, unfinished
from forwardtune.experiments.events import Judged, MakingBase, Noted, SweepPlanned, Tell, ignore
from forwardtune.experiments.plan import Run
from forwardtune.experiments.result import Json, RunResult, scores_to_json
from forwardtune.experiments.runner import execute, execute_until
from forwardtune.experiments.spec import Backpropagation, Method, Spec, steps
from forwardtune.experiments.store import Store
from forwardtune.experiments.under_way import make_base
from forwardtune.tasks import Tasks, Workload
from forwardtune.tasks.identity import fingerprint
from forwardtune.toml_tables import at_least

ETA = 3
LEAST = 10
"""Steps to the first rung, below which chance would decide."""


class Rung(NamedTuple):
    """So many rates come so many steps far."""

    rates: int
    steps: int


def rungs(rates: int, steps: int, eta: int = ETA) -> tuple[Rung, ...]:
    """The rungs that use exactly these steps; the last is the winner's whole run.

    >>> rungs(10, 1000)
    (Rung(rates=10, steps=45), Rung(rates=3, steps=135), Rung(rates=1, steps=415))
    """
    at_least(2, rates=rates, eta=eta)
    counts = [rates]
    while counts[-1] > 1:
        counts.append(max(1, counts[-1] // eta))
    parts = counts[0] + sum(count * (eta - 1) * eta**i for i, count in enumerate(counts[1:]))
    first = steps // parts
    if first < LEAST:
        raise ExperimentError(
            f"{steps:,} steps are too few for {rates} rates: at least {parts * LEAST:,} are needed, {LEAST} of each "
            "before the first are dropped; raise the budget or give fewer rates"
        )
    lengths = [first * eta**i for i in range(len(counts) - 1)]
    dropped = sum((here - after) * length for (here, after), length in zip(pairwise(counts), lengths, strict=True))
    return (*map(Rung, counts, lengths), Rung(1, steps - dropped))


def spaced(low: float, high: float, count: int) -> tuple[float, ...]:
    """Rates from low to high in equal ratios, to three digits.

    >>> spaced(1, 100, 5)
    (1.0, 3.16, 10.0, 31.6, 100.0)
    """
    at_least(2, rates=count)
    if not 0 < low < high < math.inf:
        raise ExperimentError(f"rates go from one above zero to a higher one, not from {low:g} to {high:g}")
    rates = tuple(float(f"{low * (high / low) ** (i / (count - 1)):.3g}") for i in range(count))
    if len(set(rates)) < count:
        raise ExperimentError(f"between {low:g} and {high:g} there are no {count} rates that differ; give fewer")
    return rates


@dataclass(frozen=True)
class Sweep:
    """A run for each rate, from low to high, each as long as the winner's; and the rungs."""

    runs: tuple[Run, ...]
    rungs: tuple[Rung, ...]

    @property
    def id(self) -> str:
        return fingerprint([[run.id for run in self.runs], self.rungs])

    @property
    def title(self) -> str:
        run = self.runs[0]
        return f"{run.workload.name} {run.method.title} seed {run.seed}"

    @property
    def rates(self) -> tuple[float, ...]:
        return tuple(float(run.lr) for run in self.runs)

    @property
    def queries(self) -> tuple[int, ...]:
        """Of a run at each rung."""
        return tuple(rung.steps * self.runs[0].method.queries_per_step for rung in self.rungs)

    @property
    def budget(self) -> int:
        """The queries of all runs together."""
        ways = [there - here for here, there in pairwise((0, *self.queries))]
        return sum(rung.rates * way for rung, way in zip(self.rungs, ways, strict=True))


def plan_sweep(spec: Spec, workload: Workload, method: Method, *, queries: int, seed: int = 0, eta: int = ETA) -> Sweep:
    """The sweep over a method's grid that uses so many queries, everything included."""
    if method.is_auto:
        raise ExperimentError(f"{method.label} finds its rate while training; choose a method with a grid of rates")
    if isinstance(method, Backpropagation):
        raise ExperimentError(
            f"{method.label} has no ledger, by which a sweep judges and resumes; `forwardtune compare` makes its grid"
        )
    ladder = rungs(len(method.grid), queries // method.queries_per_step, eta)
    alone = replace(workload, queries=ladder[-1].steps * method.queries_per_step, epochs=None)
    steps(alone, method, alone.queries or 0)
    return Sweep(tuple(Run(alone, method, lr, seed, spec.decay) for lr in sorted(method.grid)), ladder)


@dataclass(frozen=True)
class RateOutcome:
    """How far a rate came: the losses it was judged by at the rungs it reached, and all its queries."""

    lr: float
    run: str
    status: str
    queries: int
    losses: tuple[float, ...]


@dataclass(frozen=True)
class Outcome:
    """What a sweep came to; `winner` is the run of the last rate left, and None if none was."""

    sweep: Sweep
    rates: tuple[RateOutcome, ...]
    winner: RunResult | None

    @property
    def queries(self) -> int:
        """All that were made, of every rate."""
        return sum(rate.queries for rate in self.rates)

    def to_json(self) -> Json:
        winner = self.winner and {
            "run": self.winner.id,
            "lr": self.winner.run.lr,
            "status": self.winner.status,
            "queries": self.winner.queries,
            "final": scores_to_json(self.winner.final),
        }
        rates = [
            {**asdict(rate), "losses": [loss if math.isfinite(loss) else None for loss in rate.losses]}
            for rate in self.rates
        ]
        rungs = [{"rates": r.rates, "queries": q} for r, q in zip(self.sweep.rungs, self.sweep.queries, strict=True)]
        totals = {"budget": self.sweep.budget, "queries": self.queries}
        return {"title": self.sweep.title, "rungs": rungs, "rates": rates, "winner": winner, **totals}


def sweep(planned: Sweep, store: Store, tasks: Tasks, tell: Tell = ignore) -> Outcome:
    """Makes what is not in the store yet, reports progress, and saves the outcome."""
    workload = planned.runs[0].workload
    task = tasks[workload]
    with store.lock():
        unfinished(planned.runs, store, tasks)
        task.check()
        if task.note:
            tell(Noted(task.note))
        counts = tuple(rung.rates for rung in planned.rungs)
        tell(SweepPlanned(planned.title, planned.rates, counts, planned.queries, planned.budget))
        tell(MakingBase(workload.name, workload.weights))
        make_base(task, store)
        check_base(store.base(task.base_id), planned.runs, store)
        left, judged = list(planned.runs), []
        for (rung, above), queries in zip(pairwise(planned.rungs), planned.queries, strict=False):
            for run in left:
                execute_until(rung.steps, run, store, task, tell)
            losses = judge(left, store, rung.steps)
            left = list(losses)[: above.rates]
            judged.append(losses)
            by_rate = {float(run.lr): loss for run, loss in losses.items()}
            tell(Judged(queries, by_rate, tuple(by_rate)[: above.rates]))
        winner = execute(left[0], store, task, tell).result if left else None
        outcome = Outcome(planned, tuple(_outcome(run, judged, store) for run in planned.runs), winner)
        store.save_sweep(planned.id, outcome.to_json())
    return outcome


def judge(runs: Sequence[Run], store: Store, step: int) -> dict[Run, float]:
    """The mean loss of each run over the second half of its steps up to this one, the lowest first; of equals the
    smaller rate. Runs that were given up by then are left out."""
    losses = {}
    for run in runs:
        recorded, result = ledgers.read(store.ledger(run.id)), store.result(run.id)
        if not (result and result.diverged and recorded.end <= step):
            loss = fmean(record.loss for record in recorded.records(step // 2, step))
            losses[run] = loss if math.isfinite(loss) else math.inf
    return {run: losses[run] for run in sorted(losses, key=lambda run: (losses[run], run.lr))}


def _outcome(run: Run, judged: Sequence[Mapping[Run, float]], store: Store) -> RateOutcome:
    result, recorded = store.result(run.id), ledgers.read(store.ledger(run.id))
    status = result.status if result else "dropped"
    queries = result.queries if result else recorded.record(recorded.end - 1).queries
    return RateOutcome(float(run.lr), run.id, status, queries, tuple(losses[run] for losses in judged if run in losses))
