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
from forwardtune.ledger.export import read
from forwardtune.ledger.fingerprint import digests
from forwardtune.ledger.format import Parameter, dtype_name
from forwardtune.ledger.replay import Progress, check_anchor, check_start, mover_over, standing, walk
from forwardtune.ledger.run import RecordedRun
from forwardtune.ledger.weights import buffers_left, check_buffers, check_kind, restore_buffers
from forwardtune.noise import Slot

PORTION = 1 << 28
"""Bytes of tensors that are walked together (but at least one tensor)."""


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
        _replay_copies([_Mapped(new)], run, end, backend, progress)

    def make_folder(new: Path) -> None:
        new.mkdir()
        for file in (*files, *source.glob("*.json")):
            shutil.copyfile(file, new / file.name)
        _replay_copies([_Mapped(new / file.name) for file in files], run, end, backend, progress)
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


def _replay_copies(
    files: Sequence[_Mapped], run: RecordedRun, end: int, backend: str, progress: Progress | None
) -> None:
    names = Counter(name for file in files for name in file.tensors)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise LedgerError(f"{twice[0]!r} is in more than one of the base files; the folder must hold one model only")
    slots: list[Slot] = []
    where: list[_Mapped] = []
    first: dict[int, int] = {}
    for parameter in run.header.parameters:
        places = [(file, name) for file in files for name in parameter.names if name in file.tensors]
        if not places:
            raise LedgerError(
                f"the run moves {parameter.names[0]!r}, which is not in the base file; save the base model "
                "with the names of its state_dict"
            )
        first[parameter.number] = len(slots)
        for file, name in places:
            slots.append(Slot(file.tensor(name, parameter), parameter.number, parameter.group))
            where.append(file)
    weights = [slots[i].tensor for i in first.values()]
    found = digests(slot.tensor for slot in slots)
    start = check_start(standing(run, [found[i] for i in first.values()]), end)
    for slot, digest in zip(slots, found, strict=True):
        if digest != found[first[slot.parameter]]:
            tied = next(p.names for p in run.header.parameters if p.number == slot.parameter)
            raise LedgerError(f"{' and '.join(tied)} are one tensor in the run, and differ in the base file")
    run.warn_of_buffers(end)
    whole = mover_over([slots[i] for i in first.values()], run.header, backend)
    portions = _portions([slot.tensor.nbytes for slot in slots])
    total = sum(slot.tensor.nbytes for slot in slots)
    for low, high in pairwise(portions):
        part = mover_over(slots[low:high], run.header, backend)
        before, own = (sum(slot.tensor.nbytes for slot in slots[a:b]) for a, b in ((0, low), (low, high)))
        for done in walk(run, part, whole, start, end):
            if progress:
                progress((before + done * own) / total)
        for file in {id(file): file for file in where[low:high]}.values():
            file.flush()
    check_anchor(run, weights, end)
    if end == run.state_end:
        values = buffers_left(run.state)
        for file in files:
            buffers = {name: file.tensor(name) for name in values.keys() & file.tensors.keys()}
            check_buffers(values, buffers)
            restore_buffers(values, buffers)
            file.flush()


def _portions(sizes: Sequence[int]) -> list[int]:
    """Bounds of stretches of at most PORTION bytes, or of one tensor."""
    bounds, room = [0], PORTION
    for i, size in enumerate(sizes):
        if size > room and i > bounds[-1]:
            bounds.append(i)
            room = PORTION
        room -= size
    return [*bounds, len(sizes)]


class _Mapped:
    """A safetensors file whose tensors are its own bytes, in the system's page cache and not in ours."""

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
            raise LedgerError(f"the base file is damaged or not in safetensors format ({error})") from error
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
            raise LedgerError(f"{name!r} is of dtype {info['dtype']}, which is not supported")
        low, high = info["data_offsets"]
        if low == high:
            return torch.empty(info["shape"], dtype=dtype)
        count = (high - low) // dtype.itemsize
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=self._data + low).view(info["shape"])

    def flush(self) -> None:
        """Writes what has changed and lets go of the memory."""
        self._map.flush()
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)
