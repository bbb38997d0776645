"""What a description is known by: a hash that does not change when keys are added later."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

RULES = 1
"""Counts changes of the runner that give the same description another outcome."""


def brief(entry: Any, without: Collection[str] = ()) -> dict[str, Any]:
    """A table of the spec without what is at its default, so that a key which is new later changes no hash."""
    given = {field.name: getattr(entry, field.name) for field in fields(entry) if field.name not in without}
    defaults = {field.name: field.default for field in fields(entry)}
    told = {name: value for name, value in given.items() if value != defaults[name]}
    return {name: brief(value) if is_dataclass(value) else value for name, value in told.items()}


def fingerprint(description: object) -> str:
    text = json.dumps(description, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def file_digest(file: Path) -> str:
    """The SHA-256 of a file, computed anew if it has changed."""
    stat = file.stat()
    return _file_digest(file, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=32)
def _file_digest(file: Path, time: int, size: int) -> str:
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
