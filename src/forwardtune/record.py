"""What a search decides, and what is known of a step afterwards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from forwardtune.errors import deprecated_names, warn_deprecated
from forwardtune.noise.types import COMMON


class Decision(NamedTuple):
    """What a search returns: the offset it moves to, the slope it measured and the spread of recent slopes."""

    t: float
    gamma: float | None = None
    sigma: float | None = None


class Review(NamedTuple):
    """What a step found out about the `steps` before it, on its own batch: the losses where they began, and where they
    would have led had they been twice as long. `back`: the weights went back to where they began, and stay there."""

    steps: int
    before: float
    beyond: float
    back: bool = False


@dataclass(frozen=True)
class LineRecord:
    """One search: the offsets it probed, the losses there, and its decision."""

    offsets: tuple[float, ...]
    losses: tuple[float, ...]
    t: float
    gamma: float | None = None
    sigma: float | None = None

    def is_sound(self, reach: float) -> bool:
        """Deprecated: whether the search ended, with finite losses and a decision within reach."""
        warn_deprecated("LineRecord.is_sound", "StepRecord.taken")
        ended = len(self.losses) == len(self.offsets)
        return ended and all(map(math.isfinite, self.losses)) and abs(self.t) <= reach


@dataclass(frozen=True)
class StepRecord:
    """What happened in a step. `lines[j][g]` is direction j in group g; the short names are those of `lines[0][0]`.

    The weights went to every probe that has a loss (NaN if the closure raised there), then to their destination.

    step: its number, counted from 0.
    loss: the mean of the losses at the probes nearest to the old weights; if the step was not taken, the last loss.
    queries: queries in this run so far.
    taken: whether the weights moved; they do not if a loss is not finite or an offset is too large.
    raised: whether the step was not taken because the closure or the recorder raised an exception.
    offsets, losses: the offsets that were probed, and the losses there.
    gamma, sigma: the slope measured and the spread of recent slopes, for methods that have them.
    t: the offset that the search moves to (of n directions, each moves by t/n).
    review: of the steps before it, if it made one.
    by_example: whether each line is that of an example; then the weights did not go to the probes, and of n lines each
        moves by t/sqrt(n).
    shared: whether the examples shared a common line; then `lines` has the losses of each along it, with one decision
        for all, and the weights went to the probes and move by t.
    """

    step: int
    lines: tuple[tuple[LineRecord, ...], ...]
    loss: float
    queries: int
    taken: bool
    raised: bool = False
    review: Review | None = None
    by_example: bool = False
    shared: bool = False

    @classmethod
    def of(
        cls,
        step: int,
        lines: Sequence[tuple[LineRecord, ...]],
        *,
        queries: int,
        taken: bool,
        raised: bool = False,
        review: Review | None = None,
        by_example: bool = False,
        shared: bool = False,
    ) -> StepRecord:
        loss = _loss_near_zero(lines) if taken else [math.nan, *_seen(lines, shared)][-1]
        return cls(step, tuple(lines), loss, queries, taken, raised, review, by_example, shared)

    @property
    def is_flat(self) -> bool:
        """Whether the loss was the same at every probe, so that no direction can be told from its opposite."""
        losses = _seen(self.lines, self.shared)
        return self.taken and len(losses) > 1 and len(set(losses)) == 1

    def destination(self) -> dict[int, tuple[float, ...]]:
        """The position of the weights after the step: for each direction, one offset per group."""
        if not self.taken:
            return {}
        if self.shared:
            return {COMMON: tuple(line.t for line in self.lines[0])}
        n = math.sqrt(len(self.lines)) if self.by_example else len(self.lines)
        return {j: tuple(line.t / n for line in groups) for j, groups in enumerate(self.lines)}

    def stand(self) -> dict[int, tuple[float, ...]]:
        """Deprecated: use `destination`."""
        warn_deprecated("StepRecord.stand", "StepRecord.destination")
        return self.destination()

    def path(self) -> list[dict[int, tuple[float, ...]]]:
        """All positions the weights took: the probes, then the destination."""
        if self.by_example and not self.shared:
            return [self.destination()]
        searched = [(COMMON, self.lines[0])] if self.shared and self.lines else enumerate(self.lines)
        probes = [
            {j: tuple(line.offsets[i] for line in groups)}
            for j, groups in searched
            for i in range(len(groups[0].losses))
        ]
        return [*probes, self.destination()]

    def __str__(self) -> str:
        numbers = {"gamma": self.gamma, "sigma": self.sigma, "t": self.t}
        shown = [f"{name} {value:.4g}" for name, value in numbers.items() if value is not None]
        taken = "" if self.taken else ", not taken"
        return f"step {self.step}: loss {self.loss:.6g}, {', '.join(shown)}, {self.queries} queries{taken}"

    @property
    def offsets(self) -> tuple[float, ...]:
        return self.lines[0][0].offsets

    @property
    def losses(self) -> tuple[float, ...]:
        return self.lines[0][0].losses

    @property
    def gamma(self) -> float | None:
        return self.lines[0][0].gamma

    @property
    def sigma(self) -> float | None:
        return self.lines[0][0].sigma

    @property
    def t(self) -> float:
        return self.lines[0][0].t


def _loss_near_zero(lines: Sequence[tuple[LineRecord, ...]]) -> float:
    """The mean of the losses at each direction's probes nearest to the old weights."""
    near = []
    for groups in lines:
        distances = [max(map(abs, offsets)) for offsets in zip(*(record.offsets for record in groups), strict=True)]
        nearest = min(distances)
        near += [loss for loss, distance in zip(groups[0].losses, distances, strict=True) if distance == nearest]
    return sum(near) / len(near)


def _seen(lines: Sequence[tuple[LineRecord, ...]], shared: bool) -> list[float]:
    """The losses that searches were sent; along a shared line these are means over examples."""
    losses = [groups[0].losses for groups in lines]
    if shared:
        return [sum(probe) / len(probe) for probe in zip(*losses, strict=True)]
    return [loss for line in losses for loss in line]


if TYPE_CHECKING:
    Stand = Decision
else:
    __getattr__ = deprecated_names(__name__, Stand=Decision)
