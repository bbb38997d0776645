"""Where two runs diverge."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from forwardtune.ledger.format import Header
from forwardtune.ledger.reader import read
from forwardtune.record import StepRecord

IGNORED = ("created", "version", "max_nonfinite", "fsync", "checkpoint_every")
"""Fields of the header that have no influence on the weights."""


@dataclass(frozen=True)
class Difference:
    """How two runs differ; false if they do not.

    fields: the fields of the header that differ, with both values.
    step: the first step at which the runs diverge; None if one run is the beginning of the other.
    a, b: what the runs did in that step.
    ends: the step at which each run ends.
    """

    fields: dict[str, tuple[object, object]]
    step: int | None
    a: StepRecord | None
    b: StepRecord | None
    ends: tuple[int, int]

    def __bool__(self) -> bool:
        return bool(self.fields) or self.step is not None or self.ends[0] != self.ends[1]


def diff(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> Difference:
    """Compares two ledgers, live or exported, step by step: where the weights went, not the losses."""
    runs = read(a), read(b)
    fields = _fields(runs[0].header, runs[1].header)
    start, ends = max(run.header.step for run in runs), tuple(run.end for run in runs)
    for step in range(start, min(ends)):
        one, other = (run.record(step) for run in runs)
        if one.path() != other.path() or (one.review is None) != (other.review is None):
            return Difference(fields, step, one, other, (ends[0], ends[1]))
    return Difference(fields, None, None, None, (ends[0], ends[1]))


def _fields(a: Header, b: Header) -> dict[str, tuple[object, object]]:
    one, other = (dict(_flat(asdict(header))) for header in (a, b))
    names = [name for name in {**one, **other} if name.split(".")[0] not in IGNORED]
    return {name: (one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)}


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, object]]:
    """A header's fields by dotted names."""
    if isinstance(value, dict | tuple | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flat(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, value
