"""Files that are there whole or not at all, and errors that name them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forwardtune.errors import LedgerError


def publish(new: Path, path: Path) -> None:
    """Gives a finished file its name, safely on the disk; a file that is there already stays."""
    sync_file(new)
    taken = f"{path} is there already; choose another name or remove it"
    try:
        os.link(new, path)
        new.unlink()
    except FileExistsError:
        raise LedgerError(taken) from None
    except OSError:  # a file system without links
        if path.exists():
            raise LedgerError(taken) from None
        new.rename(path)
    sync_folder(path.parent)


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


@contextmanager
def errors(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LedgerError(f"{what} ({error})") from error
