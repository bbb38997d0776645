"""The ledger: a run is its scalars. Records, reads, replays, resumes, exports and compares runs."""

from forwardtune.errors import deprecated_names
from forwardtune.ledger.diff import Difference, diff
from forwardtune.ledger.export import export
from forwardtune.ledger.reader import RecordedRun, read
from forwardtune.ledger.recorder import Ledger
from forwardtune.ledger.replay import replay
from forwardtune.ledger.resume import rejoin, resume
from forwardtune.ledger.stream import replay_file

__all__ = ["Difference", "Ledger", "RecordedRun", "diff", "export", "read", "rejoin", "replay", "replay_file", "resume"]

__getattr__ = deprecated_names(__name__, Run=RecordedRun)
