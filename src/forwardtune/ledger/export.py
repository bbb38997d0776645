"""The file one sends to a colleague: a run's offsets as plain columns in a safetensors file.

A column has one number a step, or (all but `loss`) a single one if it never changes. `probe.d.i.g` is the offset of
probe i along direction d in group g, `visited.d` how many of them were walked, `t.d.g` where the search wanted to
stand, `kind` whether the step was taken, `loss` its loss as float32. The metadata `columns` names, for some columns,
another that they are multiples of: t is often one of the probes, and one probe minus another, so a byte tells which.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from forwardtune.errors import LedgerError
from forwardtune.files import create_file
from forwardtune.ledger.format import NOT_TAKEN, RAISED, SCHEMA, TAKEN, Header
from forwardtune.ledger.journal import Anchor
from forwardtune.ledger.run import RecordedRun, check_file, is_live, read_live
from forwardtune.ledger.states import State
from forwardtune.ledger.weights import BUFFER
from forwardtune.record import LineRecord, StepRecord

FORMAT = "forwardtune ledger"
Column = np.ndarray[Any, Any]


def read(path: str | os.PathLike[str]) -> RecordedRun:
    """A run from a live file or an exported one."""
    file = check_file(path)
    return read_live(file) if is_live(file) else ExportedRun(file)


def export(path: str | os.PathLike[str], out: str | os.PathLike[str], *, until: int | None = None) -> None:
    """Writes what a replay needs of a ledger into a small safetensors file.

    Buffers that the run changed (the statistics of BatchNorm) go with it if it is exported to its end.
    """
    run, target = read(path), Path(out)
    end = run.check_until(until)
    if not target.parent.is_dir():
        raise LedgerError(f"there is no folder {target.parent} to write to")
    run.warn_of_buffers(end)
    arrays, formulas = _encode(_table(run, end))
    state = [item for item in run.state if item.name.startswith(BUFFER)] if end == run.state_end else []
    arrays |= {f"state.{i}": np.frombuffer(item.value, np.uint8) for i, item in enumerate(state)}
    metadata = {
        "format": FORMAT,
        "schema": str(SCHEMA),
        "header": run.header.to_json(),
        "steps": str(end - run.header.step),
        "columns": json.dumps(formulas),
        "anchors": json.dumps([[a.step, a.digest] for a in run.anchors if a.step <= end]),
        "buffers": str(int(run.left_buffers(end))),
        "state": json.dumps([(item.name, item.dtype, item.shape) for item in state]),
    }
    metadata["crc"] = str(_checksum(arrays, metadata))
    try:
        create_file(target, lambda new: new.write_bytes(save(arrays, metadata)))
    except FileExistsError:
        raise LedgerError(f"{target} already exists; choose another name or remove it") from None
    except (OSError, SafetensorError) as error:
        raise LedgerError(f"{target} cannot be written ({error})") from error


def _table(run: RecordedRun, end: int) -> dict[str, Column]:
    """All columns, in full."""
    records = list(run.records(run.header.step, end))
    n, groups, directions = len(records), len(run.header.groups), run.header.directions
    visited = np.array(
        [[len(r.lines[d][0].losses) if d < len(r.lines) else 0 for d in range(directions)] for r in records], np.uint16
    ).reshape(n, directions)
    table: dict[str, Column] = {
        "kind": np.array([TAKEN if r.taken else RAISED if r.raised else NOT_TAKEN for r in records], np.uint8),
        "loss": np.array([r.loss for r in records], np.float64).astype(np.float32),
    }
    for d in range(directions):
        table[f"visited.{d}"] = visited[:, d].copy()
        for i in range(int(visited[:, d].max(initial=0))):
            walked = visited[:, d] > i
            for g in range(groups):
                values = [r.lines[d][g].offsets[i] if there else 0.0 for r, there in zip(records, walked, strict=True)]
                table[f"probe.{d}.{i}.{g}"] = _filled(np.array(values), walked) + 0.0  # zeros without a sign
        for g in range(groups):
            table[f"t.{d}.{g}"] = np.array([r.lines[d][g].t if r.taken else 0.0 for r in records]) + 0.0
    return table


def _filled(values: Column, valid: Column) -> Column:
    """Values that do not count, made equal to a neighbour's."""
    last = np.maximum.accumulate(np.where(valid, np.arange(len(values)), -1))
    return values[np.where(last < 0, np.argmax(valid), last)]


def _encode(table: Mapping[str, Column]) -> tuple[dict[str, Column], dict[str, str]]:
    """Each column in the shortest of its forms, and the columns that some are multiples of."""
    arrays: dict[str, Column] = {}
    formulas: dict[str, str] = {}
    for name, column in table.items():
        arrays[name] = column if name == "loss" else _shortest(column)
        if len(arrays[name]) == 1 or column.dtype != np.float64:
            continue
        for other in arrays:
            base = table[other]
            if other != name and other not in formulas and base.dtype == np.float64:
                factor = np.select([column == base, column == -base, column == 0], [1, -1, 0], 2).astype(np.int8)
                if np.array_equal(factor * base, column):
                    arrays[name], formulas[name] = _shortest(factor), other
                    break
    return arrays, formulas


def _shortest(column: Column) -> Column:
    same = len(column) > 1 and column.tobytes() == column[:1].tobytes() * len(column)
    return column[:1] if same else column


def _checksum(arrays: Mapping[str, Column], metadata: Mapping[str, str]) -> int:
    crc = zlib.crc32(json.dumps([metadata[key] for key in sorted(metadata) if key != "crc"]).encode())
    for name in sorted(arrays):
        crc = zlib.crc32(arrays[name].tobytes(), zlib.crc32(f"{name} {arrays[name].dtype}".encode(), crc))
    return crc


class ExportedRun(RecordedRun):
    """A run from an exported file."""

    def __init__(self, file: Path) -> None:
        try:
            with safe_open(file, framework="numpy") as handle:
                metadata = handle.metadata() or {}
                if metadata.get("format") != FORMAT:
                    raise LedgerError(f"{file} is not a ledger")
                if int(metadata["schema"]) > SCHEMA:
                    raise LedgerError(f"{file} has format {metadata['schema']}; install a newer forwardtune")
                arrays = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
            if int(metadata["crc"]) != _checksum(arrays, metadata):
                raise LedgerError(f"{file} is damaged; ask for it again")
            self.header = Header.from_json(metadata["header"])
            self.end = self.header.step + int(metadata["steps"])
            self.anchors = [Anchor(int(step), str(digest), False) for step, digest in json.loads(metadata["anchors"])]
            self.state = [
                State(str(name), str(dtype), tuple(map(int, shape)), arrays.pop(f"state.{i}").tobytes())
                for i, (name, dtype, shape) in enumerate(json.loads(metadata["state"]))
            ]
            self._buffers = metadata["buffers"] == "1"
            self.state_end = self.end if self.state or not self._buffers else self.header.step
            self._columns, self._formulas = arrays, json.loads(metadata["columns"])
            self._check(int(metadata["steps"]))
            visited = sum(self._full(f"visited.{d}").astype(np.int64) for d in range(self.header.directions))
            self._queries = self.header.queries + np.cumsum(visited)
        except (SafetensorError, OSError, ValueError, TypeError, KeyError, RecursionError, MemoryError) as error:
            raise LedgerError(f"{file} is not a ledger, or is damaged") from error

    def left_buffers(self, end: int) -> bool:
        return bool(self._buffers)

    def _check(self, steps: int) -> None:
        """That every column is there, as long as the run or a single number, and a multiple of one that is none."""
        groups, directions = range(len(self.header.groups)), range(self.header.directions)
        needed = ["kind", *(f"visited.{d}" for d in directions), *(f"t.{d}.{g}" for d in directions for g in groups)]
        if self._columns["loss"].shape != (steps,) or not all(name in self._columns for name in needed):
            raise ValueError("columns are missing")
        for name, column in self._columns.items():
            if column.shape not in ((steps,), (1,)) or column.dtype.kind not in "fiu":
                raise ValueError(f"column {name} has shape {column.shape}")
            if self._formulas.get(self._formulas.get(name)) is not None:
                raise ValueError(f"column {name} is a multiple of a multiple")

    def _full(self, name: str) -> Column:
        return np.broadcast_to(self._columns[name], (self.end - self.header.step,))

    def _value(self, name: str, at: int) -> float:
        column = self._columns[name]
        value = float(column[at if len(column) > 1 else 0])
        return value * self._value(self._formulas[name], at) if name in self._formulas else value

    def record(self, step: int) -> StepRecord:
        at, groups = step - self.header.step, range(len(self.header.groups))
        try:
            lines = []
            for d in range(self.header.directions):
                walked = int(self._value(f"visited.{d}", at))
                if walked > 0:
                    probes = [[self._value(f"probe.{d}.{i}.{g}", at) for i in range(walked)] for g in groups]
                    stands = [self._value(f"t.{d}.{g}", at) for g in groups]
                    unknown = (float("nan"),) * walked
                    pairs = zip(probes, stands, strict=True)
                    lines.append(tuple(LineRecord(tuple(offsets), unknown, t) for offsets, t in pairs))
            kind, loss = self._value("kind", at), self._value("loss", at)
            return StepRecord(step, tuple(lines), loss, int(self._queries[at]), kind == TAKEN, kind == RAISED)
        except (KeyError, ValueError, OverflowError) as error:
            raise LedgerError(f"step {step} of the ledger makes no sense ({error})") from error
