"""The live file: an append-only journal with one writer.

The journal is a magic word and records, each framed as

    length, a check of the length, CRC-32 (little-endian uint32), payload

The CRC covers the payload and all payloads before it. The first byte of a payload tells its kind: the header (JSON), a
step, the settings that changed before the step that follows (JSON), or an anchor (JSON). When `append` returns, the
operating system has the step; `fsync` says when it is forced to the disk. However the file is cut or changed, its
records up to the first that is not sound are the run up to that step.

The run's state is not in the journal but in two files beside it; see `states`.
"""

from __future__ import annotations

import json
import os
import struct
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from weakref import WeakSet

from forwardtune.errors import LedgerError
from forwardtune.files import create_file, lock, parse_json, translated
from forwardtune.ledger.format import SCHEMA, Row
from forwardtune.ledger.states import State, pack_states, state_paths

Fsync = int | Literal["timed", "never"]
TIMED = 5.0
"""Under the policy "timed", the first step is synced that comes so many seconds after the last sync."""

MAGIC = b"forwardtune journal\0"
FRAME = struct.Struct("<III")
FULL = 0xFFFFFFFF
HEADER, STEP, SETTINGS, ANCHOR = b"H", b"S", b"C", b"A"


@dataclass(frozen=True)
class Anchor:
    """The fingerprint of all weights once `step` steps are done, and whether they were saved as a checkpoint."""

    step: int
    digest: str
    checkpoint: bool


@dataclass
class Contents:
    """The sound part of a journal, and what is wrong with the rest, if anything."""

    header: str = ""
    rows: list[Row] = field(default_factory=list)
    anchors: list[Anchor] = field(default_factory=list)
    marks: list[tuple[int, int]] = field(default_factory=list)
    """The size and the CRC of the file up to its header, then up to each step and the anchors that follow it."""
    damage: str | None = None

    @property
    def identity(self) -> int:
        """Distinguishes this run's states from those of an earlier run with the same path."""
        return self.marks[0][1]


class Journal:
    """A journal that is open for writing, with its two state files."""

    def __init__(self, path: Path, fsync: Fsync) -> None:
        self.path, self.fsync, self.is_open = path, fsync, False
        self._unsynced, self._synced_at = 0, time.monotonic()
        with translated(LedgerError, f"{path} cannot be opened for writing"):
            self._file, self._state_files = os.open(path, os.O_RDWR), []
            try:
                _lock(self._file, path)
                for state_path in state_paths(path):
                    self._state_files.append(os.open(state_path, os.O_RDWR | os.O_CREAT, 0o666))
            except BaseException:
                self.disown()
                raise
        self.latest_state = 0
        """Which state file holds the latest state; the other is overwritten next."""
        self._unsynced_states: set[int] = set()
        self.is_open = True
        _writers.add(self)

    @staticmethod
    def create(path: Path, header: str, fsync: Fsync) -> Journal:
        """Makes a file that exists with its whole header or not at all."""
        first, _ = frame(HEADER + bytes([SCHEMA]) + header.encode(), 0)
        with translated(LedgerError, f"{path} cannot be created"):
            create_file(path, lambda new: new.write_bytes(MAGIC + first))
        journal = Journal(path, fsync)
        journal.contents()
        return journal

    def contents(self) -> Contents:
        """Reads the file; the next record is written after the last sound one."""
        contents = read_journal(self.path)
        self._identity = contents.identity
        self._end, self._crc = contents.marks[-1]
        return contents

    def append(self, rows: Sequence[Row], step: int, states: Sequence[State] = ()) -> None:
        """Adds steps, the last of which is `step`, and the run's state after it if that has changed."""
        crc, frames = self._crc, b""
        for numbers, settings in rows:
            if settings:
                framed, crc = frame(SETTINGS + settings.encode(), crc)
                frames += framed
            framed, crc = frame(STEP + numbers, crc)
            frames += framed
        older = 1 - self.latest_state
        if states:
            self._unsynced_states.add(older)
            self._put(self._state_files[older], pack_states(self._identity, step, states), 0)
        self._write(frames, crc, self._is_sync_due(len(rows)))
        if states:
            self.latest_state = older

    def anchor(self, anchor: Anchor) -> None:
        text = json.dumps([anchor.step, anchor.digest, anchor.checkpoint])
        self._write(*frame(ANCHOR + text.encode(), self._crc))

    def _write(self, frames: bytes, crc: int, sync: bool = False) -> None:
        """Adds to the journal all of the frames or none."""
        try:
            self._put(self._file, frames, self._end)
            if sync:
                self.sync()
        except BaseException:
            with suppress(OSError):
                os.ftruncate(self._file, self._end)
            raise
        self._crc, self._end = crc, self._end + len(frames)

    def _put(self, descriptor: int, data: bytes, start: int) -> None:
        if not self.is_open:
            raise LedgerError(f"{self.path} is closed, or is written by the process that this one was forked from")
        try:
            done = os.pwrite(descriptor, data, start)
            while done < len(data):  # a large state, or a full disk
                done += os.pwrite(descriptor, data[done:], start + done)
        except OSError as error:
            raise LedgerError(
                f"{self.path} cannot be written ({error}). The step is undone and nothing recorded is lost; "
                "make room on the disk and try again"
            ) from error

    def sync(self) -> None:
        """Forces everything to the disk, states first."""
        with translated(LedgerError, f"{self.path} cannot be forced to the disk"):
            for number in self._unsynced_states:
                os.fsync(self._state_files[number])
            self._unsynced_states.clear()
            os.fsync(self._file)
        self._unsynced, self._synced_at = 0, time.monotonic()

    def cut(self, mark: tuple[int, int]) -> None:
        """Removes everything after a mark."""
        with translated(LedgerError, f"{self.path} cannot be written"):
            os.ftruncate(self._file, mark[0])
        self._end, self._crc = mark

    def close(self) -> None:
        if self.is_open:
            try:
                if self.fsync != "never":
                    self.sync()
            finally:
                self.disown()

    def disown(self) -> None:
        """Closes the files as they are, which releases the lock."""
        self.is_open = False
        for descriptor in (self._file, *self._state_files):
            os.close(descriptor)
        _writers.discard(self)

    def __del__(self) -> None:
        if getattr(self, "is_open", False):
            self.disown()

    def _is_sync_due(self, rows: int) -> bool:
        self._unsynced += rows
        if self.fsync == "timed":
            return time.monotonic() - self._synced_at >= TIMED
        return self.fsync != "never" and self._unsynced >= self.fsync


def frame(payload: bytes, crc: int) -> tuple[bytes, int]:
    """A payload as it is written, and the CRC up to it."""
    crc, length = zlib.crc32(payload, crc), len(payload)
    return FRAME.pack(length, _check(length), crc) + payload, crc


def _check(length: int) -> int:
    """Changes in many bits if the length changes in one, which distinguishes a file that was cut from a damaged one."""
    return length * 0x9E3779B1 & FULL ^ FULL


def read_journal(path: Path) -> Contents:
    """The contents of a live file, whether or not a run is writing it."""
    with translated(LedgerError, f"{path} cannot be read"):
        data = path.read_bytes()
    if not data.startswith(MAGIC):
        raise LedgerError(f"{path} is not a ledger, or its first bytes are damaged")
    contents = Contents()
    settings = None
    end, crc = len(MAGIC), 0
    while True:
        start = end
        payload, crc, contents.damage = _payload(data, start, crc)
        if payload is None:
            break
        kind, body = payload[:1], payload[1:]
        end = start + FRAME.size + len(payload)
        try:
            if kind == HEADER and not contents.header:
                _check_schema(body[0], path)
                contents.header = body[1:].decode()
                contents.marks.append((end, crc))
            elif kind == SETTINGS and contents.header:
                settings = body.decode()
                continue
            elif kind == STEP and contents.header:
                contents.rows.append(Row(body, settings))
                contents.marks.append((end, crc))
            elif kind == ANCHOR and contents.header:
                step, digest, checkpoint = parse_json(body)
                contents.anchors.append(Anchor(int(step), str(digest), bool(checkpoint)))
                contents.marks[-1] = end, crc
            else:
                raise ValueError(f"unknown kind {kind!r}")
        except (ValueError, TypeError, IndexError, OverflowError) as error:
            contents.damage = f"the record at byte {start} is invalid ({error})"
            break
        settings = None
    if not contents.header:
        raise LedgerError(f"the header of {path} is damaged, so nothing in it can be used; remove it and start again")
    return contents


def _payload(data: bytes, start: int, crc: int) -> tuple[bytes | None, int, str | None]:
    """The next payload if it is sound, and the CRC up to it; if it is damaged rather than unfinished, a complaint."""
    rest = len(data) - start
    if rest < FRAME.size:
        return None, crc, None
    length, check, claimed = FRAME.unpack_from(data, start)
    if check != _check(length):
        unwritten = not any(data[start:])  # blocks that were allocated when the machine went down
        return None, crc, None if unwritten else f"the record at byte {start} is damaged"
    if length > rest - FRAME.size:
        return None, crc, None
    payload = data[start + FRAME.size : start + FRAME.size + length]
    if not payload or zlib.crc32(payload, crc) != claimed:
        return None, crc, f"the record at byte {start} is damaged"
    return payload, claimed, None


def _check_schema(schema: int, path: Path) -> None:
    if schema > SCHEMA:
        raise LedgerError(f"{path} has format {schema}, newer than {SCHEMA}; install a newer forwardtune")


def _lock(descriptor: int, path: Path) -> None:
    """Makes this process the only writer, or raises an error."""
    try:
        is_only_writer = lock(descriptor)
    except ImportError:
        raise LedgerError("a ledger needs file locks, which this system lacks: record on Linux or macOS") from None
    if not is_only_writer:
        raise LedgerError(
            f"{path} is being written by another run; wait for it to end or stop it; if it is in this process, "
            "close its ledger (optimizer.recorder.close())"
        )


_writers: WeakSet[Journal] = WeakSet()


def _disown() -> None:
    """In a forked child, which would otherwise keep the lock after its parent has crashed."""
    for journal in list(_writers):
        journal.disown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown)
