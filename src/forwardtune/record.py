"""What a search answers, and what is known of a step afterwards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Decision(NamedTuple):
    """Where a search wants to stand, and what it saw on the way."""

    t: float
    gamma: float | None = None
    sigma: float | None = None


@dataclass(frozen=True)
class LineRecord:
    """One search: the offsets it probed, the losses there, and its stand."""

    offsets: tuple[float, ...]
    losses: tuple[float, ...]
    t: float
    gamma: float | None = None
    sigma: float | None = None

    def is_sound(self, reach: float) -> bool:
        """Whether the search came to its end, with losses that are finite and a stand within reach."""
        ended = len(self.losses) == len(self.offsets)
        return ended and all(map(math.isfinite, self.losses)) and abs(self.t) <= reach


@dataclass(frozen=True)
class StepRecord:
    """What happened in a step. `lines[j][g]` is direction j in group g; the short names are those of `lines[0][0]`.

    The weights went to every probe that has a loss (not a number, if the closure raised there), then to their stand.

    step: its number, from 0.
    loss: the mean of the losses probed nearest to the old weights; the last one seen, if the step was not taken.
    queries: evaluations in this run so far.
    taken: whether the step was made; it is not if a loss was not finite or an offset was too far away.
    raised: whether it was not because the closure, or what recorded the step, raised an exception.
    offsets, losses: where the loss was probed along the line, and what it was there.
    gamma, sigma: the slope measured and the spread of recent ones, for methods that have them.
    t: the offset at which the search wanted to stand (of n directions, each moves by t/n).
    """

    step: int
    lines: tuple[tuple[LineRecord, ...], ...]
    loss: float
    queries: int
    taken: bool
    raised: bool = False

    @classmethod
    def of(
        cls, step: int, lines: Sequence[tuple[LineRecord, ...]], *, queries: int, taken: bool, raised: bool = False
    ) -> StepRecord:
        loss = _loss_near_zero(lines) if taken else _last_loss(lines)
        return cls(step, tuple(lines), loss, queries, taken, raised)

    @property
    def is_flat(self) -> bool:
        """Whether every probe saw the same loss, so that no direction can be told from its opposite."""
        losses = [loss for groups in self.lines for loss in groups[0].losses]
        return self.taken and len(losses) > 1 and len(set(losses)) == 1

    def destination(self) -> dict[int, tuple[float, ...]]:
        """Where the weights stand after the step: along each direction, one offset for each group."""
        if not self.taken:
            return {}
        return {j: tuple(line.t / len(self.lines) for line in groups) for j, groups in enumerate(self.lines)}

    def path(self) -> list[dict[int, tuple[float, ...]]]:
        """All places the weights went to, the last being their stand."""
        probes = [
            {j: tuple(line.offsets[i] for line in groups)}
            for j, groups in enumerate(self.lines)
            for i in range(len(groups[0].losses))
        ]
        return [*probes, self.destination()]

    def __str__(self) -> str:
        seen = {"gamma": self.gamma, "sigma": self.sigma, "t": self.t}
        shown = [f"{name} {value:.4g}" for name, value in seen.items() if value is not None]
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
    """The mean of the losses that each direction saw nearest to the old weights."""
    near = []
    for groups in lines:
        distances = [max(map(abs, offsets)) for offsets in zip(*(record.offsets for record in groups), strict=True)]
        least = min(distances)
        near += [loss for loss, distance in zip(groups[0].losses, distances, strict=True) if distance == least]
    return sum(near) / len(near)


def _last_loss(lines: Sequence[tuple[LineRecord, ...]]) -> float:
    losses = [loss for groups in lines for loss in groups[0].losses]
    return losses[-1] if losses else math.nan
