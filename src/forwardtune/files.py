"""Files that exist whole or not at all, and locks that end with their process; JSON from anyone.

What is made is named by the `OSError` that says why it cannot be, which `translated` turns into an error of the
caller's own.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from forwardtune.errors import ForwardTuneError

Make = Callable[[Path], object]
"""Writes a file at the given path."""

DEEPEST = 30
"""How deeply the lists and tables of a file may be nested."""


def temporary(path: Path) -> Path:
    """Where a file is written before it gets its name: a hidden file of this process in the same folder."""
    return path.with_name(f".{path.name}.{os.getpid()}.new")


def give_usual_mode(*paths: Path) -> None:
    """Has the umask decide who may read files, as it does for others; safetensors makes its own for the owner alone."""
    for path in paths:
        probe = path.with_name(f"{temporary(path).name}.mode")
        probe.touch()
        mode = probe.stat().st_mode
        probe.unlink()
        if path.stat().st_mode != mode:
            path.chmod(mode)


def replace_file(path: Path, make: Make) -> None:
    """Makes a file, or replaces the one that exists, atomically."""
    new = temporary(path)
    try:
        with naming(path):
            make(new)
            give_usual_mode(new)
            sync_file(new)
        os.replace(new, path)
    finally:
        _discard(new)
    sync_folder(path.parent)


def create_file(path: Path, make: Make) -> None:
    """Makes a file atomically; one that already exists is left alone, and raises a `FileExistsError`."""
    new = temporary(path)
    try:
        with naming(path):
            make(new)
            give_usual_mode(new)
            sync_file(new)
        try:
            os.link(new, path)
        except OSError:
            if path.exists():
                raise FileExistsError(f"{path} already exists") from None
            new.rename(path)  # a file system without links
    finally:
        _discard(new)
    sync_folder(path.parent)


@contextmanager
def filled(folder: Path) -> Iterator[Path]:
    """A folder within this one, whose files are moved here at the end of the block; after an exception none is."""
    new = folder / ".new"
    shutil.rmtree(new, ignore_errors=True)  # of a process that was killed
    try:
        with naming(folder):
            new.mkdir(parents=True)
            yield new
            for file in new.rglob("*"):
                if file.is_file():
                    give_usual_mode(file)
                    sync_file(file)
        for file in new.iterdir():
            target = folder / file.name
            if target.is_dir():
                shutil.rmtree(target)
            os.replace(file, target)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    sync_folder(folder)


def _discard(new: Path) -> None:
    """Removes what may be there; where nothing can be written, the error under way says so."""
    with suppress(OSError):
        new.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Failures to write name what was to be made, not a part of it that will be gone; a full disk names nothing."""
    try:
        yield
    except OSError as error:
        named = error.filename
        if error.errno is None or (isinstance(named, str) and ".new" not in named):  # another file is missing
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_text(path: Path, text: str) -> None:
    replace_file(path, lambda new: new.write_text(text, "utf-8"))


def write_json(path: Path, content: dict[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def parse_json(text: str | bytes) -> Any:
    """What a text in JSON says; anything wrong with it is a `ValueError`."""
    try:
        content = json.loads(text, object_pairs_hook=_table)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    check_depth(content)
    return content


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        name = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"it has {name!r} twice in one object")
    return table


def check_depth(content: Any) -> None:
    """Refuses lists and tables that are nested more deeply than any of ours, by which recursive code might fail."""
    level = [content]
    for _ in range(DEEPEST):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise ValueError("it is nested too deeply")


def sync_file(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def lock(descriptor: int) -> bool:
    """Makes this process the only writer; false if another one is. The system releases the lock when the process ends.

    Raises an `ImportError` where the system has no such locks (Windows).
    """
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock; false where the system cannot tell."""
    with open(path, "rb") as file, suppress(ImportError, OSError):
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@contextmanager
def translated(error: type[ForwardTuneError], complaint: str) -> Iterator[None]:
    """Raises failures of the file system as errors of ours: the complaint, then the system's reason in brackets."""
    try:
        yield
    except (OSError, SafetensorError) as reason:
        raise error(f"{complaint} ({reason})") from reason
