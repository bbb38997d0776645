"""A recorded run, whichever kind of file it is read from."""

from __future__ import annotations

import json
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forwardtune.errors import LedgerError
from forwardtune.ledger import store
from forwardtune.ledger.format import Header, frozen, unpack
from forwardtune.ledger.store import Anchor, Contents, State
from forwardtune.record import StepRecord


class Run(ABC):
    """The sound steps of a run, from `header.step` to `end`."""

    header: Header
    end: int
    damage: str | None = None
    """What is wrong with the steps from `end` on."""
    state: list[State]
    """What the run left behind beside its weights, at its end."""
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
    """A run from the file that it is written to."""

    has_losses = True

    def __init__(self, contents: Contents) -> None:
        self.header = Header.from_json(contents.header)
        self._rows, self.damage = contents.rows, contents.damage
        self.state, self.anchors = contents.state, contents.anchors
        if self._rows and self._rows[0].step != self.header.step:
            self._rows, self.damage = [], self.damage or f"step {self.header.step} is missing"
        self.end = self.header.step + len(self._rows)
        self.crc = self._rows[-1].crc if self._rows else zlib.crc32(contents.header.encode())

    def record(self, step: int) -> StepRecord:
        return unpack(step, self._rows[step - self.header.step].numbers, self.header)

    def changed_settings(self, step: int) -> list[dict[str, Any]]:
        """The settings of each group that were new in a step."""
        text = self._rows[step - self.header.step].settings
        try:
            changes = frozen(json.loads(text)) if text else [{} for _ in self.header.groups]
            if len(changes) != len(self.header.groups) or not all(isinstance(change, dict) for change in changes):
                raise ValueError(f"not one for each of {len(self.header.groups)} groups")
        except (ValueError, TypeError, RecursionError) as error:
            raise LedgerError(f"the settings of step {step} make no sense ({error})") from error
        return list(changes)


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
    try:
        return LiveRun(store.read(file))
    except LedgerError as error:
        raise LedgerError(f"{file}: {error}") from error
