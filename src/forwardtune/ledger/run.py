"""A recorded run, whichever kind of file it is read from."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from forwardtune.errors import LedgerError
from forwardtune.ledger import store
from forwardtune.ledger.format import Header, frozen, left_behind, unpack
from forwardtune.ledger.store import Anchor, Contents, State
from forwardtune.record import StepRecord


class Run(ABC):
    """The sound steps of a run, from `header.step` to `end`."""

    header: Header
    end: int
    damage: str | None = None
    """What is wrong with the steps from `end` on."""
    state: list[State]
    """What the run left behind beside its weights, after step `state_end`."""
    state_end: int
    anchors: list[Anchor]
    has_losses: bool
    """Whether the loss of every probe is known, or only that of the step."""

    @abstractmethod
    def record(self, step: int) -> StepRecord:
        """What happened in a step."""

    def records(self, start: int, until: int) -> Iterator[StepRecord]:
        return (self.record(step) for step in range(start, until))

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


class LiveRun(Run):
    """A run from the file that it is written to; `slot` holds its state."""

    has_losses = True

    def __init__(self, contents: Contents, slots: Mapping[int, tuple[int, list[State]]]) -> None:
        self.header = Header.from_json(contents.header)
        self._rows, self.damage, self.anchors = contents.rows, contents.damage, contents.anchors
        self.end = self.header.step + len(self._rows)
        self.state, self.slot, self.state_end = [], 0, self.header.step
        for number, (step, states) in sorted(slots.items(), key=lambda item: item[1][0]):
            if self.header.step <= step < self.end and left_behind(self._rows[step - self.header.step].numbers):
                self.state, self.slot, self.state_end = states, number, self._next_left(step + 1)
        if not self.state:
            self.state_end = self._next_left(self.header.step)

    def _next_left(self, step: int) -> int:
        """The first step from this one on that left another state behind, or the end."""
        lefts = (i for i in range(step, self.end) if left_behind(self._rows[i - self.header.step].numbers))
        return next(lefts, self.end)

    def record(self, step: int) -> StepRecord:
        return unpack(step, self._rows[step - self.header.step].numbers, self.header)[0]

    def settings(self, step: int) -> list[dict[str, Any]]:
        """The settings of each group in a step, but for those that are no numbers and as in the step before."""
        _, numbers = unpack(step, self._rows[step - self.header.step].numbers, self.header)
        text = self._rows[step - self.header.step].settings
        try:
            changes = frozen(json.loads(text)) if text else [{} for _ in self.header.groups]
            if len(changes) != len(self.header.groups) or not all(isinstance(change, dict) for change in changes):
                raise ValueError(f"not one for each of {len(self.header.groups)} groups")
        except (ValueError, TypeError, RecursionError) as error:
            raise LedgerError(f"the settings of step {step} make no sense ({error})") from error
        return [{**change, **own} for change, own in zip(changes, numbers, strict=True)]


def check_file(path: str | os.PathLike[str]) -> Path:
    file = Path(path)
    if not file.is_file():
        raise LedgerError(f"there is no ledger at {file}")
    return file


def is_live(file: Path) -> bool:
    """Whether a file is one that is written by a run, rather than exported."""
    with open(file, "rb") as handle:
        return handle.read(len(store.MAGIC)) == store.MAGIC


def read_live(file: Path) -> LiveRun:
    slots = store.read_slots(file)  # first: if a run is writing, a step that comes after them has its state, too
    return LiveRun(store.read(file), slots)
