"""The ledger as an optimizer's recorder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import ref

from safetensors.torch import save_file

from forwardtune.arguments import check_integer, plain
from forwardtune.errors import InvalidArgumentError, LedgerError
from forwardtune.ledger.fingerprint import combined, digests
from forwardtune.ledger.format import (
    Group,
    Header,
    Parameter,
    Row,
    dump,
    pack,
)
from forwardtune.ledger.run import LiveRun
from forwardtune.ledger.store import Anchor, Fsync, State, Store, sync_folder
from forwardtune.ledger.tensors import Leftovers, Model, dtype_name, named_parameters
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
        self.path, self.model = Path(path), model
        self.fsync, self.checkpoint_every = fsync, checkpoint_every
        named_parameters(model)
        if self.path.exists():
            raise LedgerError(
                f"{self.path} is there already; go on with it by ft.resume(model, {str(self.path)!r}), "
                "or choose another name"
            )
        if not os.access(self.path.parent, os.W_OK):
            raise LedgerError(f"{self.path} cannot be made: {self.path.parent} is not a folder that can be written")
        self._store: Store | None = None
        self._pending: list[Row] = []

    @classmethod
    def _resumed(
        cls,
        path: Path,
        model: Model,
        fsync: Fsync,
        checkpoint_every: int | None,
        store: Store,
        run: LiveRun,
        optimizer: LineSearch,
    ) -> Ledger:
        """A ledger that goes on where a file ends."""
        ledger = cls.__new__(cls)
        ledger.path, ledger.model, ledger.fsync, ledger.checkpoint_every = path, model, fsync, checkpoint_every
        ledger._pending = []
        ledger._attach(store, run.header, optimizer, run.state)
        ledger._saved = max((anchor.step for anchor in run.anchors if anchor.checkpoint), default=None)
        return ledger

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def begin(self, optimizer: LineSearch) -> None:
        """Called by the optimizer at the start of a step."""
        if self._store is None:
            header = _header(optimizer, self.model)
            self._attach(Store.create(self.path, header.to_json(), self.fsync), header, optimizer)
        elif self.checkpoint_every and self._next > self._anchored and self._next % self.checkpoint_every == 0:
            self._checkpoint()

    def _attach(self, store: Store, header: Header, optimizer: LineSearch, states: Iterable[State] = ()) -> None:
        """Binds a file to the optimizer whose steps it will hold; `states` are those it has left behind so far."""
        self._store, self._optimizer = store, ref(optimizer)
        self._slots = optimizer.slots
        self._leftovers = Leftovers(self.model, optimizer.field.devices, states)
        self._watched = [
            _Watched(group, recorded.numbers)
            for group, recorded in zip(optimizer.param_groups, header.groups, strict=True)
        ]
        self._next = self._anchored = optimizer.param_groups[0]["run"]["step"]
        self._saved: int | None = None
        self._names = [parameter.names[0] for parameter in header.parameters]

    def record(self, optimizer: LineSearch, record: StepRecord) -> None:
        """Called by the optimizer before the weights move to where they will stand."""
        if record.raised:
            # Written with the next step: if the process ends here, the step never was, and a resumed run repeats it.
            if self._store and self._is_next(optimizer, record):
                self._pending.append(self._row(optimizer, record, left=False))
                self._next += 1
            return
        if self._store is None:
            raise LedgerError(f"{self.path} is closed; open it again with ft.resume")
        if not self._is_next(optimizer, record):
            raise self._stranger(optimizer, record)
        left = self._leftovers.changed()
        watched = self._watched
        self._pending.append(self._row(optimizer, record, left))
        try:
            self._store.append(self._pending, record.step, list(self._leftovers.states.values()) if left else ())
        except BaseException:
            self._pending.pop()
            self._watched = watched
            self._leftovers.forget()
            raise
        self._pending.clear()
        self._next += 1

    def _row(self, optimizer: LineSearch, record: StepRecord, left: bool) -> Row:
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
        return Row(pack(record, left, numbers), text)

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
        if self._store is None:
            return
        if self._next > self._anchored and not self._pending and self._store.is_open:
            self._store.anchor(Anchor(self._next, combined(digests(slot.tensor for slot in self._slots)), False))
        self._store.close()
        self._store = None

    def _checkpoint(self) -> None:
        """Saves the weights, then says so, then removes the checkpoint before."""
        if self._store is None:
            return
        if self._pending:
            self._store.append(self._pending, self._next - 1)
            self._pending.clear()
        file, old = checkpoint_path(self.path, self._next), self._saved
        new = file.with_name(f".{file.name}.new")
        tensors = {name: slot.tensor.detach().contiguous() for name, slot in zip(self._names, self._slots, strict=True)}
        try:
            save_file(tensors, new)
            shutil.copymode(self.path, new)
            with open(new, "rb+") as handle:
                os.fsync(handle.fileno())
            new.replace(file)
            sync_folder(file.parent)
        except Exception as error:
            new.unlink(missing_ok=True)
            raise LedgerError(f"the checkpoint {file} cannot be written ({error})") from error
        self._store.anchor(Anchor(self._next, combined(digests(tensors.values())), True))
        self._anchored = self._saved = self._next
        if old is not None:
            checkpoint_path(self.path, old).unlink(missing_ok=True)


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


def _header(optimizer: LineSearch, model: Model) -> Header:
    names: dict[int, list[str]] = {}
    by_memory: dict[object, list[str]] = {}
    for name, tensor in named_parameters(model).items():
        names.setdefault(id(tensor), []).append(name)
        by_memory.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()), []).append(name)
    run = optimizer.param_groups[0]["run"]
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        missing = [i for i, tensor in enumerate(group["params"]) if id(tensor) not in names]
        if missing:
            raise InvalidArgumentError(
                f"parameter {missing[0]} of group {number} is not a parameter of the model given to the ledger; "
                "pass the model whose parameters are tuned"
            )
        own = tuple(names[id(tensor)][0] for tensor in group["params"])
        memory = {**group["memory"]}
        dump(memory)
        groups.append(Group(own, "param_names" in group, _settings(group), memory))
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
        step=run["step"],
        queries=run["queries"],
        nonfinite=run["nonfinite"],
        groups=tuple(groups),
        parameters=parameters,
        noise=run["noise"],
        version=version("forwardtune"),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
