"""How the noise is defined: which word of the Philox stream an element reads, and the float it becomes.

Everything here is defined by integer operations and by float32 additions, multiplications and square roots, each
rounded on its own, so every backend gives the same floats; `reference.py` spells it out and the other backends are
compared with it bit for bit. Any change to the numbers in this file is a new `NOISE_VERSION`: a run is replayed with
the version it was made with.

Words come in tiles of 256: 64 counters side by side, four words each, word `w` of lane `l` at `64*w + l`.

- rademacher: +-1, one bit per element, 32 elements per word.
- uniform on [-sqrt(3), sqrt(3)]: the 65,536 midpoints of equal cells, half a word per element, read as a signed number.
- normal, by the Box-Muller transform: a word gives elements `e` and `e + 256` of its 512. The radius `sqrt(-2 ln u)`
  takes `u` from the upper 31 bits, so it is at most 6.55; the angle takes a sign for each of the two from the two
  lowest bits and one of 16,384 midpoints of a quarter turn from the next fourteen. Logarithm, sine and cosine are
  polynomials with a relative error below 1.5e-6.
- sphere: the normal vector of the whole model scaled to the length sqrt(d). Its squared length is summed in fixed
  point, so that it does not depend on the order of summation.

Sums of 16-bit weights may be rounded stochastically: up in magnitude with a probability equal to the part of a unit in
the last place that is lost, so that small steps add up. The bits that decide, half a word per element as for the
uniform noise, are those of another stream, whose seed differs in its highest bit. Where a sum is undone the complement
of these bits decides, which restores the old weight unless the sum had crossed a power of two.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

Distribution = Literal["rademacher", "normal", "uniform", "sphere"]
DISTRIBUTIONS: tuple[Distribution, ...] = get_args(Distribution)

NOISE_VERSION = 1

ROUNDING_SEED = 1 << 63
"""What tells the seed of the bits that decide how sums are rounded from that of the noise."""

LANES = 64
TILE_WORDS = 4 * LANES
BLOCK = 2 * TILE_WORDS
"""Elements in a tile for all distributions but rademacher, whose tile has 32 elements per word."""
RADEMACHER_TILE = 32 * TILE_WORDS

# A lattice of n midpoints on [-1, 1] has variance (1 - 1/n^2)/3; this scale makes it exactly one.
UNIFORM_SCALE = math.sqrt(3 / (1 - 2.0**-32)) * 2.0**-16

LN2 = math.log(2)
SQRT_HALF_BITS = 0x3F3504F3
"""The bits of sqrt(1/2) as float32: mantissas are taken from [sqrt(1/2), sqrt(2))."""
# log(1 + f)/f for 1 + f in [sqrt(1/2), sqrt(2)), lowest power first
LOG = (
    1.0000009536743164,
    -0.5000114440917969,
    0.33314675092697144,
    -0.24908289313316345,
    0.20491759479045868,
    -0.1868075132369995,
    0.11931054294109344,
)
# sin(x pi/2)/x and cos(x pi/2)/(1 - x^2) in powers of x^2, for x in [0, 1]
SIN = (1.5707951784133911, -0.6459258198738098, 0.07950032502412796, -0.004370800219476223)
COS = (0.9999998211860657, -0.23369461297988892, 0.019939105957746506, -0.0008463341509923339)

FIXED_POINT = 2.0**16
"""A squared normal is below 43, so a block's sum with 16 fractional bits fits an int32."""
EXACT_LENGTH_BELOW = 4096
"""Directions of fewer elements, where that rounding would be noticeable, have their length summed exactly."""


def sphere_scale(d: int, squared_length: float) -> float:
    """The factor that scales a normal vector of `d` elements to the length sqrt(d)."""
    return math.sqrt(d / squared_length) if squared_length else 0.0
