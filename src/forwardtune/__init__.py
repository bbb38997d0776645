"""Fine-tune deep models with forward passes only."""

from importlib.metadata import version as _version
from typing import TYPE_CHECKING as _TYPE_CHECKING

from forwardtune import theory
from forwardtune.errors import (
    BackendError,
    ExperimentError,
    ForwardTuneError,
    InvalidArgumentError,
    LedgerError,
    NonFiniteLossError,
)
from forwardtune.errors import deprecated_names as _deprecated_names
from forwardtune.ledger import Ledger, replay, resume
from forwardtune.methods import S2P, STP, VS2P, MeZO
from forwardtune.noise import Field
from forwardtune.optimizer import LineSearch, Recorder, RunOptions
from forwardtune.record import Decision, LineRecord, StepRecord

__version__ = _version("forwardtune")

__all__ = [
    "S2P",
    "STP",
    "VS2P",
    "BackendError",
    "Decision",
    "ExperimentError",
    "Field",
    "ForwardTuneError",
    "InvalidArgumentError",
    "Ledger",
    "LedgerError",
    "LineRecord",
    "LineSearch",
    "MeZO",
    "NonFiniteLossError",
    "Recorder",
    "RunOptions",
    "StepRecord",
    "replay",
    "resume",
    "theory",
]

if _TYPE_CHECKING:
    Stand = Decision
else:
    __getattr__ = _deprecated_names(__name__, Stand=Decision)
