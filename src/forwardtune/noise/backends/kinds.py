"""The kinds of noise that kernels make. The sphere's is the normal one, which the mover scales."""

from __future__ import annotations

from forwardtune.noise.distributions import Distribution

RADEMACHER, UNIFORM, NORMAL = range(3)
KINDS: dict[Distribution, int] = {"rademacher": RADEMACHER, "uniform": UNIFORM, "normal": NORMAL, "sphere": NORMAL}
