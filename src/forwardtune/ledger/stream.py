"""Replay from file to file, for models that need not fit into memory."""

from __future__ import annotations

import json
import mmap
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from forwardtune.errors import LedgerError
from forwardtune.files import create_file, temporary
from forwardtune.ledger.fingerprint import digests
from forwardtune.ledger.format import Parameter, dtype_name
from forwardtune.ledger.reader import RecordedRun, read
from forwardtune.ledger.replay import Progress, check_anchor, mover_over, replay_steps, steps_done
from forwardtune.ledger.states import buffers_in, check_buffers, restore_buffers
from forwardtune.ledger.weights import check_kind
from forwardtune.noise import Slot

PORTION = 1 << 28
"""Bytes of tensors that are moved together (but at least one tensor)."""


def replay_file(
    base: str | os.PathLike[str],
    ledger: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    until: int | None = None,
    backend: str = "auto",
    progress: Progress | None = None,
) -> None:
    """Replays from a safetensors file to another, a portion at a time, so that the model need not fit into memory.

    Args:
        base: a file, or a folder with the files that a model is split into (its JSON files are copied).
        ledger, until, backend, progress: as for :func:`forwardtune.replay`.
        out: the file to make, or the folder if the base is one. What the run did not move is copied.
    """
    source, target = Path(base), Path(out)
    run = read(ledger)
    end = run.check_until(until)
    files = sorted(source.glob("*.safetensors")) if source.is_dir() else [source]
    if not files or not all(file.is_file() for file in files):
        raise LedgerError(f"there is no safetensors file at {source}")
    if not target.parent.is_dir():
        raise LedgerError(f"there is no folder {target.parent} to write to")
    if target.exists():
        raise LedgerError(f"{target} already exists; choose another name or remove it")

    def make_file(new: Path) -> None:
        shutil.copyfile(source, new)
        _replay_in([_Mapped(new)], run, end, backend, progress)

    def make_folder(new: Path) -> None:
        new.mkdir()
        for file in (*files, *source.glob("*.json")):
            shutil.copyfile(file, new / file.name)
        _replay_in([_Mapped(new / file.name) for file in files], run, end, backend, progress)
        new.rename(target)

    try:
        if source.is_dir():
            new = temporary(target)
            try:
                make_folder(new)
            finally:
                shutil.rmtree(new, ignore_errors=True)
        else:
            create_file(target, make_file)
    except OSError as error:
        raise LedgerError(f"{target} cannot be written ({error})") from error


def _replay_in(files: Sequence[_Mapped], run: RecordedRun, end: int, backend: str, progress: Progress | None) -> None:
    """Replays in files that are copies of the base."""
    tensors = _Tensors(files, run)
    start = steps_done(run, tensors.fingerprints(run), end)
    run.warn_of_buffers(end)
    whole = mover_over(tensors.distinct, run.header, backend)
    sizes = [slot.tensor.nbytes for slot in tensors.slots]
    for low, high in pairwise(_portions(sizes)):
        for fraction in replay_steps(run, whole.part(tensors.slots[low:high]), start, end):
            if progress:
                progress((sum(sizes[:low]) + fraction * sum(sizes[low:high])) / sum(sizes))
        for file in set(tensors.owners[low:high]):
            file.flush()
    check_anchor(run, [slot.tensor for slot in tensors.distinct], end)
    if end == run.state_end:
        values = buffers_in(run.state)
        for file in files:
            buffers = {name: file.tensor(name) for name in values.keys() & file.tensors.keys()}
            check_buffers(values, buffers)
            restore_buffers(values, buffers)
            file.flush()


class _Tensors:
    """The tensors that a run moves, in files that may hold several copies of one.

    `slots` are all of them and `owners` their files; `distinct` has one for each of the run's parameters.
    """

    def __init__(self, files: Sequence[_Mapped], run: RecordedRun) -> None:
        names = Counter(name for file in files for name in file.tensors)
        repeated = [name for name, count in names.items() if count > 1]
        if repeated:
            raise LedgerError(
                f"{repeated[0]!r} is in more than one of the base files; the folder must hold one model only"
            )
        self.slots: list[Slot] = []
        self.owners: list[_Mapped] = []
        self._first: dict[int, int] = {}
        for parameter in run.header.parameters:
            copies = [(file, name) for file in files for name in parameter.names if name in file.tensors]
            if not copies:
                raise LedgerError(
                    f"the run moves {parameter.names[0]!r}, which is not in the base file; save the base model "
                    "with the names of its state_dict"
                )
            self._first[parameter.number] = len(self.slots)
            for file, name in copies:
                self.slots.append(_slot(file.tensor(name, parameter), parameter))
                self.owners.append(file)
        self.distinct = [self.slots[i] for i in self._first.values()]

    def fingerprints(self, run: RecordedRun) -> list[str]:
        """One for each of the run's parameters; copies that differ are an error."""
        fingerprints = digests(slot.tensor for slot in self.slots)
        for slot, fingerprint in zip(self.slots, fingerprints, strict=True):
            if fingerprint != fingerprints[self._first[slot.parameter]]:
                tied = next(p.names for p in run.header.parameters if p.number == slot.parameter)
                raise LedgerError(
                    f"{' and '.join(tied)} are one tensor in the run, and differ in the base file; save the base model "
                    "with its weights tied"
                )
        return [fingerprints[i] for i in self._first.values()]


def _slot(tensor: Tensor, parameter: Parameter) -> Slot:
    return Slot(tensor, parameter.number, parameter.group, parameter.scale)


def _portions(sizes: Sequence[int]) -> list[int]:
    """Bounds of portions of at most PORTION bytes, or of one tensor."""
    bounds, room = [0], PORTION
    for i, size in enumerate(sizes):
        if size > room and i > bounds[-1]:
            bounds.append(i)
            room = PORTION
        room -= size
    return [*bounds, len(sizes)]


class _Mapped:
    """A safetensors file whose tensors are mapped into memory: they are the file's own bytes, in the page cache."""

    DTYPES = {  # noqa: RUF012
        "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
        "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
        "BOOL": torch.bool,
    }  # fmt: skip

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with safe_open(path, framework="numpy"):  # checks the header
                pass
        except SafetensorError as error:
            raise LedgerError(
                f"the base file is damaged or not in safetensors format ({error}); get another copy"
            ) from error
        with open(path, "rb+") as file:
            length = int.from_bytes(file.read(8), "little")
            self.tensors: dict[str, Any] = json.loads(file.read(length))
            self.tensors.pop("__metadata__", None)
            self._data = 8 + length
            self._map = mmap.mmap(file.fileno(), 0)

    def tensor(self, name: str, parameter: Parameter | None = None) -> Tensor:
        info = self.tensors[name]
        dtype = self.DTYPES.get(info["dtype"])
        if parameter:
            check_kind(parameter, info["shape"], dtype_name(dtype))
        if dtype is None:
            raise LedgerError(f"{name!r} is of dtype {info['dtype']}, which is not supported; convert the base")
        low, high = info["data_offsets"]
        if low == high:
            return torch.empty(info["shape"], dtype=dtype)
        count = (high - low) // dtype.itemsize
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=self._data + low).view(info["shape"])

    def flush(self) -> None:
        """Writes what has changed and releases the memory."""
        self._map.flush()
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)
