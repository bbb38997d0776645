"""Exceptions and warnings that say what went wrong and what to do about it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from types import FrameType

LONGEST = 2000
"""Characters of a message, most of which would be something in a file."""


def printable(text: str) -> str:
    """A text with a question mark for each character that a terminal might obey; see `docs/security.md`.

    >>> printable("a film\x1b[2J")
    'a film?[2J'
    """
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


class ForwardTuneError(Exception):
    """Base class of everything forwardtune raises on purpose.

    What a message quotes from a file is printable, and no longer than a message should be.
    """

    def __str__(self) -> str:
        text = printable(super().__str__())
        return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"


class InvalidArgumentError(ForwardTuneError, ValueError):
    """An argument is invalid; the message names it and the remedy."""


class NoOwnLinesError(InvalidArgumentError):
    """Examples cannot have lines of their own in this model: the `reason`, and what to do instead."""

    def __init__(self, reason: str) -> None:
        instead = "use common lines, or freeze such parameters"
        super().__init__(f"{reason}; {instead}")
        self.reason = reason


class BackendError(ForwardTuneError, RuntimeError):
    """The requested noise backend cannot run here."""


class NonFiniteLossError(ForwardTuneError, RuntimeError):
    """Too many consecutive steps met a loss that is not finite."""


class LedgerError(ForwardTuneError, RuntimeError):
    """A ledger cannot be written, read or applied."""


class ExperimentError(ForwardTuneError, RuntimeError):
    """A comparison cannot be read, run or reported."""


def is_lack_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: on a CPU torch says so in a plain `RuntimeError`, on a GPU by a class of its own."""
    text = str(error) if isinstance(error, RuntimeError) else ""
    return isinstance(error, MemoryError) or "can't allocate memory" in text or "out of memory" in text


INTERNAL = ("torch", "forwardtune", "transformers", "accelerate")
"""Packages that call each other on the user's behalf: a warning points past them."""


def warn(text: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warns at the first frame outside this package and the training loops that call it."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame and frame.f_globals.get("__name__", "").split(".")[0] in INTERNAL:
        frame, level = frame.f_back, level + 1
    warnings.warn(printable(text), category, stacklevel=level)


def warn_deprecated(old: str, new: str) -> None:
    """Warns that `old` works for one more release."""
    warn(f"{old} is deprecated and will be removed in the next release; use {new}", DeprecationWarning)


def deprecated_names(module: str, **renamed: type) -> Callable[[str], type]:
    """A `__getattr__` for a module whose classes were renamed: the old names give the new classes, with a warning."""

    def lookup(name: str) -> type:
        if name not in renamed:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_deprecated(f"{module}.{name}", f"{module}.{renamed[name].__name__}")
        return renamed[name]

    return lookup
