"""Noise as a pure function of (seed, step, direction, parameter, index)."""

from forwardtune.noise.backends.interface import Term
from forwardtune.noise.distributions import DISTRIBUTIONS, NOISE_VERSION, Distribution
from forwardtune.noise.field import Field

__all__ = ["DISTRIBUTIONS", "NOISE_VERSION", "Distribution", "Field", "Term"]
