"""The ledger: a run is its scalars. Records, replays, resumes, exports and compares runs."""

from forwardtune.ledger.compare import Difference, diff
from forwardtune.ledger.export import export, read
from forwardtune.ledger.recorder import Ledger
from forwardtune.ledger.replay import replay
from forwardtune.ledger.resume import rejoin, resume
from forwardtune.ledger.run import Run
from forwardtune.ledger.stream import replay_file

__all__ = ["Difference", "Ledger", "Run", "diff", "export", "read", "rejoin", "replay", "replay_file", "resume"]
