"""Hashes that identify descriptions and files; that of a description stays the same when keys are added later."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

RULES = 2
"""Raised by every change that gives runs of the same description another outcome."""
FITS = 2
"""Raised by every change that gives fits of the same description another outcome."""


def brief(entry: Any, without: Collection[str] = ()) -> dict[str, Any]:
    """A table of the spec without values that are at their default, so that adding a key changes no hash."""
    given = {field.name: getattr(entry, field.name) for field in fields(entry) if field.name not in without}
    defaults = {field.name: field.default for field in fields(entry)}
    changed = {name: value for name, value in given.items() if value != defaults[name]}
    return {name: brief(value) if is_dataclass(value) else value for name, value in changed.items()}


def fingerprint(description: object) -> str:
    text = json.dumps(description, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def file_digest(file: Path) -> str:
    """The SHA-256 of a file, computed again if the file has changed."""
    stat = file.stat()
    return _file_digest(file, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=32)
def _file_digest(file: Path, time: int, size: int) -> str:
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
