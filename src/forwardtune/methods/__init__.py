"""The methods, one file each: a search in the paper's symbols and the optimizer around it."""

from forwardtune.methods.mezo import MeZO
from forwardtune.methods.s2p import S2P
from forwardtune.methods.stp import STP
from forwardtune.methods.vs2p import VS2P
from forwardtune.optimizer import LineSearch

__all__ = ["S2P", "STP", "VS2P", "MeZO"]

METHODS: dict[str, type[LineSearch]] = {"S2P": S2P, "STP": STP, "VS2P": VS2P, "MeZO": MeZO}
