"""The ledger: a run is its scalars. Records, reads, replays, resumes, exports and compares runs."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from forwardtune.errors import deprecated_names as _deprecated_names
from forwardtune.ledger.diff import Difference, diff
from forwardtune.ledger.export import export
from forwardtune.ledger.reader import RecordedRun, read
from forwardtune.ledger.recorder import Ledger
from forwardtune.ledger.replay import replay
from forwardtune.ledger.resume import rejoin, resume
from forwardtune.ledger.stream import replay_file

__all__ = ["Difference", "Ledger", "RecordedRun", "diff", "export", "read", "rejoin", "replay", "replay_file", "resume"]

if _TYPE_CHECKING:
    Run = RecordedRun
else:
    __getattr__ = _deprecated_names(__name__, Run=RecordedRun)
