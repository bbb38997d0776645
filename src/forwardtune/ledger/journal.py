"""The live file: an append-only journal with one writer.

The journal is a magic word and records, each framed as

    length, a check of the length, CRC-32 (little-endian uint32), payload

The CRC is that of the payload and of all payloads before it. The first byte of a payload tells what it is: the header
(JSON), a step, the settings that changed before the step that follows (JSON), or an anchor (JSON). A step is in the
hands of the operating system when `append` returns; `fsync` tells when it is on the disk. Whatever cuts or changes the
file, its records up to the first that is not sound are the run up to there.

What a run leaves behind beside its weights is not in the journal but in two slots; see `slots`.
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
from forwardtune.files import create_file, lock, translated
from forwardtune.ledger.format import SCHEMA, Row
from forwardtune.ledger.states import State, pack_slot, slot_paths

Fsync = int | Literal["timed", "never"]
TIMED = 5.0
"""Seconds after which the next step is synced, under the policy "timed"."""

MAGIC = b"forwardtune journal\0"
FRAME = struct.Struct("<III")
FULL = 0xFFFFFFFF
HEADER, STEP, SETTINGS, ANCHOR = b"H", b"S", b"C", b"A"


@dataclass(frozen=True)
class Anchor:
    """The fingerprint of all weights after so many steps, and whether they were saved."""

    step: int
    digest: str
    checkpoint: bool


@dataclass
class Contents:
    """What a file holds: all that is sound, how far it reaches, and what is wrong with the rest."""

    header: str = ""
    rows: list[Row] = field(default_factory=list)
    anchors: list[Anchor] = field(default_factory=list)
    marks: list[tuple[int, int]] = field(default_factory=list)
    """The size and the CRC of the file up to its header, and up to each step with what follows it."""
    damage: str | None = None

    @property
    def identity(self) -> int:
        """What tells this run's states from those of another that was here before."""
        return self.marks[0][1]


class Journal:
    """A file that is open for writing."""

    def __init__(self, path: Path, fsync: Fsync) -> None:
        self.path, self.fsync, self.is_open = path, fsync, False
        self._since, self._synced = 0, time.monotonic()
        with translated(LedgerError, f"{path} cannot be opened for writing"):
            self._file, self._slots = os.open(path, os.O_RDWR), []
            try:
                _lock(self._file, path)
                for slot in slot_paths(path):
                    self._slots.append(os.open(slot, os.O_RDWR | os.O_CREAT, 0o666))
            except BaseException:
                self.disown()
                raise
        self._slot = 0
        self._dirty: set[int] = set()
        self.is_open = True
        _writers.add(self)

    @staticmethod
    def create(path: Path, header: str, fsync: Fsync) -> Journal:
        """Makes a file that is there with its whole header or not at all."""
        first, _ = frame(HEADER + bytes([SCHEMA]) + header.encode(), 0)
        with translated(LedgerError, f"{path} cannot be created"):
            create_file(path, lambda new: new.write_bytes(MAGIC + first))
        store = Journal(path, fsync)
        store.contents()
        return store

    def contents(self) -> Contents:
        """All that is in the file; the next record goes behind what is sound."""
        contents = read(self.path)
        self._identity = contents.identity
        self._end, self._crc = contents.marks[-1]
        return contents

    def append(self, rows: Sequence[Row], step: int, states: Sequence[State] = ()) -> None:
        """Adds steps, the last of which is `step`, and what that one left behind."""
        crc, frames = self._crc, b""
        for numbers, settings in rows:
            if settings:
                framed, crc = frame(SETTINGS + settings.encode(), crc)
                frames += framed
            framed, crc = frame(STEP + numbers, crc)
            frames += framed
        older = 1 - self._slot
        if states:
            self._dirty.add(older)
            self._put(self._slots[older], pack_slot(self._identity, step, states), 0)
        self._write(frames, crc, self._due(len(rows)))
        if states:
            self._slot = older

    def anchor(self, anchor: Anchor) -> None:
        text = json.dumps([anchor.step, anchor.digest, anchor.checkpoint])
        self._write(*frame(ANCHOR + text.encode(), self._crc))

    def _write(self, frames: bytes, crc: int, sync: bool = False) -> None:
        """Adds to the journal, all or nothing."""
        try:
            self._put(self._file, frames, self._end)
            if sync:
                self.sync()
        except BaseException:
            with suppress(OSError):
                os.ftruncate(self._file, self._end)
            raise
        self._crc, self._end = crc, self._end + len(frames)

    def _put(self, descriptor: int, data: bytes, at: int) -> None:
        if not self.is_open:
            raise LedgerError(f"{self.path} is closed, or belongs to the process that this one was forked from")
        try:
            done = os.pwrite(descriptor, data, at)
            while done < len(data):  # a large state, or no room for all
                done += os.pwrite(descriptor, data[done:], at + done)
        except OSError as error:
            raise LedgerError(
                f"{self.path} cannot be written ({error}). The step is undone and nothing recorded is lost; "
                "see to the disk and try again"
            ) from error

    def use_slot(self, number: int) -> None:
        """This slot holds the latest states: it will be overwritten last."""
        self._slot = number

    def sync(self) -> None:
        """Forces all to the disk, states first."""
        with translated(LedgerError, f"{self.path} cannot be forced to the disk"):
            for number in self._dirty:
                os.fsync(self._slots[number])
            self._dirty.clear()
            os.fsync(self._file)
        self._since, self._synced = 0, time.monotonic()

    def cut(self, mark: tuple[int, int]) -> None:
        """Removes what is behind a mark; it has been read and is not needed, or was never finished."""
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
        """Gives the files up as they are."""
        self.is_open = False
        for descriptor in (self._file, *self._slots):
            os.close(descriptor)
        _writers.discard(self)

    def __del__(self) -> None:
        if getattr(self, "is_open", False):
            self.disown()

    def _due(self, rows: int) -> bool:
        self._since += rows
        if self.fsync == "timed":
            return time.monotonic() - self._synced >= TIMED
        return self.fsync != "never" and self._since >= self.fsync


def frame(payload: bytes, crc: int) -> tuple[bytes, int]:
    """A payload as it is written, and the CRC up to it."""
    crc, length = zlib.crc32(payload, crc), len(payload)
    return FRAME.pack(length, _check(length), crc) + payload, crc


def _check(length: int) -> int:
    """Changes in many bits if the length does in one: so a file that was cut is told from one that was changed."""
    return length * 0x9E3779B1 & FULL ^ FULL


def read(path: Path) -> Contents:
    """What a live file holds, whether or not a run is writing it."""
    with translated(LedgerError, f"{path} cannot be read"):
        data = path.read_bytes()
    if not data.startswith(MAGIC):
        raise LedgerError(f"{path} is not a ledger, or its first bytes are damaged")
    contents = Contents()
    settings = None
    end, crc = len(MAGIC), 0
    while True:
        payload, crc, complaint = _next(data, end, crc)
        if payload is None:
            contents.damage = complaint
            break
        kind, body = payload[:1], payload[1:]
        end += FRAME.size + len(payload)
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
                step, digest, checkpoint = json.loads(body)
                contents.anchors.append(Anchor(int(step), str(digest), bool(checkpoint)))
                contents.marks[-1] = end, crc
            else:
                raise ValueError(f"a record of kind {kind!r}")
        except (ValueError, TypeError, IndexError, OverflowError, RecursionError) as error:
            contents.damage = str(error)
            break
        settings = None
    if not contents.header:
        raise LedgerError(f"the header of {path} is damaged, so nothing in it can be used; remove it and begin again")
    return contents


def _next(data: bytes, at: int, crc: int) -> tuple[bytes | None, int, str | None]:
    """The payload at a place, if it is sound; if it is not, what is wrong unless it was just never finished."""
    rest = len(data) - at
    if rest < FRAME.size:
        return None, crc, None
    length, check, claimed = FRAME.unpack_from(data, at)
    if check != _check(length):
        unwritten = not any(data[at:])  # blocks that were allocated when the machine went down
        return None, crc, None if unwritten else f"the record at byte {at} is damaged"
    if length > rest - FRAME.size:
        return None, crc, None
    payload = data[at + FRAME.size : at + FRAME.size + length]
    if not payload or zlib.crc32(payload, crc) != claimed:
        return None, crc, f"the record at byte {at} is damaged"
    return payload, claimed, None


def _check_schema(schema: int, path: Path) -> None:
    if schema > SCHEMA:
        raise LedgerError(f"{path} has format {schema}, newer than {SCHEMA}; install a newer forwardtune")


def _lock(descriptor: int, path: Path) -> None:
    """Makes this process the only writer."""
    try:
        alone = lock(descriptor)
    except ImportError:
        raise LedgerError("ledgers are written on Linux and macOS only, for the lock that they need") from None
    if not alone:
        raise LedgerError(
            f"{path} is being written by another run; wait for it to end, stop it, or, if it is one of this process, "
            "close its ledger (optimizer.recorder.close())"
        )


_writers: WeakSet[Journal] = WeakSet()


def _disown() -> None:
    """In a forked child, which would keep the lock when its parent has crashed."""
    for store in list(_writers):
        store.disown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown)
