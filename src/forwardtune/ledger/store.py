"""The live file: an SQLite database in WAL mode, with one writer.

The writer holds SQLite's exclusive lock, which the system takes back when the process ends, however it ends. A step
is a transaction of its own and in the hands of the system when `append` returns; `fsync` tells when it is on the disk.

Readers look at a private copy of the file and its WAL: they need no lock and no permission to write, and they leave a
damaged file as it is.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sqlite3
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from weakref import WeakValueDictionary

from forwardtune.errors import LedgerError
from forwardtune.ledger.format import SCHEMA, Row, checksum

Fsync = int | Literal["timed", "never"]
TIMED = 5.0
"""Seconds after which the next step is synced, under the policy "timed"."""

MAGIC = b"SQLite format 3\0"
APPLICATION = 0x46544C47
PAGE = 1024
TABLES = (
    "CREATE TABLE header (id INTEGER PRIMARY KEY, json TEXT NOT NULL, crc INTEGER NOT NULL)",
    "CREATE TABLE steps (step INTEGER PRIMARY KEY, crc INTEGER NOT NULL, numbers BLOB NOT NULL, settings TEXT)",
    "CREATE TABLE state (id INTEGER PRIMARY KEY, name TEXT NOT NULL, dtype TEXT NOT NULL, shape TEXT NOT NULL, "
    "value BLOB NOT NULL, crc INTEGER NOT NULL)",
    "CREATE TABLE anchors (step INTEGER PRIMARY KEY, digest TEXT NOT NULL, checkpoint INTEGER NOT NULL, "
    "crc INTEGER NOT NULL)",
)
STEP = "INSERT OR REPLACE INTO steps VALUES (?, ?, ?, ?)"


@dataclass(frozen=True)
class State:
    """A tensor that the run leaves behind beside its weights: a generator's state or a buffer."""

    name: str
    dtype: str
    shape: str
    value: bytes

    @property
    def crc(self) -> int:
        return zlib.crc32(self.value, zlib.crc32(f"{self.name}\0{self.dtype}\0{self.shape}".encode()))


@dataclass(frozen=True)
class Anchor:
    """The fingerprint of all weights after so many steps, and whether they were saved."""

    step: int
    digest: str
    checkpoint: bool

    @property
    def crc(self) -> int:
        return zlib.crc32(f"{self.step}\0{self.digest}\0{self.checkpoint:d}".encode())


@dataclass
class Contents:
    """What a file holds: the sound steps, and what is wrong with the rest."""

    header: str
    rows: list[Row] = field(default_factory=list)
    state: list[State] = field(default_factory=list)
    anchors: list[Anchor] = field(default_factory=list)
    damage: str | None = None


class Store:
    """A file that is open for writing."""

    def __init__(self, path: Path, fsync: Fsync) -> None:
        self.path, self.fsync = path, fsync
        self.inherited = False
        self._since, self._synced = 0, time.monotonic()
        self._numbers: dict[str, int] = {}
        with _errors(f"{path} cannot be opened for writing"):
            self._connection = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
            run = self._connection.execute
            run("PRAGMA locking_mode = EXCLUSIVE")
            run("PRAGMA journal_mode = WAL")
            run("PRAGMA wal_autocheckpoint = 4000")
            run("PRAGMA fullfsync = 1")
            run("BEGIN IMMEDIATE")
            run("COMMIT")
            self._synchronous("FULL" if fsync == 1 else "OFF" if fsync == "never" else "NORMAL")
        _writers[_identity(path)] = self

    @staticmethod
    def create(path: Path, header: str, fsync: Fsync) -> Store:
        """Makes a file that is there with its whole header or not at all."""
        new = path.with_name(f".{path.name}.{os.getpid()}.new")
        with _errors(f"{path} cannot be created"):
            new.unlink(missing_ok=True)
            try:
                with closing(sqlite3.connect(new, isolation_level=None)) as connection:
                    connection.execute(f"PRAGMA page_size = {PAGE}")
                    connection.execute(f"PRAGMA application_id = {APPLICATION}")
                    connection.execute(f"PRAGMA user_version = {SCHEMA}")
                    connection.execute("BEGIN")
                    for table in TABLES:
                        connection.execute(table)
                    connection.execute("INSERT INTO header VALUES (0, ?, ?)", (header, zlib.crc32(header.encode())))
                    connection.execute("COMMIT")
                publish(new, path)
            finally:
                new.unlink(missing_ok=True)
        return Store(path, fsync)

    def contents(self) -> Contents:
        with _errors(f"{self.path} cannot be read"):
            return _contents(self._connection)

    def append(self, rows: Sequence[Row], state: Sequence[State]) -> None:
        """Adds steps, and what they left behind, in one transaction."""
        with _errors(f"{self.path} cannot be written"):
            self._check_process()
            run = self._connection.execute
            sync = self._due(len(rows))
            if sync:
                self._synchronous("FULL")
            try:
                if len(rows) == 1 and not state:
                    run(STEP, (rows[0].step, rows[0].crc, rows[0].numbers, rows[0].settings))
                else:
                    run("BEGIN")
                    for row in rows:
                        run(STEP, (row.step, row.crc, row.numbers, row.settings))
                    for item in state:
                        number = self._numbers.setdefault(item.name, len(self._numbers))
                        values = number, item.name, item.dtype, item.shape, item.value, item.crc
                        run("INSERT OR REPLACE INTO state VALUES (?, ?, ?, ?, ?, ?)", values)
                    run("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    run("ROLLBACK")
                raise
            finally:
                if sync:
                    self._synchronous("NORMAL")
            self._since = 0 if sync else self._since + len(rows)

    def number_states(self, names: Sequence[str]) -> None:
        """Continues the numbering of states that are there."""
        self._numbers = {name: number for number, name in enumerate(names)}

    def anchor(self, anchor: Anchor) -> None:
        """Adds a fingerprint; only the latest checkpoint counts."""
        with _errors(f"{self.path} cannot be written"):
            self._check_process()
            values = anchor.step, anchor.digest, int(anchor.checkpoint), anchor.crc
            self._connection.execute("INSERT OR REPLACE INTO anchors VALUES (?, ?, ?, ?)", values)

    def close(self) -> None:
        """Folds the WAL into the file; in a forked child it does nothing."""
        if not self.inherited:
            with _errors(f"{self.path} cannot be closed"):
                self._synchronous("OFF" if self.fsync == "never" else "FULL")
                self._connection.close()
        _writers.pop(_identity(self.path), None)

    def _check_process(self) -> None:
        if self.inherited:
            raise LedgerError(f"{self.path} belongs to the process that opened it, not to one forked from it")

    def _due(self, rows: int) -> bool:
        if self.fsync == "timed":
            now = time.monotonic()
            if now - self._synced < TIMED:
                return False
            self._synced = now
            return True
        return isinstance(self.fsync, int) and self.fsync > 1 and self._since + rows >= self.fsync

    def _synchronous(self, level: str) -> None:
        self._connection.execute(f"PRAGMA synchronous = {level}")


def read(path: Path) -> Contents:
    """What a live file holds, whether or not a run is writing it."""
    writer = _writers.get(_identity(path))
    if writer:  # opening and closing the file once more in this process would give up its lock
        return writer.contents()
    with (
        tempfile.TemporaryDirectory(prefix="forwardtune") as folder,
        _errors(f"{path} cannot be read"),
        closing(sqlite3.connect(_snapshot(path, Path(folder)), isolation_level=None)) as connection,
    ):
        return _contents(connection)


def _snapshot(path: Path, folder: Path) -> Path:
    """A copy of the file as it was after its last checkpoint, and of the WAL since."""
    wal = path.with_name(path.name + "-wal")
    for _ in range(100):
        before = path.stat()
        shutil.copyfile(path, folder / "ledger")
        try:
            shutil.copyfile(wal, folder / "ledger-wal")
        except FileNotFoundError:
            (folder / "ledger-wal").unlink(missing_ok=True)
        after = path.stat()
        if (before.st_mtime_ns, before.st_size) == (after.st_mtime_ns, after.st_size):
            return folder / "ledger"
    raise LedgerError(f"{path} is being written faster than it can be read; try again")


def _contents(connection: sqlite3.Connection) -> Contents:
    run = connection.execute
    for pragma in ("trusted_schema = OFF", "cell_size_check = ON"):
        run(f"PRAGMA {pragma}")
    if run("PRAGMA application_id").fetchone() != (APPLICATION,):
        raise LedgerError("this is a database, but not a ledger")
    (schema,) = run("PRAGMA user_version").fetchone()
    if schema > SCHEMA:
        raise LedgerError(
            f"this ledger has format {schema}, this forwardtune knows up to {SCHEMA}; install a newer one"
        )
    if sorted(sql for (sql,) in run("SELECT sql FROM sqlite_master")) != sorted(TABLES):
        raise LedgerError("this is not a ledger as forwardtune makes it, or its first pages are damaged")
    header = run("SELECT json, crc FROM header").fetchall()
    if len(header) != 1 or not isinstance(header[0][0], str) or zlib.crc32(header[0][0].encode()) != header[0][1]:
        raise LedgerError("the ledger's header is damaged; nothing in it can be trusted")
    contents = Contents(header[0][0])
    try:
        contents.damage = _read_steps(connection, contents)
        for name, dtype, shape, value, crc in run("SELECT name, dtype, shape, value, crc FROM state ORDER BY id"):
            state = State(*_typed((name, str), (dtype, str), (shape, str), (value, bytes)))
            contents.damage = contents.damage or _complaint(state.crc == crc, f"the state of {name} is damaged")
            contents.state.append(state)
        for step, digest, checkpoint, crc in run("SELECT step, digest, checkpoint, crc FROM anchors ORDER BY step"):
            anchor = Anchor(*_typed((step, int), (digest, str), (bool(checkpoint), bool)))
            contents.damage = contents.damage or _complaint(anchor.crc == crc, f"the anchor at {step} is damaged")
            contents.anchors.append(anchor)
        (check,) = run("PRAGMA integrity_check(1)").fetchone()
        contents.damage = contents.damage or _complaint(check == "ok", check)
    except (sqlite3.DatabaseError, TypeError, UnicodeError) as error:
        contents.damage = contents.damage or str(error)
    return contents


def _read_steps(connection: sqlite3.Connection, contents: Contents) -> str | None:
    """Reads steps as long as they are sound; what is wrong with the first that is not."""
    crc = zlib.crc32(contents.header.encode())
    for step, claimed, numbers, settings in connection.execute("SELECT * FROM steps ORDER BY step"):
        if contents.rows and step != contents.rows[-1].step + 1:
            return f"step {contents.rows[-1].step + 1} is missing"
        row = Row(*_typed((step, int), (claimed, int), (numbers, bytes), (settings, str | None)))
        crc = checksum(crc, numbers, settings)
        if claimed != crc:
            return f"step {step} is damaged"
        contents.rows.append(row)
    return None


def _typed(*pairs: tuple[Any, Any]) -> list[Any]:
    """The values, which in SQLite may be of any type, if they are of the types they should be."""
    for value, kind in pairs:
        if not isinstance(value, kind):
            raise TypeError(f"{type(value).__name__} where {kind} should be")
    return [value for value, _ in pairs]


def _complaint(sound: bool, otherwise: str) -> str | None:
    return None if sound else otherwise


def publish(new: Path, path: Path) -> None:
    """Gives a finished file its name, safely on the disk; a file that is there already stays."""
    with open(new, "rb+") as file:
        os.fsync(file.fileno())
    try:
        os.link(new, path)
        new.unlink()
    except FileExistsError:
        raise LedgerError(f"{path} is there already; choose another name or remove it") from None
    except OSError:  # a file system without links
        if path.exists():
            raise LedgerError(f"{path} is there already; choose another name or remove it") from None
        new.rename(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _errors(what: str) -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            raise LedgerError(f"{what}: another process is writing it; wait for that run to end or stop it") from error
        raise LedgerError(f"{what} ({error}). Nothing recorded is lost; see to the disk and try again") from error
    except sqlite3.DatabaseError as error:
        raise LedgerError(f"{what} ({error}): it is damaged or no ledger") from error
    except OSError as error:
        raise LedgerError(f"{what} ({error})") from error


def _identity(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return (-1, -1)
    return found.st_dev, found.st_ino


_writers: WeakValueDictionary[tuple[int, int], Store] = WeakValueDictionary()


def _disown() -> None:
    """In a forked child: to close the parent's connections, even by the garbage collector, would damage its files."""
    for store in _writers.values():
        store.inherited = True
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(store._connection))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown)
