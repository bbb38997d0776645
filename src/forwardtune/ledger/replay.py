"""From the weights a run started from to those it reached, by its scalars alone.

Each weight's path is a chain of additions that depends on nothing but the recorded offsets and its own noise, so many
steps are made in one tile of the cache before the next tile is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TypeVar

from torch import Tensor
from torch.autograd.graph import increment_version

from forwardtune.auto import SPAN
from forwardtune.errors import LedgerError, warn
from forwardtune.ledger.fingerprint import combined, digests
from forwardtune.ledger.format import Header
from forwardtune.ledger.plain import terms_of
from forwardtune.ledger.reader import RecordedRun, read
from forwardtune.ledger.states import buffers_in, check_buffers, restore_buffers
from forwardtune.ledger.weights import Model, has_frozen_weights, named_buffers, named_parameters, weights_of
from forwardtune.line import ENDS, REVIEWED_AT, Position, StepMove, moves_along, terms_between
from forwardtune.noise import Mover, Slot
from forwardtune.noise.outer import OuterMover, mover_of
from forwardtune.record import StepRecord

Progress = Callable[[float], None]
"""Called with the fraction that is done, from 0 to 1."""

M = TypeVar("M", bound=Model)

SEGMENT = 512
"""Steps of one chain: so many that reading the weights from memory once costs next to nothing."""


def replay(
    model: M,
    ledger: str | os.PathLike[str],
    *,
    until: int | None = None,
    backend: str = "auto",
    progress: Progress | None = None,
) -> M:
    """Takes a model from a run's base weights to the weights that the run reached, bit for bit, in place.

    Args:
        model: the module, or a dict of tensors by name, with the weights that the run started from.
        ledger: the file, live or exported.
        until: the step to stop at; the end of the run by default.
        backend: what moves the weights; see :class:`forwardtune.RunOptions`.
        progress: called now and then with the fraction that is done.

    Weights of another model, or that the run did not start from, are refused. Buffers that the run changed get their
    final values if the run is replayed to its end.
    """
    run = read(ledger)
    end = run.check_until(until)
    weights = weights_of(run.header, named_parameters(model))
    start = steps_done(run, digests(weights), end)
    values, buffers = buffers_in(run.state) if end == run.state_end else {}, named_buffers(model)
    check_buffers(values, buffers)
    run.warn_of_buffers(end)
    if not has_frozen_weights(run.header, model):
        warn(
            "the parameters that the run did not move differ from those in the run; the ones that it moved get the "
            "values they had there"
        )
    advance(run, weights, start, end, backend=backend, progress=progress)
    missing = restore_buffers(values, buffers)
    if missing:
        warn(f"the run changed {len(missing)} buffers that are missing here, the first being {missing[0]!r}")
    return model


def steps_done(run: RecordedRun, fingerprints: Sequence[str], end: int) -> int:
    """The step of the run, at most `end`, after which the weights have these fingerprints."""
    step = _step_with(run, fingerprints)
    if step > end:
        raise LedgerError(
            f"these are the weights after step {step}, and steps cannot be undone exactly: "
            f"load the base weights to replay until {end}"
        )
    return step


def _step_with(run: RecordedRun, fingerprints: Sequence[str]) -> int:
    pairs = zip(run.header.parameters, fingerprints, strict=True)
    differing = [parameter.names[0] for parameter, fingerprint in pairs if parameter.digest != fingerprint]
    if not differing:
        return run.header.step
    whole = combined(fingerprints)
    for anchor in run.anchors:
        if anchor.digest == whole:
            return anchor.step
    raise LedgerError(
        f"these are not the weights that the run started from: {differing[0]!r} is the first of {len(differing)} "
        f"parameters (of {len(fingerprints)}) with other values; load the base weights"
    )


def advance(
    run: RecordedRun, weights: Sequence[Tensor], start: int, end: int, *, backend: str, progress: Progress | None = None
) -> None:
    """Takes the weights from those after step `start` to those after step `end`."""
    slots = [Slot(tensor, p.number, p.group, p.scale) for p, tensor in zip(run.header.parameters, weights, strict=True)]
    for fraction in replay_steps(run, mover_over(slots, run.header, backend), start, end):
        if progress:
            progress(fraction)
    for tensor in weights:
        if not tensor.is_inference():
            increment_version(tensor)
    check_anchor(run, weights, end)


def check_anchor(run: RecordedRun, weights: Sequence[Tensor], step: int) -> None:
    """Compares the weights with their fingerprint, if the run has an anchor at this step."""
    for anchor in run.anchors:
        if anchor.step == step and anchor.digest != combined(digests(weights)):
            raise LedgerError(
                f"the replay did not reach the weights that the run had after step {step}: while it was recorded, "
                "something other than the optimizer changed them. The model now has the weights of the replay"
            )


def mover_over(slots: Sequence[Slot], header: Header, backend: str) -> Mover | OuterMover:
    return mover_of(
        slots,
        len(header.groups),
        seed=header.seed,
        distribution=header.distribution,
        backend=backend,
        products=not isinstance(header.directions, int),
        stochastic=header.rounding == "stochastic",
    )


def replay_steps(run: RecordedRun, mover: Mover | OuterMover, start: int, end: int) -> Iterator[float]:
    """Moves a mover's slots through steps `start` to `end` and yields the fraction that is done."""
    for low in range(start, end, SEGMENT):
        high = min(low + SEGMENT, end)
        plain = run.plain(max(run.header.step, low - SPAN), high) if isinstance(mover, Mover) else None
        terms = plain and terms_of(plain, low, layerwise=run.header.probes == "layerwise")
        if terms and isinstance(mover, Mover):
            mover.chain_terms(terms)
        else:
            mover.chain([move for record in run.records(low, high) for move in _moves(run, record)])
        yield (high - start) / (end - start)


def _moves(run: RecordedRun, record: StepRecord) -> Iterator[StepMove]:
    """All moves of a step: along the steps before it, if it reviewed them, then along its own directions.

    Where probes were made layer by layer, only those that were for good.
    """
    zero, layerwise = (0.0,) * len(run.header.groups), run.header.probes == "layerwise"
    if record.review:
        trail = run.trail(record)
        for start, end in pairwise((1.0, *(() if layerwise else REVIEWED_AT), ENDS[record.review.back])):
            yield from moves_along(trail, start, end, zero)
    position: Position = {}
    for there in [record.destination()] if layerwise else record.path():
        terms, position = terms_between(position, there, zero)
        yield record.step, terms
