"""What can be chosen for a whole run, whatever its method."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypedDict

from forwardtune.arguments import Directions, Probes, Rounding
from forwardtune.noise import Distribution
from forwardtune.record import StepRecord
from forwardtune.scales import Scale

if TYPE_CHECKING:
    from forwardtune.optimizer import LineSearch


class Recorder(Protocol):
    """Is told of every step of one optimizer, as :class:`forwardtune.Ledger` is."""

    def begin(self, optimizer: LineSearch) -> None:
        """A step begins: nothing has been queried and the weights have not moved."""

    def record(self, optimizer: LineSearch, record: StepRecord) -> None:
        """The step's queries are done; after this call the weights move to their destination.

        If this raises an exception, or if the closure did, the step is undone and recorded (again) as one that
        `raised`; that call must not raise.
        """


class RunOptions(TypedDict, total=False):
    """Keyword arguments that every method takes; they apply to the whole run, not to a group.

    seed: seeds the noise; an integer below 2^64 (default 0).
    scale: the units of offsets, ``"absolute"`` or ``"relative"`` to the size of each tensor's weights at the start of
        the run (default); see :mod:`forwardtune.scales`. The paper's units are absolute, and so are published rates.
    distribution: of the directions' elements, ``"rademacher"`` (default, the fastest), ``"normal"``, ``"uniform"`` or
        ``"sphere"``; all have ``E norm(s)^2 = d``.
    directions: how many independent directions a step searches from the same point; their moves are averaged and the
        queries per step multiply (default 1). With ``"per-example"`` each example of the batch is searched along a line
        of its own, all in the same queries; the closure then returns one loss per example. With ``"auto"``, for
        ``lr="auto"``, they share a line until it is known that lines of their own are worth it. See `docs/lines.md`.
    probes: ``"in-place"``, where all weights move to a probe, one pass each, and return but for the last bit; or
        ``"layerwise"``, where those of a layer move only while it computes and return bit for bit, at the cost of two
        more passes and a copy of the largest layer. ``"auto"`` (default): layer by layer if any weights have 16 bits.
    rounding: of sums of 16-bit weights, ``"stochastic"`` (default), by which small steps add up, or ``"nearest"``. See
        `docs/precision.md`.
    backend: what moves the weights, ``"auto"`` (default), ``"numba"`` (CPU), ``"triton"`` (CUDA) or ``"reference"``
        (any device, slow). All give the same bits. A backend requested by name that cannot run is an error.
    max_nonfinite: the run ends with an error after this many consecutive steps that were not taken because a loss was
        not finite or an offset too large (default 10).
    recorder: is told of every step before the weights move for good, for instance a :class:`forwardtune.Ledger`; copies
        of the optimizer, and unpickled ones, have none (default None).
    """

    seed: int
    scale: Scale
    distribution: Distribution
    directions: Directions
    probes: Probes
    rounding: Rounding
    backend: str
    max_nonfinite: int
    recorder: Recorder | None
