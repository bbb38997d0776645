"""The ledger as an optimizer's recorder."""

from __future__ import annotations

import glob
import os
import shutil
import struct
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import ref

from safetensors.torch import save_file
from torch import Tensor

from forwardtune.arguments import check_integer, plain
from forwardtune.errors import InvalidArgumentError, LedgerError
from forwardtune.files import sync_file, sync_folder
from forwardtune.ledger.fingerprint import combined, digests
from forwardtune.ledger.format import Group, Header, Parameter, Row, dtype_name, dump, pack
from forwardtune.ledger.journal import Anchor, Fsync, Journal
from forwardtune.ledger.run import LiveRun
from forwardtune.ledger.states import State
from forwardtune.ledger.weights import Leftovers, Model, frozen_digest, named_parameters
from forwardtune.noise import Slot
from forwardtune.optimizer import LineSearch
from forwardtune.record import StepRecord

NOT_SETTINGS = ("params", "param_names", "memory", "run")


class Ledger:
    """Records a run as it goes, so that its weights can be had again from those it started from, bit for bit.

    Args:
        path: the file to make; to go on with one that is there use :func:`forwardtune.resume`.
        model: the module whose parameters are tuned, or a dict of tensors by name.
        fsync: when steps are forced to the disk. Every step is handed to the operating system before the weights move,
            so a crash of the process loses at most the step under way, whatever is chosen here; it is a crash of the
            machine that loses what was not forced. ``"timed"`` (default): a step that comes 5 seconds or more after the
            last one forced; an integer n: every n-th step (1: each); ``"never"``: left to the system.
        checkpoint_every: saves the weights beside the ledger after every so many steps, the latest only. Nothing
            depends on it; it shortens a resume.

    >>> import tempfile, torch, forwardtune as ft
    >>> x = torch.tensor([3.0, -2.0])
    >>> base = {"x": x.clone()}
    >>> with tempfile.TemporaryDirectory() as folder, ft.Ledger(f"{folder}/run.ledger", {"x": x}) as ledger:
    ...     optimizer = ft.VS2P([x], rho=0.05, recorder=ledger)
    ...     for _ in range(100):
    ...         loss = optimizer.step(lambda: x @ x)
    ...     tuned = ft.replay(base, f"{folder}/run.ledger")
    >>> torch.equal(tuned["x"], x)
    True
    """

    def __init__(
        self, path: str | os.PathLike[str], model: Model, *, fsync: Fsync = "timed", checkpoint_every: int | None = None
    ) -> None:
        check_policy(fsync, checkpoint_every)
        self.path, self.model = Path(path).resolve(), model
        self.fsync, self.checkpoint_every = fsync, checkpoint_every
        named_parameters(model)
        if self.path.exists():
            raise LedgerError(
                f"{self.path} is there already; go on with it by ft.resume(model, {str(self.path)!r}), "
                "or choose another name"
            )
        if not os.access(self.path.parent, os.W_OK):
            raise LedgerError(f"{self.path} cannot be made: {self.path.parent} is not a folder that can be written")
        self._store: Journal | None = None
        self._pending: list[Row] = []
        self._closed = False

    @classmethod
    def _resumed(
        cls,
        path: Path,
        model: Model,
        checkpoint_every: int | None,
        store: Journal,
        run: LiveRun,
        optimizer: LineSearch,
    ) -> Ledger:
        """A ledger that goes on where a file ends."""
        ledger = cls.__new__(cls)
        ledger.path, ledger.model, ledger.fsync, ledger.checkpoint_every = path, model, store.fsync, checkpoint_every
        ledger._pending, ledger._closed = [], False
        ledger._attach(store, run.header, optimizer, run.state)
        ledger._saved = max((anchor.step for anchor in run.anchors if anchor.checkpoint), default=run.header.step)
        return ledger

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def begin(self, optimizer: LineSearch) -> None:
        """Called by the optimizer at the start of a step."""
        if self._closed:
            raise LedgerError(f"{self.path} is closed; go on with it by ft.resume(model, {str(self.path)!r})")
        if self._store is None:
            header = _header(optimizer, self.model, self.fsync, self.checkpoint_every)
            self._attach(Journal.create(self.path, header.to_json(), self.fsync), header, optimizer)
        elif self._is_checkpoint_due():
            self._checkpoint()

    def _is_checkpoint_due(self) -> bool:
        """Also later than asked for, if a step has just raised, which is not yet part of the run."""
        every = self.checkpoint_every
        return every is not None and not self._pending and self._next // every > self._saved // every

    def _attach(self, store: Journal, header: Header, optimizer: LineSearch, states: Iterable[State] = ()) -> None:
        """Binds a file to the optimizer whose steps it will hold; `states` are those it has left behind so far."""
        self._store, self._optimizer = store, ref(optimizer)
        self._slots = optimizer.slots
        self._leftovers = Leftovers(self.model, optimizer.field, states)
        self._watched = [
            _Watched(group, recorded.numbers)
            for group, recorded in zip(optimizer.param_groups, header.groups, strict=True)
        ]
        self._next = self._anchored = optimizer.param_groups[0]["run"]["step"]
        self._saved = self._next
        self._names = [parameter.names[0] for parameter in header.parameters]

    def record(self, optimizer: LineSearch, record: StepRecord) -> None:
        """Called by the optimizer before the weights move to where they will stand."""
        if record.raised:
            # Written with the next step: if the process ends here, the step never was, and a resumed run repeats it.
            if self._store and self._is_next(optimizer, record):
                with suppress(Exception):  # then the next step is refused, since this one is missing
                    self._pending.append(self._row(optimizer, record, left=0))
                    self._next += 1
            return
        if self._store is None:
            raise LedgerError(f"{self.path} was closed in the middle of a step")
        if not self._is_next(optimizer, record):
            raise self._stranger(optimizer, record)
        watched = self._watched
        try:
            left = self._leftovers.changed()
            rows = [*self._pending, self._row(optimizer, record, left)]
            self._store.append(rows, record.step, list(self._leftovers.states.values()) if left else ())
        except BaseException:
            self._watched = watched
            self._leftovers.forget()
            raise
        self._pending.clear()
        self._next += 1

    def _row(self, optimizer: LineSearch, record: StepRecord, left: int) -> Row:
        numbers: list[float] = []
        changes = False
        for group, watched in zip(optimizer.param_groups, self._watched, strict=True):
            numbers += [group[name] for name in watched.numbers]
            changes = changes or watched.differs_from(group)
        text = None
        if changes:
            pairs = zip(optimizer.param_groups, self._watched, strict=True)
            self._watched = [_Watched(group, watched.numbers) for group, watched in pairs]
            text = dump([watched.others for watched in self._watched])
        try:
            return Row(pack(record, left, numbers), text)
        except struct.error:
            raise InvalidArgumentError(f"settings that were numbers are not any more: {numbers}") from None

    def _is_next(self, optimizer: LineSearch, record: StepRecord) -> bool:
        return optimizer is self._optimizer() and record.step == self._next and self._covers(optimizer)

    def _covers(self, optimizer: LineSearch) -> bool:
        """Whether the optimizer still moves what the header says."""
        slots = optimizer.slots
        if slots is self._slots:
            return True
        same = [_kind(slot) for slot in slots] == [_kind(slot) for slot in self._slots]
        self._slots = slots if same else self._slots
        return same

    def _stranger(self, optimizer: LineSearch, record: StepRecord) -> LedgerError:
        if optimizer is not self._optimizer():
            return LedgerError(f"{self.path} records another optimizer; give each its own ledger")
        if record.step != self._next:
            return LedgerError(
                f"{self.path} holds the run up to step {self._next}, and the optimizer makes step {record.step}: "
                "a state was loaded into it. Go on with a recorded run by ft.resume, or begin another ledger"
            )
        return LedgerError(
            f"{self.path} cannot go on: at step {record.step} parameters were added, frozen, thawed or cast to another "
            "dtype; begin another ledger with a new optimizer"
        )

    def close(self) -> None:
        """Writes the fingerprint of the weights as they are, and gives the file free.

        A last step that raised is not in the ledger: a resumed run repeats it.
        """
        self._closed = True
        if self._store is None:
            return
        self.anchor()
        self._store.close()
        self._store = None

    def anchor(self) -> None:
        """Writes the fingerprint of the weights as they are after the last step, if it is not there."""
        if self._store and self._store.is_open and self._next > self._anchored and not self._pending:
            self._store.anchor(Anchor(self._next, combined(digests(slot.tensor for slot in self._slots)), False))
            self._anchored = self._next

    def _checkpoint(self) -> None:
        """Saves the weights, then says so, then removes the checkpoints before."""
        if self._store is None:
            return
        file, new = checkpoint_path(self.path, self._next), self.path.with_name(f".{self.path.name}.checkpoint.new")
        self._saved = self._next
        tensors = {name: slot.tensor.detach().contiguous() for name, slot in zip(self._names, self._slots, strict=True)}
        try:
            save_file(tensors, new)
            shutil.copymode(self.path, new)
            sync_file(new)
            new.replace(file)
            sync_folder(file.parent)
        except Exception as error:
            new.unlink(missing_ok=True)
            warnings.warn(
                f"the checkpoint {file} cannot be written ({error}); the run goes on without it, nothing is lost",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        self._store.anchor(Anchor(self._next, combined(digests(tensors.values())), True))
        self._anchored = self._next
        for other in self.path.parent.glob(f"{glob.escape(self.path.name)}.*.safetensors"):
            if other != file and other.name.split(".")[-2].isdigit():
                with suppress(OSError):
                    other.unlink()


def check_policy(fsync: Any, checkpoint_every: Any) -> None:
    if fsync not in ("timed", "never"):
        if isinstance(fsync, str):
            raise InvalidArgumentError(f"fsync must be 'timed', 'never' or every how many steps, not {fsync!r}")
        check_integer(1, fsync=fsync)
    if checkpoint_every is not None:
        check_integer(1, checkpoint_every=checkpoint_every)


def checkpoint_path(ledger: Path, step: int) -> Path:
    """Where a ledger's checkpoint is; only its name tells, never what is written in the ledger."""
    return ledger.with_name(f"{ledger.name}.{step}.safetensors")


def _kind(slot: Slot) -> tuple[object, ...]:
    return slot.parameter, slot.group, slot.tensor.shape, slot.tensor.dtype


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's settings, and whatever else it holds that is plain, such as a scheduler's `initial_lr`."""
    values = {name: plain(value) for name, value in group.items() if name not in NOT_SETTINGS}
    return {name: value for name, value in values.items() if isinstance(value, str | int | float | None)}


class _Watched:
    """A group's settings: the numbers, which every step has, and the others, which are recorded when they change."""

    def __init__(self, group: Mapping[str, Any], numbers: list[str]) -> None:
        self.numbers, self._size = numbers, len(group)
        self.others = {name: value for name, value in _settings(group).items() if name not in numbers}

    def differs_from(self, group: Mapping[str, Any]) -> bool:
        return len(group) != self._size or any(group[name] != value for name, value in self.others.items())


def _header(optimizer: LineSearch, model: Model, fsync: Fsync, checkpoint_every: int | None) -> Header:
    names: dict[int, list[str]] = {}
    by_memory: dict[object, list[str]] = {}
    tensors = named_parameters(model)
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
        by_memory.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()), []).append(name)
    run = optimizer.param_groups[0]["run"]
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        missing = [i for i, tensor in enumerate(group["params"]) if id(tensor) not in names]
        if missing:
            name = group["param_names"][missing[0]] if "param_names" in group else f"parameter {missing[0]}"
            raise InvalidArgumentError(
                f"{name} of group {number} is not a parameter of the model given to the ledger; "
                "pass the model whose parameters are tuned"
            )
        own = tuple(names[id(tensor)][0] for tensor in group["params"])
        memory = {**group["memory"]}
        dump(memory)
        labels = tuple(group["param_names"]) if "param_names" in group else None
        if isinstance(group["lr"], Tensor):
            raise InvalidArgumentError(f"lr of group {number} is a tensor, which a ledger cannot record; pass a number")
        groups.append(Group(own, labels, _settings(group), memory))
    slots = optimizer.slots
    parameters = tuple(
        Parameter(
            tuple(by_memory[slot.tensor.data_ptr(), slot.tensor.shape, slot.tensor.stride()]),
            slot.parameter,
            slot.group,
            tuple(slot.tensor.shape),
            dtype_name(slot.tensor.dtype),
            digest,
        )
        for slot, digest in zip(slots, digests(slot.tensor for slot in slots), strict=True)
    )
    return Header(
        method=run["method"],
        defaults=_settings(optimizer.defaults),
        seed=run["seed"],
        distribution=run["distribution"],
        directions=run["directions"],
        max_nonfinite=optimizer.max_nonfinite,
        fsync=fsync,
        checkpoint_every=checkpoint_every,
        step=run["step"],
        queries=run["queries"],
        nonfinite=run["nonfinite"],
        groups=tuple(groups),
        parameters=parameters,
        frozen=frozen_digest(model, parameters),
        noise=run["noise"],
        version=version("forwardtune"),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
