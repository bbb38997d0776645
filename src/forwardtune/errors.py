"""Exceptions and warnings that say what went wrong and what to do about it."""

from __future__ import annotations

import sys
import warnings
from types import FrameType


class ForwardTuneError(Exception):
    """Base class of everything forwardtune raises on purpose."""


class InvalidArgumentError(ForwardTuneError, ValueError):
    """An argument makes no sense; the message names it and the remedy."""


class BackendError(ForwardTuneError, RuntimeError):
    """A noise backend that was asked for cannot run here."""


class NonFiniteLossError(ForwardTuneError, RuntimeError):
    """Too many steps in a row met a loss that is not a finite number."""


class LedgerError(ForwardTuneError, RuntimeError):
    """A ledger cannot be written, read or applied."""


class ExperimentError(ForwardTuneError, RuntimeError):
    """A comparison cannot be read, run or reported."""


INTERNAL = ("torch", "forwardtune", "transformers", "accelerate")


def warn(text: str) -> None:
    """A RuntimeWarning at the first frame outside this package and the loops that call it."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame and frame.f_globals.get("__name__", "").split(".")[0] in INTERNAL:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, RuntimeWarning, stacklevel=level)
