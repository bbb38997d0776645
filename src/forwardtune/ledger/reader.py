"""Reading a ledger: `read` gives a `RecordedRun`, whether the file is live or exported."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from forwardtune.auto import SPAN, trail_of
from forwardtune.errors import InvalidArgumentError, LedgerError, warn
from forwardtune.files import is_locked, parse_json, translated
from forwardtune.ledger.format import (
    EXPORT_FORMAT,
    EXPORT_KEYS,
    NEW_STATE,
    NOT_TAKEN,
    RAISED,
    SCHEMA,
    TAKEN,
    WITH_BUFFERS,
    Column,
    Header,
    are_settings,
    checked,
    checksum,
    has_flag,
    immutable,
    unpack,
)
from forwardtune.ledger.journal import MAGIC, Anchor, Contents, read_journal
from forwardtune.ledger.plain import PlainSteps, plain_steps
from forwardtune.ledger.states import State, read_states
from forwardtune.line import Trail
from forwardtune.record import LineRecord, Review, StepRecord

COUNTED = ("kind", "review", "back", "shared")
"""Columns of an export that hold small whole numbers, as those of visits do."""


def read(path: str | os.PathLike[str]) -> RecordedRun:
    """Reads a ledger, live or exported; a live one may be read while its run is under way.

    >>> import tempfile, torch, forwardtune as ft
    >>> x = torch.tensor([3.0, -2.0])
    >>> with tempfile.TemporaryDirectory() as folder, ft.Ledger(f"{folder}/run.ledger", {"x": x}) as ledger:
    ...     optimizer = ft.STP([x], lr=0.5, scale="absolute", recorder=ledger)
    ...     for _ in range(3):
    ...         loss = optimizer.step(lambda: x @ x)
    ...     run = ft.ledger.read(f"{folder}/run.ledger")
    >>> run
    <RecordedRun of STP, steps 0 to 2>
    >>> run.header.seed, run.end
    (0, 3)
    >>> [record.loss for record in run.records()]
    [13.0, 8.5, 5.0]
    """
    file = check_file(path)
    return _read_live(file) if is_live(file) else ExportedRun(file)


def check_file(path: str | os.PathLike[str]) -> Path:
    """The absolute path of a ledger; if there is no such file, an error."""
    if not isinstance(path, str | os.PathLike):
        raise InvalidArgumentError(f"pass the path of a ledger, not a {type(path).__name__}")
    file = Path(path).resolve()
    if not file.is_file():
        raise LedgerError(f"{file} is a folder, not a ledger" if file.is_dir() else f"there is no ledger at {file}")
    return file


def is_live(file: Path) -> bool:
    """Whether a file is the journal of a run, rather than an export."""
    with translated(LedgerError, f"{file} cannot be read"), open(file, "rb") as handle:
        return handle.read(len(MAGIC)) == MAGIC


def _read_live(file: Path) -> LiveRun:
    """A run that may be under way; it then ends at the last step whose state is known."""
    # The run may be writing while we read. Each state is written before its step, so the states read here belong to
    # steps that are in the journal when it is read afterwards, or to the one being written, which is left out. In the
    # opposite order, all states could be newer than the last step that was read. The first read of the journal is for
    # its identity alone, which is that of the header and never changes.
    states = read_states(file, read_journal(file).identity)
    run = LiveRun(read_journal(file), states)
    run.writing = is_locked(file)
    if run.writing and not run.damage:
        run.end = run.state_end
    return run


class RecordedRun(ABC):
    """The sound steps of a run, from `header.step` up to but not including `end`, as :func:`read` gives them."""

    header: Header
    """The run at its start: its method, settings, seed and parameters."""
    end: int
    """The number of the step after the last one: how many steps the optimizer had made."""
    damage: str | None = None
    """What is wrong with the file from step `end` on; None if nothing is."""
    writing: bool = False
    """Whether the run was under way when the file was read."""
    anchors: list[Anchor]
    """Fingerprints of the weights."""
    state: list[State]
    """The run's generators and buffers after `state_end` steps."""
    state_end: int
    """Up to which step `state` is the run's state; less than `end` if the later ones are lost."""

    @abstractmethod
    def record(self, step: int) -> StepRecord:
        """What happened in a step."""

    @abstractmethod
    def changed_buffers(self, end: int) -> bool:
        """Whether the steps before `end` changed buffers of the model."""

    def trail(self, record: StepRecord) -> Trail:
        """The steps that a step has reviewed, with their destinations."""
        steps = record.review.steps if record.review else 0
        before = dict(trail_of(self.header.auto)) if self.header.auto else {}
        reviewed = range(record.step - steps, record.step)
        if any(step < self.header.step and step not in before for step in reviewed):
            raise LedgerError(f"step {record.step} of the ledger is invalid: it reviews steps that are not in it")
        return [
            (step, self.record(step).destination() if step >= self.header.step else before[step]) for step in reviewed
        ]

    def records(self, start: int | None = None, until: int | None = None) -> Iterator[StepRecord]:
        """The records of steps `start` up to but not including `until`; of all steps by default."""
        start, until = self.header.step if start is None else start, self.end if until is None else until
        return (self.record(step) for step in range(start, until))

    def plain(self, start: int, until: int) -> PlainSteps | None:
        """These steps as arrays, if the run has them so and all are plain."""
        return None

    def __repr__(self) -> str:
        steps = f"steps {self.header.step} to {self.end - 1}" if self.end > self.header.step else "no steps"
        return f"<RecordedRun of {self.header.method}, {steps}>"

    def warn_of_buffers(self, end: int) -> None:
        """Warns if the run's buffers are not known after `end` steps."""
        if end != self.state_end and self.changed_buffers(end):
            known = f"known after step {self.state_end} only" if self.state else "lost"
            warn(
                "the run changed buffers of the model, such as the running statistics of BatchNorm; their values are "
                f"{known}, so here, after step {end}, they are those of the base"
            )

    def check_until(self, until: int | None) -> int:
        """The step to stop at: the end of the run, unless another is asked for."""
        if until is None:
            if self.damage:
                raise LedgerError(
                    f"the ledger is damaged ({self.damage}); its steps up to {self.end} are sound: "
                    f"ask for those with until={self.end} (--until {self.end} on the command line)"
                )
            return self.end
        if isinstance(until, bool) or not isinstance(until, int) or not self.header.step <= until <= self.end:
            raise LedgerError(f"until must be a step from {self.header.step} to {self.end}, not {until!r}")
        return until


class LiveRun(RecordedRun):
    """A run from its journal; `state_file` is the number of the file that holds its state."""

    def __init__(self, contents: Contents, states: Mapping[int, tuple[int, list[State]]]) -> None:
        self.header = Header.from_json(contents.header)
        self._rows, self.damage = contents.rows, contents.damage
        self.end = self.header.step + len(self._rows)
        self.anchors = [anchor for anchor in contents.anchors if self.header.step <= anchor.step <= self.end]
        self.state, self.state_file, self.state_end = [], 0, self._next_change(self.header.step)
        for number, (step, values) in sorted(states.items(), key=lambda item: item[1][0]):
            if self.header.step <= step < self.end and self._changes_state(step):
                self.state, self.state_file, self.state_end = values, number, self._next_change(step + 1)

    @property
    def repaired_end(self) -> int:
        """The step from which a repaired run resumes."""
        return self.state_end if self.state else self.end

    def _changes_state(self, step: int) -> bool:
        return has_flag(self._rows[step - self.header.step].numbers, NEW_STATE)

    def _next_change(self, start: int) -> int:
        """The first step, from `start` on, that changes the run's state; the end if there is none."""
        return next((step for step in range(start, self.end) if self._changes_state(step)), self.end)

    def changed_buffers(self, end: int) -> bool:
        return any(has_flag(row.numbers, WITH_BUFFERS) for row in self._rows[: end - self.header.step])

    def record(self, step: int) -> StepRecord:
        return self.entry(step)[0]

    def plain(self, start: int, until: int) -> PlainSteps | None:
        first = self.header.step
        return plain_steps(start, self._rows[start - first : until - first], self.header)

    def entry(self, step: int) -> tuple[StepRecord, list[dict[str, Any]]]:
        """What happened in a step, and each group's settings: the numeric ones, and others that changed before it."""
        packed, text = self._rows[step - self.header.step]
        record, numbers = unpack(step, packed, self.header)
        try:
            changes = immutable(parse_json(text)) if text else [{} for _ in self.header.groups]
            if len(changes) != len(self.header.groups) or not all(map(are_settings, changes)):
                raise ValueError(f"not one for each of {len(self.header.groups)} groups")
        except (ValueError, TypeError) as error:
            complaint = f"the settings of step {step} are invalid ({error}); get an undamaged copy of the file"
            raise LedgerError(complaint) from error
        return record, [{**change, **own} for change, own in zip(changes, numbers, strict=True)]


class ExportedRun(RecordedRun):
    """A run from an exported file; `export` describes its columns."""

    def __init__(self, file: Path) -> None:
        try:
            self._load(file)
        except (SafetensorError, OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise LedgerError(f"{file} is not a ledger, or is damaged ({error}); get another copy") from error

    def _load(self, file: Path) -> None:
        with safe_open(file, framework="numpy") as handle:
            metadata = handle.metadata() or {}
            if metadata.get("format") != EXPORT_FORMAT:
                raise LedgerError(f"{file} is not a ledger")
            if int(metadata["schema"]) > SCHEMA:
                raise LedgerError(
                    f"{file} has format {metadata['schema']}, newer than {SCHEMA}; install a newer forwardtune"
                )
            arrays: dict[str, Column] = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
        if metadata.keys() - EXPORT_KEYS or int(metadata["crc"]) != checksum(arrays, metadata):
            raise LedgerError(f"{file} is damaged; get another copy")
        self.header = Header.from_json(metadata["header"])
        self.end = self.header.step + int(metadata["steps"])
        self.anchors = [Anchor(int(step), str(digest), False) for step, digest in parse_json(metadata["anchors"])]
        self.state = [
            State(str(name), str(dtype), tuple(map(int, shape)), arrays.pop(f"state.{i}").tobytes())
            for i, (name, dtype, shape) in enumerate(parse_json(metadata["state"]))
        ]
        self._has_buffers = metadata["buffers"] == "1"
        self.state_end = self.end if self.state or not self._has_buffers else self.header.step
        self._columns, self._bases = arrays, parse_json(metadata["columns"])
        self._by_example = not isinstance(self.header.directions, int)
        self._lines = int(metadata["lines"] if self._by_example else self.header.directions)
        self._check_columns(int(metadata["steps"]))
        made = np.zeros(self.end - self.header.step, np.int64)
        for d in range(min(self._lines, 1) if self._by_example else self._lines):
            made += self._columns[f"visited.{d}"]
        if "review" in arrays:
            made += 2 * (self._columns["review"] > 0)
        self._queries = self.header.queries + np.cumsum(made)

    def changed_buffers(self, end: int) -> bool:
        return bool(self._has_buffers)

    def _check_columns(self, steps: int) -> None:
        """Checks that no column is missing, of the wrong length or kind, or a multiple of one that is a multiple."""
        columns, directions = self._columns, range(self._lines)
        needed = chain(
            ("loss", "kind"),
            (f"visited.{d}" for d in directions),
            (f"t.{d}.{g}" for d in directions for g in range(len(self.header.groups))),
        )
        missing = next((name for name in needed if name not in columns), None)
        if missing:
            raise ValueError(f"column {missing} is missing")
        for name, column in columns.items():
            lengths = ((steps,),) if name == "loss" else ((steps,), (1,))
            if column.shape not in lengths or column.dtype.kind not in "fiu":
                raise ValueError(f"column {name} has shape {column.shape}")
            counted = name in COUNTED or name.startswith("visited.")
            if counted and (column.dtype.kind == "f" or not np.all((column >= 0) & (column < 2**16))):
                raise ValueError(f"column {name} has what is no count")
        for name, base in self._bases.items():
            if not {name, base} <= {column for column in columns if column.startswith(("t.", "probe."))}:
                raise ValueError(f"column {name} is a multiple of {base!r}")
            if base in self._bases:
                raise ValueError(f"column {name} is a multiple of a multiple")

    def _value(self, name: str, index: int) -> float:
        column = self._columns[name]
        value = float(column[index if len(column) > 1 else 0])
        return value * self._value(self._bases[name], index) if name in self._bases else value

    def record(self, step: int) -> StepRecord:
        index, groups = step - self.header.step, range(len(self.header.groups))
        try:
            lines: list[tuple[LineRecord, ...]] = []
            for d in range(self._lines):
                visited = int(self._value(f"visited.{d}", index))
                if visited > 0:
                    probes = [[self._value(f"probe.{d}.{i}.{g}", index) for i in range(visited)] for g in groups]
                    targets = [self._value(f"t.{d}.{g}", index) for g in groups]
                    unknown = (float("nan"),) * visited
                    pairs = zip(probes, targets, strict=True)
                    lines.append(tuple(LineRecord(tuple(offsets), unknown, t) for offsets, t in pairs))
            kind, loss = self._value("kind", index), self._value("loss", index)
            steps = int(self._value("review", index)) if "review" in self._columns else 0
            if kind not in (TAKEN, NOT_TAKEN, RAISED) or steps > SPAN:
                raise ValueError(f"kind {kind:g}, a review of {steps} steps")
            back = "back" in self._columns and self._value("back", index) == 1
            review = Review(steps, float("nan"), float("nan"), back) if steps else None
            taken, raised, queries = kind == TAKEN, kind == RAISED, int(self._queries[index])
            shared = "shared" in self._columns and self._value("shared", index) == 1
            if taken and (not lines or (len(lines) < self._lines and not self._by_example)):
                raise ValueError(f"{len(lines)} of {self._lines} directions")
            lines = checked(lines, self.header.reach)
            return StepRecord(step, tuple(lines), loss, queries, taken, raised, review, self._by_example, shared)
        except (KeyError, ValueError, OverflowError) as error:
            complaint = f"step {step} of the ledger is invalid ({error}); get an undamaged copy of the file"
            raise LedgerError(complaint) from error
