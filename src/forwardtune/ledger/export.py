"""The small file to send to a colleague: a run's offsets as plain columns in a safetensors file.

A column has one number per step, or (all but `loss`) a single one if it never changes. `probe.d.i.g` is the offset of
probe i along direction d in group g, `visited.d` the number of probes made along it, `t.d.g` the offset that the search
decided on, `kind` whether the step was taken, `review` how many earlier steps it reviewed, `back` whether it undid
them, `shared` whether its examples shared a common line, `loss` its loss as float32.
The metadata `columns` maps some columns to another that they are multiples of, by -1, 0 or 1: often t is one of the
probes, and one probe the negative of another.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save

from forwardtune.errors import LedgerError
from forwardtune.files import create_file
from forwardtune.ledger.format import EXPORT_FORMAT, NOT_TAKEN, RAISED, SCHEMA, TAKEN, Column, checksum
from forwardtune.ledger.reader import read
from forwardtune.record import StepRecord


def export(path: str | os.PathLike[str], out: str | os.PathLike[str], *, until: int | None = None) -> None:
    """Writes what a replay needs of a ledger to a small safetensors file.

    Buffers that the run changed (the running statistics of BatchNorm) are included if it is exported to its end.
    """
    run, target = read(path), Path(out)
    end = run.check_until(until)
    if not target.parent.is_dir():
        raise LedgerError(f"there is no folder {target.parent} to write to")
    run.warn_of_buffers(end)
    records = [_moved(record) for record in run.records(run.header.step, end)]
    lines = run.header.directions
    if not isinstance(lines, int):
        lines = max((len(record.lines) for record in records), default=0)
    arrays, bases = _encode(_table(records, len(run.header.groups), lines))
    state = [item for item in run.state if item.is_buffer] if end == run.state_end else []
    arrays |= {f"state.{i}": np.frombuffer(item.value, np.uint8) for i, item in enumerate(state)}
    metadata = {
        "format": EXPORT_FORMAT,
        "schema": str(SCHEMA),
        "header": run.header.to_json(),
        "steps": str(end - run.header.step),
        "lines": str(lines),
        "columns": json.dumps(bases),
        "anchors": json.dumps([[a.step, a.digest] for a in run.anchors if a.step <= end]),
        "buffers": str(int(run.changed_buffers(end))),
        "state": json.dumps([(item.name, item.dtype, item.shape) for item in state]),
    }
    metadata["crc"] = str(checksum(arrays, metadata))
    try:
        create_file(target, lambda new: new.write_bytes(save(arrays, metadata)))
    except FileExistsError:
        raise LedgerError(f"{target} already exists; choose another name or remove it") from None
    except (OSError, SafetensorError) as error:
        raise LedgerError(f"{target} cannot be written ({error})") from error


def _moved(record: StepRecord) -> StepRecord:
    """With the lines that it moved along: of examples that share a line, one."""
    return replace(record, lines=record.lines[:1]) if record.shared else record


def _table(records: Sequence[StepRecord], groups: int, directions: int) -> dict[str, Column]:
    """All columns, with one number per step."""
    n = len(records)
    visited = np.array(
        [[len(r.lines[d][0].losses) if d < len(r.lines) else 0 for d in range(directions)] for r in records], np.uint16
    ).reshape(n, directions)
    table: dict[str, Column] = {
        "kind": np.array([TAKEN if r.taken else RAISED if r.raised else NOT_TAKEN for r in records], np.uint8),
        "loss": np.array([r.loss for r in records], np.float64).astype(np.float32),
        "review": np.array([r.review.steps if r.review else 0 for r in records], np.uint16),
        "back": np.array([bool(r.review and r.review.back) for r in records], np.uint8),
        "shared": np.array([r.shared for r in records], np.uint8),
    }
    for d in range(directions):
        table[f"visited.{d}"] = visited[:, d].copy()
        for i in range(int(visited[:, d].max(initial=0))):
            made = visited[:, d] > i
            for g in range(groups):
                values = [r.lines[d][g].offsets[i] if was else 0.0 for r, was in zip(records, made, strict=True)]
                table[f"probe.{d}.{i}.{g}"] = _filled(np.array(values), made) + 0.0  # zeros without a sign
        for g in range(groups):
            table[f"t.{d}.{g}"] = (
                np.array([r.lines[d][g].t if r.taken and d < len(r.lines) else 0.0 for r in records]) + 0.0
            )
    return table


def _filled(values: Column, valid: Column) -> Column:
    """Replaces values that do not count by a neighbour's."""
    last = np.maximum.accumulate(np.where(valid, np.arange(len(values)), -1))
    return values[np.where(last < 0, np.argmax(valid), last)]


def _encode(table: Mapping[str, Column]) -> tuple[dict[str, Column], dict[str, str]]:
    """Each column in its shortest form, and for some the column that they are multiples of."""
    arrays: dict[str, Column] = {}
    bases: dict[str, str] = {}
    for name, column in table.items():
        arrays[name] = column if name == "loss" else _shortest(column)
        if len(arrays[name]) == 1 or column.dtype != np.float64:
            continue
        for other in arrays:
            base = table[other]
            if other != name and other not in bases and base.dtype == np.float64:
                factor = np.select([column == base, column == -base, column == 0], [1, -1, 0], 2).astype(np.int8)
                if np.array_equal(factor * base, column):
                    arrays[name], bases[name] = _shortest(factor), other
                    break
    return arrays, bases


def _shortest(column: Column) -> Column:
    """A single number if all are the same."""
    same = len(column) > 1 and column.tobytes() == column[:1].tobytes() * len(column)
    return column[:1] if same else column
