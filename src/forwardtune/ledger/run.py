"""A recorded run, whichever kind of file it is read from."""

from __future__ import annotations

import json
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from forwardtune.errors import InvalidArgumentError, LedgerError
from forwardtune.files import is_locked, translated
from forwardtune.ledger import journal
from forwardtune.ledger.format import BUFFERS, Header, frozen, left_behind, unpack
from forwardtune.ledger.journal import Anchor, Contents
from forwardtune.ledger.states import State, read_slots
from forwardtune.record import StepRecord


class RecordedRun(ABC):
    """The sound steps of a run, from `header.step` to `end`."""

    header: Header
    end: int
    damage: str | None = None
    """What is wrong with the steps from `end` on."""
    state: list[State]
    """What the run left behind beside its weights, after step `state_end`."""
    state_end: int
    anchors: list[Anchor]
    writing = False
    """Whether a run is writing the file."""

    @abstractmethod
    def record(self, step: int) -> StepRecord:
        """What happened in a step."""

    @abstractmethod
    def left_buffers(self, end: int) -> bool:
        """Whether the steps before `end` changed buffers of the model."""

    def records(self, start: int | None = None, until: int | None = None) -> Iterator[StepRecord]:
        """What happened in steps `start` to `until`, of all by default."""
        start, until = self.header.step if start is None else start, self.end if until is None else until
        return (self.record(step) for step in range(start, until))

    def __repr__(self) -> str:
        return f"<run of {self.header.method}, steps {self.header.step} to {self.end}>"

    def warn_of_buffers(self, end: int) -> None:
        """Tells the caller's caller if what the run left in buffers is not known after step `end`."""
        if end != self.state_end and self.left_buffers(end):
            known = f"known after step {self.state_end} only" if self.state else "lost"
            warnings.warn(
                "the run changed buffers of the model, such as the statistics of BatchNorm; what it left in them is "
                f"{known}, so here, after step {end}, they are those of the base",
                RuntimeWarning,
                stacklevel=3,
            )

    def check_until(self, until: int | None) -> int:
        """The step to go to: the end, unless another is asked for."""
        if until is None:
            if self.damage:
                raise LedgerError(
                    f"the ledger is damaged ({self.damage}); its steps up to {self.end} are sound: "
                    f"ask for those with until={self.end}"
                )
            return self.end
        if isinstance(until, bool) or not isinstance(until, int) or not self.header.step <= until <= self.end:
            raise LedgerError(f"until must be a step from {self.header.step} to {self.end}, not {until!r}")
        return until


class LiveRun(RecordedRun):
    """A run from the file that it is written to; `slot` holds its state."""

    def __init__(self, contents: Contents, slots: Mapping[int, tuple[int, list[State]]]) -> None:
        self.header = Header.from_json(contents.header)
        self._rows, self.damage = contents.rows, contents.damage
        self.end = self.header.step + len(self._rows)
        self.anchors = [anchor for anchor in contents.anchors if self.header.step <= anchor.step <= self.end]
        self.state, self.slot, self.state_end = [], 0, self._next_left(self.header.step)
        for number, (step, states) in sorted(slots.items(), key=lambda item: item[1][0]):
            if self.header.step <= step < self.end and left_behind(self._rows[step - self.header.step].numbers):
                self.state, self.slot, self.state_end = states, number, self._next_left(step + 1)

    @property
    def repaired_end(self) -> int:
        """The last step from which a repaired run can go on."""
        return self.state_end if self.state else self.end

    def _next_left(self, step: int) -> int:
        """The first step from this one on that left another state behind, or the end."""
        lefts = (i for i in range(step, self.end) if left_behind(self._rows[i - self.header.step].numbers))
        return next(lefts, self.end)

    def left_buffers(self, end: int) -> bool:
        rows = self._rows[: end - self.header.step]
        return any(left_behind(row.numbers, BUFFERS) for row in rows)

    def record(self, step: int) -> StepRecord:
        return self.entry(step)[0]

    def entry(self, step: int) -> tuple[StepRecord, list[dict[str, Any]]]:
        """What happened in a step, and each group's settings (but for those not numeric and as in the step before)."""
        packed, text = self._rows[step - self.header.step]
        record, numbers = unpack(step, packed, self.header)
        try:
            changes = frozen(json.loads(text)) if text else [{} for _ in self.header.groups]
            if len(changes) != len(self.header.groups) or not all(isinstance(change, dict) for change in changes):
                raise ValueError(f"not one for each of {len(self.header.groups)} groups")
        except (ValueError, TypeError, RecursionError) as error:
            raise LedgerError(f"the settings of step {step} make no sense ({error})") from error
        return record, [{**change, **own} for change, own in zip(changes, numbers, strict=True)]


def check_file(path: str | os.PathLike[str]) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise InvalidArgumentError(f"the ledger is given by its path, not by a {type(path).__name__}")
    file = Path(path).resolve()
    if not file.is_file():
        raise LedgerError(f"{file} is a folder, not a ledger" if file.is_dir() else f"there is no ledger at {file}")
    return file


def is_live(file: Path) -> bool:
    """Whether a file is one that is written by a run, rather than exported."""
    with translated(LedgerError, f"{file} cannot be read"), open(file, "rb") as handle:
        return handle.read(len(journal.MAGIC)) == journal.MAGIC


def read_live(file: Path) -> LiveRun:
    """A run that may be under way: then it ends where its state is known."""
    slots = read_slots(file, journal.read(file).identity)
    run = LiveRun(journal.read(file), slots)
    run.writing = is_locked(file)
    if run.writing and not run.damage:
        run.end = run.state_end
    return run
