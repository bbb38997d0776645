"""Going on with a recorded run as if it had never stopped."""

from __future__ import annotations

import inspect
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from forwardtune.errors import ForwardTuneError, LedgerError
from forwardtune.files import translated
from forwardtune.ledger.export import read
from forwardtune.ledger.fingerprint import combined, digests
from forwardtune.ledger.format import Header
from forwardtune.ledger.journal import Fsync, Journal
from forwardtune.ledger.recorder import Ledger, check_policy, checkpoint_path
from forwardtune.ledger.replay import Progress, advance, check_start, standing
from forwardtune.ledger.run import LiveRun, check_file, is_live
from forwardtune.ledger.states import read_slots
from forwardtune.ledger.weights import (
    Model,
    buffers_left,
    check_buffers,
    has_frozen_of,
    named_buffers,
    named_parameters,
    restore_buffers,
    restore_generators,
    weights_of,
)
from forwardtune.optimizer import LineSearch


def resume(
    model: Model,
    ledger: str | os.PathLike[str],
    *,
    backend: str = "auto",
    fsync: Fsync | None = None,
    checkpoint_every: int | None = None,
    repair: bool = False,
    progress: Progress | None = None,
) -> tuple[LineSearch, int]:
    """An optimizer that goes on with a recorded run, and the number of its next step.

    The model has the weights that the run started from, and afterwards those that it had reached. The optimizer has the
    run's settings, memory and counters and writes to the same ledger. Torch's generators and the model's buffers are as
    the last step left them. What is outside is the caller's: the place in the data, and a scheduler, for which `lr` is
    back at its start. Build it anew and step it as often as the run did; see docs/ledger.md.

    Args:
        model: the model that the ledger was made with, with its base weights.
        ledger: the live file.
        backend: what moves the weights, in the replay and in the run; see :class:`forwardtune.RunOptions`.
        fsync, checkpoint_every: as for :class:`forwardtune.Ledger`; by default what the run began with.
        repair: go on although the file is damaged or its last state lost (the machine crashed, not the process): from
            the last step whose state is known, or, if none is, from the last that is sound, with a warning. The file as
            it was is kept, with ``.damaged`` added to its name.
        progress: called now and then with the part of the replay that is done.
    """
    asked = "timed" if fsync is None else fsync
    check_policy(asked, checkpoint_every)
    path = check_file(ledger)
    if not is_live(path):
        read(path)
        raise LedgerError(
            f"{path} is an exported ledger, which holds what a replay needs but not the state of the run; "
            "resume the live file, or replay this one and begin a new run"
        )
    store = Journal(path, asked)
    try:
        run = _sound(path, store, repair)
        store.use_slot(run.slot)
        store.fsync = run.header.fsync if fsync is None else fsync
        every = checkpoint_every or run.header.checkpoint_every
        check_policy(store.fsync, every)
        tensors = named_parameters(model)
        weights = weights_of(run.header, tensors)
        values, buffers = buffers_left(run.state), named_buffers(model)
        check_buffers(values, buffers)
        if not has_frozen_of(run.header, model):
            raise LedgerError("the parameters that the run does not move are others than in the run; load its base")
        start = check_start(_start(run, weights, path), run.end)
        advance(run, weights, start, run.end, backend=backend, progress=progress)
        optimizer = _optimizer(run.header, tensors, backend)
        _fast_forward(optimizer, run)
        missing = restore_buffers(values, buffers)
        if missing:
            raise LedgerError(f"the run changed the buffer {missing[0]!r}, which this model does not have")
        restore_generators(run.state)
        optimizer.recorder = Ledger._resumed(path, model, every, store, run, optimizer)
    except BaseException:
        store.close()
        raise
    return optimizer, run.end


def rejoin(optimizer: LineSearch, model: Model, ledger: str | os.PathLike[str]) -> None:
    """Has an optimizer that was taken up from a checkpoint of its own go on with the ledger of its run.

    What the file holds beyond the optimizer's step is dropped, since the run is about to make those steps again. The
    file must be of this run: its steps lead to the optimizer's memory, counters and settings, and to the weights, if
    their fingerprint after that step is in the file, as it is where :meth:`Ledger.anchor` was called.
    """
    path, step = check_file(ledger), optimizer.param_groups[0]["run"]["step"]
    store = Journal(path, "timed")
    try:
        contents = store.contents()
        run = LiveRun(contents, read_slots(path, contents.identity))
        if not run.header.step <= step <= run.end:
            raise LedgerError(
                f"{path} holds steps {run.header.step} to {run.end}, and the run goes on from step {step}; give the "
                "ledger that belongs to the checkpoint, or a new name"
            )
        run.end = step
        run.anchors = [anchor for anchor in run.anchors if anchor.step <= step]
        again = _optimizer(run.header, named_parameters(model), optimizer.backend)
        _fast_forward(again, run)
        anchors = {anchor.digest for anchor in run.anchors if anchor.step == step}
        strange = anchors and combined(digests(slot.tensor for slot in optimizer.slots)) not in anchors
        if _memory(again) != _memory(optimizer) or strange or not has_frozen_of(run.header, model):
            raise LedgerError(
                f"{path} is the ledger of another run than the one that goes on; give the one that belongs to the "
                "checkpoint, or a new name"
            )
        store.cut(contents.marks[step - run.header.step])
        store.use_slot(run.slot)
        store.fsync = run.header.fsync
        optimizer.recorder = Ledger._resumed(path, model, run.header.checkpoint_every, store, run, optimizer)
    except BaseException:
        store.close()
        raise


def _memory(optimizer: LineSearch) -> list[Any]:
    """What the steps so far have left in an optimizer, and its settings but for the rate."""
    others = ("params", "param_names", "lr", "initial_lr", "run")
    return [
        {name: value for name, value in (group | group["run"]).items() if name not in (*others, "plateaus")}
        for group in optimizer.param_groups
    ]


def _sound(path: Path, store: Journal, repair: bool) -> LiveRun:
    """The run, its file ending where the next step will be written."""
    contents = store.contents()
    run = LiveRun(contents, read_slots(path, contents.identity))
    if run.damage or run.state_end < run.end:
        complaint = run.damage or f"the state that it left after step {run.end} is not in {path}.state0 or .state1"
        if not repair:
            raise LedgerError(
                f"{path} cannot be resumed: {complaint}. Its steps up to {run.end} are sound and can be replayed "
                f"(until={run.end}); resume(..., repair=True) goes on from step {run.repaired_end}"
            )
        kept = path.with_name(f"{path.name}.damaged")
        with translated(LedgerError, f"{path} cannot be repaired"):
            if kept.exists():
                raise FileExistsError(f"{kept} is there already")
            shutil.copyfile(path, kept)
        run.end, run.damage = run.repaired_end, None
        if run.state_end < run.end:
            warnings.warn(
                "torch's generators and the model's buffers as the run left them are lost; it goes on with those of "
                "this process",
                RuntimeWarning,
                stacklevel=3,
            )
        run.anchors = [anchor for anchor in run.anchors if anchor.step <= run.end]
    store.cut(contents.marks[run.end - run.header.step])
    return run


def _start(run: LiveRun, weights: list[Tensor], path: Path) -> int:
    """The step whose weights these are, or to which a checkpoint has brought them."""
    saved = [anchor for anchor in run.anchors if anchor.checkpoint]
    if saved:
        file = checkpoint_path(path, saved[-1].step)
        try:
            tensors = weights_of(run.header, load_file(file))
            if combined(digests(tensors)) == saved[-1].digest:
                with torch.no_grad():
                    for ours, theirs in zip(weights, tensors, strict=True):
                        ours.copy_(theirs)
                return saved[-1].step
            complaint = "its weights are not those of the run"
        except (OSError, SafetensorError, LedgerError) as error:
            complaint = str(error)
        warnings.warn(
            f"the checkpoint {file} cannot be used ({complaint}); replaying from the base weights instead",
            RuntimeWarning,
            stacklevel=3,
        )
    return standing(run, digests(weights))


def _optimizer(header: Header, tensors: dict[str, Tensor], backend: str) -> LineSearch:
    """The optimizer as it was when the run began."""
    found = [kind for kind in _kinds(LineSearch) if kind.__name__ == header.method]
    if not found:
        raise LedgerError(
            f"the run was made by {header.method}, which is not known here; import the module that has it"
        )
    groups: list[dict[str, Any]] = []
    for group in header.groups:
        missing = [name for name in group.names if name not in tensors]
        if missing:
            raise LedgerError(f"the run's optimizer had {missing[0]!r}, which this model does not have")
        own = [tensors[name] for name in group.names]
        params = list(zip(group.labels, own, strict=True)) if group.labels else own
        groups.append({"params": params, **group.settings})
    run = {name: getattr(header, name) for name in ("seed", "distribution", "directions", "max_nonfinite")}
    try:
        settings = {n: v for n, v in header.defaults.items() if n in inspect.signature(found[-1]).parameters}
        optimizer: LineSearch = found[-1](groups, **settings, **run, backend=backend)
    except (ForwardTuneError, TypeError) as error:
        raise LedgerError(f"the run's {header.method} cannot be made again: {error}") from error
    theirs = {p.number: p for p in header.parameters}
    ours = {slot.parameter: slot.group for slot in optimizer.slots}
    for number in sorted(theirs.keys() ^ ours.keys()):
        if number in theirs:
            raise LedgerError(f"the run moves {theirs[number].names[0]!r}, which is frozen here: set requires_grad")
        tensor = next(slot.tensor for slot in optimizer.slots if slot.parameter == number)
        name = next(name for name, other in tensors.items() if other.data_ptr() == tensor.data_ptr())
        raise LedgerError(f"{name!r} is tuned here and was frozen in the run: set its requires_grad to False")
    state = optimizer.state_dict()
    for packed, group in zip(state["param_groups"], header.groups, strict=True):
        packed["run"] = {**packed["run"], "step": header.step, "queries": header.queries, "nonfinite": header.nonfinite}
        packed["memory"] = dict(group.memory)
    optimizer.load_state_dict(state)
    return optimizer


def _kinds(kind: type[LineSearch]) -> Iterator[type[Any]]:
    for child in kind.__subclasses__():
        yield child
        yield from _kinds(child)


def _fast_forward(optimizer: LineSearch, run: LiveRun) -> None:
    for step in range(run.header.step, run.end):
        record, settings = run.entry(step)
        for group, changes in zip(optimizer.param_groups, settings, strict=True):
            group.update(changes)
        try:
            optimizer.fast_forward(record)
        except ForwardTuneError as error:
            raise LedgerError(f"the run can be replayed but not resumed: {error}") from error
    for group in optimizer.param_groups:
        if "initial_lr" in group:  # there was a scheduler, and another will start from there
            group["lr"] = group["initial_lr"]
    if run.end > run.header.step:
        optimizer._opt_called = True  # type: ignore[attr-defined]  # for schedulers, which warn if no step was taken
