"""Fine-tune deep models with forward passes only."""

from importlib.metadata import version

from forwardtune import theory
from forwardtune.errors import BackendError, ForwardTuneError, InvalidArgumentError, NonFiniteLossError
from forwardtune.methods import S2P, STP, VS2P, MeZO
from forwardtune.noise import Field
from forwardtune.optimizer import LineSearch, RunOptions
from forwardtune.record import LineRecord, Stand, StepRecord

__version__ = version("forwardtune")

__all__ = [
    "S2P",
    "STP",
    "VS2P",
    "BackendError",
    "Field",
    "ForwardTuneError",
    "InvalidArgumentError",
    "LineRecord",
    "LineSearch",
    "MeZO",
    "NonFiniteLossError",
    "RunOptions",
    "Stand",
    "StepRecord",
    "theory",
]
