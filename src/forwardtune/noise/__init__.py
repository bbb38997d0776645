"""Noise as a pure function of (seed, step, direction, parameter, index)."""

from forwardtune.noise.distributions import DISTRIBUTIONS, NOISE_VERSION, Distribution
from forwardtune.noise.field import Field
from forwardtune.noise.mover import Mover
from forwardtune.noise.types import Slot, Term

__all__ = ["DISTRIBUTIONS", "NOISE_VERSION", "Distribution", "Field", "Mover", "Slot", "Term"]
