"""Noise as a pure function of (seed, step, direction, parameter, index)."""

from forwardtune.noise.backends.interface import Slot, Term
from forwardtune.noise.distributions import DISTRIBUTIONS, NOISE_VERSION, Distribution
from forwardtune.noise.field import Field
from forwardtune.noise.walker import Walker

__all__ = ["DISTRIBUTIONS", "NOISE_VERSION", "Distribution", "Field", "Slot", "Term", "Walker"]
