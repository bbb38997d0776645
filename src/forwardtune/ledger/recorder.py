"""The ledger as the recorder of an optimizer."""

from __future__ import annotations

import glob
import os
import shutil
import struct
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
from forwardtune.errors import InvalidArgumentError, LedgerError, warn
from forwardtune.files import sync_file, sync_folder
from forwardtune.ledger.fingerprint import combined, digests
from forwardtune.ledger.format import NOT_SETTINGS, Group, Header, Parameter, Row, dtype_name, dump, pack
from forwardtune.ledger.journal import Anchor, Fsync, Journal
from forwardtune.ledger.reader import RecordedRun
from forwardtune.ledger.states import State, StateWatcher
from forwardtune.ledger.weights import Model, frozen_digest, named_parameters
from forwardtune.noise import NOISE_VERSION, Slot
from forwardtune.optimizer import LineSearch
from forwardtune.record import StepRecord


class Ledger:
    """Records a run, so that its weights can be recovered from those it started from, bit for bit.

    Args:
        path: the file to make; to continue one that already exists, use :func:`forwardtune.resume`.
        model: the module whose parameters are tuned, or a dict of tensors by name.
        fsync: when steps are forced to the disk. Every step is handed to the operating system before the weights move,
            so a crash of the process loses at most the step under way, whatever this setting; a crash of the machine
            loses what was not forced. ``"timed"`` (default): the first step that comes 5 seconds or more after the last
            one forced; an integer n: every n-th step (1: each); ``"never"``: left to the system.
        checkpoint_every: saves the weights beside the ledger every so many steps and keeps only the latest. Nothing
            depends on it; it makes resuming faster.

    >>> import tempfile, torch, forwardtune as ft
    >>> x = torch.tensor([3.0, -2.0])
    >>> base = {"x": x.clone()}
    >>> with tempfile.TemporaryDirectory() as folder, ft.Ledger(f"{folder}/run.ledger", {"x": x}) as ledger:
    ...     optimizer = ft.VS2P([x], lr=1.0, rho=0.05, recorder=ledger)
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
                f"{self.path} already exists; resume it by ft.resume(model, {str(self.path)!r}), or choose another name"
            )
        if not os.access(self.path.parent, os.W_OK):
            raise LedgerError(f"{self.path} cannot be created: {self.path.parent} is not a folder you can write to")
        self._journal: Journal | None = None
        self._pending: list[Row] = []
        self._closed = False

    @classmethod
    def _resumed(
        cls, model: Model, checkpoint_every: int | None, journal: Journal, run: RecordedRun, optimizer: LineSearch
    ) -> Ledger:
        """A ledger that continues a journal."""
        ledger = cls.__new__(cls)
        ledger.path, ledger.model = journal.path, model
        ledger.fsync, ledger.checkpoint_every = journal.fsync, checkpoint_every
        ledger._pending, ledger._closed = [], False
        ledger._attach(journal, run.header, optimizer, run.state)
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
            raise LedgerError(f"{self.path} is closed; resume it by ft.resume(model, {str(self.path)!r})")
        if self._journal is None:
            header = _header(optimizer, self.model, self.fsync, self.checkpoint_every)
            self._attach(Journal.create(self.path, header.to_json(), self.fsync), header, optimizer)
        elif self._is_checkpoint_due():
            self._checkpoint()

    def _is_checkpoint_due(self) -> bool:
        """A step that has just raised is not yet part of the run, and delays the checkpoint."""
        every = self.checkpoint_every
        return every is not None and not self._pending and self._next // every > self._saved // every

    def _attach(self, journal: Journal, header: Header, optimizer: LineSearch, states: Iterable[State] = ()) -> None:
        """Binds a journal to the optimizer whose steps it will hold; `states` are the run's so far."""
        self._journal, self._optimizer = journal, ref(optimizer)
        self._slots = optimizer.slots
        self._watcher = StateWatcher(self.model, optimizer.field, states)
        pairs = zip(optimizer.param_groups, header.groups, strict=True)
        self._settings = [_GroupSettings(group, recorded.numbers) for group, recorded in pairs]
        self._next = self._anchored = self._saved = optimizer.steps
        self._names = [parameter.names[0] for parameter in header.parameters]

    def record(self, optimizer: LineSearch, record: StepRecord) -> None:
        """Called by the optimizer once the step is decided, before the weights move there."""
        if record.raised:
            # Written with the next step: if the process ends here, the step is not part of the run and is repeated.
            if self._journal and self._is_next(optimizer, record):
                with suppress(Exception):  # the next step is then refused, since this one is missing
                    self._pending.append(self._row(optimizer, record, flags=0))
                    self._next += 1
            return
        if self._journal is None:
            raise LedgerError(f"{self.path} was closed in the middle of a step")
        if not self._is_next(optimizer, record):
            raise self._refusal(optimizer, record)
        settings = self._settings
        try:
            flags = self._watcher.update()
            rows = [*self._pending, self._row(optimizer, record, flags)]
            self._journal.append(rows, record.step, list(self._watcher.states.values()) if flags else ())
        except BaseException:
            self._settings = settings
            self._watcher.undo()
            raise
        self._pending.clear()
        self._next += 1

    def _row(self, optimizer: LineSearch, record: StepRecord, flags: int) -> Row:
        groups, changes = optimizer.param_groups, None
        numbers = [group[name] for group, own in zip(groups, self._settings, strict=True) for name in own.numbers]
        if any(own.differ_from(group) for group, own in zip(groups, self._settings, strict=True)):
            pairs = zip(groups, self._settings, strict=True)
            self._settings = [_GroupSettings(group, own.numbers) for group, own in pairs]
            changes = dump([own.others for own in self._settings])
        try:
            return Row(pack(record, flags, numbers, by_example=optimizer.by_example), changes)
        except struct.error:
            raise InvalidArgumentError(
                f"settings that were numbers at the start of the run must remain numbers: {numbers}"
            ) from None

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

    def _refusal(self, optimizer: LineSearch, record: StepRecord) -> LedgerError:
        """Why a step cannot be part of this run."""
        if optimizer is not self._optimizer():
            return LedgerError(f"{self.path} records another optimizer; give each its own ledger")
        if record.step != self._next:
            return LedgerError(
                f"{self.path} holds the run up to step {self._next}, and the optimizer makes step {record.step}: "
                "a state_dict was loaded into it. Continue a recorded run with ft.resume, or start another ledger"
            )
        return LedgerError(
            f"{self.path} cannot continue: at step {record.step} parameters were added, frozen, unfrozen or cast to "
            "another dtype; start another ledger with a new optimizer"
        )

    def close(self) -> None:
        """Writes the fingerprint of the weights and releases the file.

        If the last step raised, it is not in the ledger: a resumed run repeats it.
        """
        self._closed = True
        if self._journal is None:
            return
        self.anchor()
        self._journal.close()
        self._journal = None

    def anchor(self) -> None:
        """Writes the fingerprint of the weights after the last step, unless that has been done."""
        if self._journal and self._journal.is_open and self._next > self._anchored and not self._pending:
            self._journal.anchor(Anchor(self._next, combined(digests(slot.tensor for slot in self._slots)), False))
            self._anchored = self._next

    def _checkpoint(self) -> None:
        """Saves the weights, then writes an anchor that says so, then removes earlier checkpoints."""
        if self._journal is None:
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
            warn(f"the checkpoint {file} cannot be written ({error}); the run continues without it, nothing is lost")
            return
        self._journal.anchor(Anchor(self._next, combined(digests(tensors.values())), True))
        self._anchored = self._next
        for other in self.path.parent.glob(f"{glob.escape(self.path.name)}.*.safetensors"):
            if other != file and other.name.split(".")[-2].isdigit():
                with suppress(OSError):
                    other.unlink()


def check_policy(fsync: Any, checkpoint_every: Any) -> None:
    """Refuses invalid arguments of a ledger."""
    if fsync not in ("timed", "never"):
        if isinstance(fsync, str):
            raise InvalidArgumentError(f"fsync must be 'timed', 'never' or a number of steps, not {fsync!r}")
        check_integer(1, fsync=fsync)
    if checkpoint_every is not None:
        check_integer(1, checkpoint_every=checkpoint_every)


def checkpoint_path(ledger: Path, step: int) -> Path:
    """The path of a ledger's checkpoint, which is never taken from the contents of a file."""
    return ledger.with_name(f"{ledger.name}.{step}.safetensors")


def _kind(slot: Slot) -> tuple[object, ...]:
    return slot.parameter, slot.group, slot.scale, slot.tensor.shape, slot.tensor.dtype


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's settings and other plain values that it holds, such as a scheduler's `initial_lr`."""
    values = {name: plain(value) for name, value in group.items() if name not in NOT_SETTINGS}
    return {name: value for name, value in values.items() if isinstance(value, str | int | float | None)}


class _GroupSettings:
    """A group's settings: `numbers`, recorded with every step, and `others`, recorded when they change."""

    def __init__(self, group: Mapping[str, Any], numbers: list[str]) -> None:
        self.numbers, self._size = numbers, len(group)
        self.others = {name: value for name, value in _settings(group).items() if name not in numbers}

    def differ_from(self, group: Mapping[str, Any]) -> bool:
        return len(group) != self._size or any(group[name] != value for name, value in self.others.items())


def _header(optimizer: LineSearch, model: Model, fsync: Fsync, checkpoint_every: int | None) -> Header:
    tensors = named_parameters(model)
    groups, parameters = _groups(optimizer, tensors), _parameters(optimizer, tensors)
    return Header(
        method=optimizer.method,
        defaults=_settings(optimizer.defaults),
        seed=optimizer.seed,
        distribution=optimizer.distribution,
        directions=optimizer.directions,
        max_nonfinite=optimizer.max_nonfinite,
        fsync=fsync,
        checkpoint_every=checkpoint_every,
        step=optimizer.steps,
        queries=optimizer.queries,
        nonfinite=optimizer.nonfinite,
        groups=groups,
        parameters=parameters,
        frozen=frozen_digest(model, parameters),
        noise=NOISE_VERSION,
        version=version("forwardtune"),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        scale=optimizer.scale,
        auto=optimizer.auto,
        probes=optimizer.probes,
        rounding=optimizer.rounding,
    )


def _groups(optimizer: LineSearch, tensors: dict[str, Tensor]) -> tuple[Group, ...]:
    names = {id(tensor): name for name, tensor in reversed(tensors.items())}  # of several names the first
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        labels = tuple(group["param_names"]) if "param_names" in group else None
        missing = [i for i, tensor in enumerate(group["params"]) if id(tensor) not in names]
        if missing:
            name = labels[missing[0]] if labels else f"parameter {missing[0]}"
            raise InvalidArgumentError(
                f"{name} of group {number} is not a parameter of the model given to the ledger; "
                "pass the model whose parameters are tuned"
            )
        if isinstance(group["lr"], Tensor):
            raise InvalidArgumentError(f"lr of group {number} is a tensor, which a ledger cannot record; pass a number")
        dump(group["memory"])  # refuses what JSON cannot hold
        own = tuple(names[id(tensor)] for tensor in group["params"])
        groups.append(Group(own, labels, _settings(group), dict(group["memory"])))
    return tuple(groups)


def _parameters(optimizer: LineSearch, tensors: dict[str, Tensor]) -> tuple[Parameter, ...]:
    names: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(_storage(tensor), []).append(name)
    slots = optimizer.slots
    return tuple(
        Parameter(
            names=tuple(names[_storage(slot.tensor)]),
            number=slot.parameter,
            group=slot.group,
            shape=tuple(slot.tensor.shape),
            dtype=dtype_name(slot.tensor.dtype),
            digest=digest,
            scale=slot.scale,
        )
        for slot, digest in zip(slots, digests(slot.tensor for slot in slots), strict=True)
    )


def _storage(tensor: Tensor) -> tuple[object, ...]:
    """Equal for tied tensors."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()
