"""From the weights a run started from to those it reached, by its scalars alone.

Each weight's path is a chain of additions that depends on nothing but the recorded offsets and its own noise, so many
steps are walked in one tile of the cache after the other.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from torch import Tensor
from torch.autograd.graph import increment_version

from forwardtune.errors import LedgerError
from forwardtune.ledger.export import read
from forwardtune.ledger.fingerprint import combined, digests
from forwardtune.ledger.format import Header
from forwardtune.ledger.run import RecordedRun
from forwardtune.ledger.weights import (
    Model,
    buffers_left,
    check_buffers,
    has_frozen_of,
    named_buffers,
    named_parameters,
    restore_buffers,
    weights_of,
)
from forwardtune.line import Position, terms_between
from forwardtune.noise import Mover, Slot, Term
from forwardtune.record import StepRecord

Progress = Callable[[float], None]
"""Is told the part that is done, from 0 to 1."""

M = TypeVar("M", bound=Model)

SEGMENT = 512
"""Steps of one chain: so many that reading the weights from memory once costs nothing beside them."""


def replay(
    model: M,
    ledger: str | os.PathLike[str],
    *,
    until: int | None = None,
    backend: str = "auto",
    progress: Progress | None = None,
) -> M:
    """Gives a model with a run's base weights the weights that the run reached, exactly, in place.

    Args:
        model: the module, or a dict of tensors by name, with the weights that the run started from.
        ledger: the file, live or exported.
        until: after how many steps to stop; at the run's end by default.
        backend: what moves the weights; see :class:`forwardtune.RunOptions`.
        progress: called now and then with the part that is done.

    Weights of another model, or that the run did not start from, are refused. Buffers that the run changed get their
    values at the end of the run, if it is replayed to its end.
    """
    run = read(ledger)
    end = run.check_until(until)
    weights = weights_of(run.header, named_parameters(model))
    start = check_start(standing(run, digests(weights)), end)
    values, buffers = buffers_left(run.state) if end == run.state_end else {}, named_buffers(model)
    check_buffers(values, buffers)
    run.warn_of_buffers(end)
    if not has_frozen_of(run.header, model):
        warnings.warn(
            "the parameters that the run did not move are others than in the run; those that it moved become what "
            "they were",
            RuntimeWarning,
            stacklevel=2,
        )
    advance(run, weights, start, end, backend=backend, progress=progress)
    missing = restore_buffers(values, buffers)
    if missing:
        warnings.warn(
            f"the run changed {len(missing)} buffers that are not here, the first being {missing[0]!r}",
            RuntimeWarning,
            stacklevel=2,
        )
    return model


def standing(run: RecordedRun, found: Sequence[str]) -> int:
    """After which step of the run the weights have these fingerprints."""
    differing = [p.names[0] for p, digest in zip(run.header.parameters, found, strict=True) if p.digest != digest]
    if not differing:
        return run.header.step
    whole = combined(found)
    for anchor in run.anchors:
        if anchor.digest == whole:
            return anchor.step
    raise LedgerError(
        f"these are not the weights that the run started from: {differing[0]!r} is the first of {len(differing)} "
        f"parameters (of {len(found)}) with other values; load the base weights"
    )


def check_start(start: int, end: int) -> int:
    if start > end:
        raise LedgerError(
            f"these weights are those after step {start}, and a step cannot be taken back exactly: "
            f"load the base weights to replay until {end}"
        )
    return start


def advance(
    run: RecordedRun, weights: Sequence[Tensor], start: int, end: int, *, backend: str, progress: Progress | None = None
) -> None:
    """Walks the weights, which are those after step `start`, to those after step `end`."""
    slots = [Slot(tensor, p.number, p.group) for p, tensor in zip(run.header.parameters, weights, strict=True)]
    mover = mover_over(slots, run.header, backend)
    for done in walk(run, mover, mover, start, end):
        if progress:
            progress(done)
    for tensor in weights:
        if not tensor.is_inference():
            increment_version(tensor)
    check_anchor(run, weights, end)


def check_anchor(run: RecordedRun, weights: Sequence[Tensor], step: int) -> None:
    """Compares the weights with their fingerprint, if the run has taken it at this step."""
    for anchor in run.anchors:
        if anchor.step == step and anchor.digest != combined(digests(weights)):
            raise LedgerError(
                f"the replay reached other weights than the run had after step {step}: while it was recorded, "
                "something other than the optimizer changed them. The model now has those that the replay reached"
            )


def mover_over(slots: Sequence[Slot], header: Header, backend: str) -> Mover:
    return Mover(slots, len(header.groups), seed=header.seed, distribution=header.distribution, backend=backend)


def walk(run: RecordedRun, mover: Mover, whole: Mover, start: int, end: int) -> Iterator[float]:
    """Walks a mover's slots and yields the part that is done.

    `whole` has the slots of the whole model: on the sphere, a direction is scaled by its length in all of them.
    """
    if mover is not whole and mover.distribution == "sphere":
        mover = Mover(mover.slots, mover.groups, seed=mover.seed, distribution="normal", backend=mover.backend)
    for low in range(start, end, SEGMENT):
        high = min(low + SEGMENT, end)
        walks = [walk for record in run.records(low, high) for walk in _walks(record, len(run.header.groups))]
        if mover is not whole:
            walks = [(step, whole.in_units(step, terms)) for step, terms in walks]
        mover.chain(walks)
        yield (high - start) / (end - start)


def _walks(record: StepRecord, groups: int) -> Iterator[tuple[int, Sequence[Term]]]:
    at: Position = {}
    for place in record.path():
        terms, at = terms_between(at, place, (0.0,) * groups)
        yield record.step, terms
