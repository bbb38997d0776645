"""Resuming a recorded run as if it had never stopped."""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from forwardtune.errors import ForwardTuneError, LedgerError, warn
from forwardtune.files import translated
from forwardtune.ledger.fingerprint import combined, digests
from forwardtune.ledger.format import NOT_SETTINGS, Header
from forwardtune.ledger.forward import fast_forward_plain
from forwardtune.ledger.journal import Fsync, Journal
from forwardtune.ledger.reader import LiveRun, check_file, is_live, read
from forwardtune.ledger.recorder import Ledger, check_policy, checkpoint_path
from forwardtune.ledger.replay import SEGMENT, Progress, advance, steps_done
from forwardtune.ledger.states import buffers_in, check_buffers, read_states, restore_buffers, restore_generators
from forwardtune.ledger.weights import Model, has_frozen_weights, named_buffers, named_parameters, weights_of
from forwardtune.optimizer import LineSearch

OPTIONS = ("seed", "scale", "distribution", "directions", "probes", "rounding")
"""Of a run, in its header as in its optimizer."""


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
    """An optimizer that resumes a recorded run where it left off, and the number of its next step.

    The model is passed with the weights that the run started from, and gets those that it had reached. The optimizer
    has the run's settings, memory and counters and writes to the same ledger. Torch's generators and the model's
    buffers are as the last step left them. The rest is up to the caller: the order of the data, and a scheduler, for
    which `lr` is back at its initial value. Build it again and step it as often as the run did; see docs/ledger.md.

    Args:
        model: the model that the ledger was made with, with its base weights.
        ledger: the live file.
        backend: what moves the weights, in the replay and in the run; see :class:`forwardtune.RunOptions`.
        fsync, checkpoint_every: as for :class:`forwardtune.Ledger`; by default as at the start of the run.
        repair: resume although the file is damaged or its last state lost (the machine crashed, not the process): from
            the last step whose state is known or, if none is, from the last sound one, with a warning. A copy of the
            damaged file is kept, with ``.damaged`` added to its name.
        progress: called now and then with the fraction of the replay that is done.
    """
    check_policy("timed" if fsync is None else fsync, checkpoint_every)
    path = check_file(ledger)
    if not is_live(path):
        read(path)  # a file that is no ledger at all has an error of its own
        raise LedgerError(
            f"{path} is an exported ledger, which holds what a replay needs but not the run's state; "
            "resume the live file, or replay this one and start a new run"
        )
    journal = Journal(path, "timed" if fsync is None else fsync)
    try:
        run = _sound_run(journal, repair)
        if fsync is None:
            journal.fsync = run.header.fsync
        every = checkpoint_every or run.header.checkpoint_every
        check_policy(journal.fsync, every)
        tensors = named_parameters(model)
        weights = weights_of(run.header, tensors)
        values, buffers = buffers_in(run.state), named_buffers(model)
        check_buffers(values, buffers)
        if not has_frozen_weights(run.header, model):
            raise LedgerError(
                "the parameters that the run does not move differ from those in the run; load its base weights"
            )
        advance(run, weights, _start(run, weights, path), run.end, backend=backend, progress=progress)
        optimizer = _optimizer(run.header, tensors, backend)
        _fast_forward(optimizer, run)
        missing = restore_buffers(values, buffers)
        if missing:
            raise LedgerError(
                f"the run changed the buffer {missing[0]!r}, which this model does not have; use the model that the "
                "run was made with"
            )
        restore_generators(run.state)
        journal.latest_state = run.state_file
        optimizer.recorder = Ledger._resumed(model, every, journal, run, optimizer)
    except BaseException:
        journal.close()
        raise
    return optimizer, run.end


def rejoin(optimizer: LineSearch, model: Model, ledger: str | os.PathLike[str]) -> None:
    """Lets an optimizer that was loaded from a checkpoint of its own continue the ledger of its run.

    Steps in the file beyond the optimizer's are dropped, since the run is about to make them again. The file must be of
    this run: its steps lead to the optimizer's memory, counters and settings, and to the weights, if the file has their
    fingerprint after that step, as it does if :meth:`Ledger.anchor` was called.
    """
    path, step = check_file(ledger), optimizer.steps
    journal = Journal(path, "timed")
    try:
        contents = journal.contents()
        run = LiveRun(contents, read_states(path, contents.identity))
        if not run.header.step <= step <= run.end:
            raise LedgerError(
                f"{path} holds steps {run.header.step} to {run.end}, and the run resumes from step {step}; pass the "
                "ledger that belongs to the checkpoint, or a new name"
            )
        run.end = step
        run.anchors = [anchor for anchor in run.anchors if anchor.step <= step]
        if not _is_run_of(run, optimizer, model):
            raise LedgerError(
                f"{path} is the ledger of another run; pass the one that belongs to the checkpoint, or a new name"
            )
        journal.cut(contents.marks[step - run.header.step])
        journal.latest_state, journal.fsync = run.state_file, run.header.fsync
        optimizer.recorder = Ledger._resumed(model, run.header.checkpoint_every, journal, run, optimizer)
    except BaseException:
        journal.close()
        raise


def _is_run_of(run: LiveRun, optimizer: LineSearch, model: Model) -> bool:
    """Whether the recorded steps lead to the optimizer as it is."""
    again = _optimizer(run.header, named_parameters(model), optimizer.backend)
    _fast_forward(again, run)
    anchors = {anchor.digest for anchor in run.anchors if anchor.step == run.end}
    same_weights = not anchors or combined(digests(slot.tensor for slot in optimizer.slots)) in anchors
    return same_weights and _progress(again) == _progress(optimizer) and has_frozen_weights(run.header, model)


def _progress(optimizer: LineSearch) -> list[Any]:
    """An optimizer's options and counters, and each group's memory and settings except for the rate."""
    names = ("method", *OPTIONS, "steps", "queries", "nonfinite", "auto")
    others = {*NOT_SETTINGS, "lr", "initial_lr"} - {"memory"}
    groups = [{name: v for name, v in group.items() if name not in others} for group in optimizer.param_groups]
    return [*(getattr(optimizer, name) for name in names), *groups]


def _sound_run(journal: Journal, repair: bool) -> LiveRun:
    """The run; its file is cut to where the next step will be written."""
    contents, path = journal.contents(), journal.path
    run = LiveRun(contents, read_states(path, contents.identity))
    if run.damage or run.state_end < run.end:
        complaint = run.damage or f"the run's state after step {run.end} is not in {path}.state0 or .state1"
        if not repair:
            raise LedgerError(
                f"{path} cannot be resumed: {complaint}. Its steps up to {run.end} are sound and can be replayed "
                f"(until={run.end}); resume(..., repair=True) resumes from step {run.repaired_end}"
            )
        _keep_damaged(path)
        run.end, run.damage = run.repaired_end, None
        if run.state_end < run.end:
            warn("the run's generators and buffers are lost; it resumes with torch's and the model's present ones")
        run.anchors = [anchor for anchor in run.anchors if anchor.step <= run.end]
    journal.cut(contents.marks[run.end - run.header.step])
    return run


def _keep_damaged(path: Path) -> None:
    kept = path.with_name(f"{path.name}.damaged")
    with translated(LedgerError, f"{path} cannot be repaired"):
        if kept.exists():
            raise FileExistsError(f"{kept} already exists; move it away")
        shutil.copyfile(path, kept)


def _start(run: LiveRun, weights: list[Tensor], path: Path) -> int:
    """The step to replay from: that of the checkpoint, which is then loaded, or that of the given weights."""
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
        warn(f"the checkpoint {file} cannot be used ({complaint}); replaying from the base weights instead")
    return steps_done(run, digests(weights), run.end)


def _optimizer(header: Header, tensors: dict[str, Tensor], backend: str) -> LineSearch:
    """The optimizer as it was at the start of the run."""
    methods = [method for method in _subclasses(LineSearch) if method.__name__ == header.method]
    if not methods:
        raise LedgerError(
            f"the run was made by {header.method}, which is unknown here; import the module that defines it"
        )
    groups: list[dict[str, Any]] = []
    for group in header.groups:
        missing = [name for name in group.names if name not in tensors]
        if missing:
            raise LedgerError(
                f"the run's optimizer had the parameter {missing[0]!r}, which this model does not have; use the model "
                "that the run was made with"
            )
        own = [tensors[name] for name in group.names]
        params = list(zip(group.labels, own, strict=True)) if group.labels else own
        settings = {n: v for n, v in group.settings.items() if not (header.auto and n == "rho")}
        groups.append({"params": params, **settings})
    run = {name: getattr(header, name) for name in (*OPTIONS, "max_nonfinite")}
    with _failures(f"the run's {header.method} cannot be built again"):
        settings = {n: v for n, v in header.defaults.items() if n in inspect.signature(methods[-1]).parameters}
        if header.auto:
            settings = {**{n: v for n, v in settings.items() if n != "rho"}, "lr": "auto"}
        optimizer: LineSearch = methods[-1](groups, **settings, **run, backend=backend)
    _check_frozen(optimizer, header, tensors)
    state, counters = optimizer.state_dict(), {name: getattr(header, name) for name in ("queries", "nonfinite", "auto")}
    scales = {name: parameter.scale for parameter in header.parameters for name in parameter.names}
    for packed, group in zip(state["param_groups"], header.groups, strict=True):
        packed["run"] = {**packed["run"], "step": header.step, **counters}
        packed["memory"] = dict(group.memory)
        if header.scale == "relative":
            packed["scales"] = tuple(scales.get(name, 1.0) for name in group.names)
    optimizer.load_state_dict(state)
    return optimizer


@contextmanager
def _failures(complaint: str) -> Iterator[None]:
    """Whatever a method does with settings and a memory that are none of its own is an error of ours."""
    try:
        yield
    except (ForwardTuneError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise LedgerError(f"{complaint}: {error}") from error


def _check_frozen(optimizer: LineSearch, header: Header, tensors: dict[str, Tensor]) -> None:
    """Refuses a model of which other parameters are frozen than in the run."""
    recorded = {parameter.number: parameter.names[0] for parameter in header.parameters}
    ours = {slot.parameter: slot.tensor for slot in optimizer.slots}
    for number in sorted(recorded.keys() ^ ours.keys()):
        if number in recorded:
            raise LedgerError(
                f"the run moves {recorded[number]!r}, which is frozen here: set its requires_grad to True"
            )
        name = next(name for name, tensor in tensors.items() if tensor.data_ptr() == ours[number].data_ptr())
        raise LedgerError(f"{name!r} is tuned here and was frozen in the run: set its requires_grad to False")


def _subclasses(method: type[LineSearch]) -> Iterator[type[Any]]:
    for subclass in method.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _fast_forward(optimizer: LineSearch, run: LiveRun) -> None:
    """Takes an optimizer from the start of the run to its end, with its settings as they were at each step."""
    for low in range(run.header.step, run.end, SEGMENT):
        high = min(low + SEGMENT, run.end)
        plain = run.plain(low, high - 1)  # without the last, which leaves behind all that a step does
        with _failures("the run can be replayed but not resumed"):
            done = high - 1 if plain and fast_forward_plain(optimizer, plain, run.header) else low
        for step in range(done, high):
            record, settings = run.entry(step)
            for group, changes in zip(optimizer.param_groups, settings, strict=True):
                group.update(changes)
            with _failures("the run can be replayed but not resumed"):
                optimizer.fast_forward(record)
    with _failures("the run can be replayed but not resumed"):  # so that its next step fails here, if at all
        optimizer._searches(optimizer.field, None).run(lambda *_: 0.0, 1)
    for group in optimizer.param_groups:
        if "initial_lr" in group:  # there was a scheduler, and a new one starts from there
            group["lr"] = group["initial_lr"]
    if run.end > run.header.step:
        optimizer._opt_called = True  # type: ignore[attr-defined]  # for schedulers, which warn if no step was taken
