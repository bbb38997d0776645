"""Exceptions that say what went wrong and what to do about it."""


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
