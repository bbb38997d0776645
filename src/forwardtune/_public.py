"""The public names, nothing else; `forwardtune` has them."""

from importlib.metadata import version as _version

import forwardtune.theory as theory
from forwardtune.errors import (
    BackendError,
    ExperimentError,
    ForwardTuneError,
    InvalidArgumentError,
    LedgerError,
    NonFiniteLossError,
)
from forwardtune.heads import FittedHead, fit_head
from forwardtune.ledger import Ledger, replay, resume
from forwardtune.methods import S2P, STP, VS2P, MeZO
from forwardtune.noise import Field
from forwardtune.optimizer import LineSearch
from forwardtune.record import Decision, LineRecord, StepRecord
from forwardtune.run_options import Recorder, RunOptions
from forwardtune.wide import WideHead, widen_head

__version__ = _version("forwardtune")

__all__ = [
    "S2P",
    "STP",
    "VS2P",
    "BackendError",
    "Decision",
    "ExperimentError",
    "Field",
    "FittedHead",
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
    "WideHead",
    "fit_head",
    "replay",
    "resume",
    "theory",
    "widen_head",
]
