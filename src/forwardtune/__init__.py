"""Fine-tune deep models with forward passes only."""

from importlib.metadata import version

from forwardtune import theory
from forwardtune.errors import (
    BackendError,
    ExperimentError,
    ForwardTuneError,
    InvalidArgumentError,
    LedgerError,
    NonFiniteLossError,
)
from forwardtune.ledger import Ledger, replay, resume
from forwardtune.methods import S2P, STP, VS2P, MeZO
from forwardtune.noise import Field
from forwardtune.optimizer import LineSearch, Recorder, RunOptions
from forwardtune.record import Decision, LineRecord, StepRecord

__version__ = version("forwardtune")

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
