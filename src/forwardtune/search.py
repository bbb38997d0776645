"""Searches along a line: generators that yield offsets, are sent losses and return a stand (see `optimizer`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from typing import Any

from forwardtune.errors import InvalidArgumentError
from forwardtune.record import Decision, LineRecord

Search = Generator[float, float, Decision]
Memory = dict[str, Any]
"""What a group's search remembers from step to step: plain, immutable values."""


def walk(
    searches: Sequence[Search],
    evaluate: Callable[[tuple[float, ...]], float],
    reach: float,
    lines: list[tuple[LineRecord, ...]],
) -> None:
    """Runs the searches of all groups along one direction, probe by probe, as long as all numbers are sound.

    What they did is added to `lines`, also when an evaluation raises.
    """
    offsets = [tuple(next(search) for search in searches)]
    losses: list[float] = []
    stands = [Decision(0.0)] * len(searches)
    try:
        while all(abs(t) <= reach for t in offsets[-1]):
            losses.append(math.nan)  # what stays if the evaluation raises
            losses[-1] = evaluate(offsets[-1])
            if not math.isfinite(losses[-1]):
                break
            answers = [_send(search, losses[-1]) for search in searches]
            ended = {isinstance(answer, Decision) for answer in answers}
            if ended == {True}:
                stands = answers
                break
            if True in ended:
                raise InvalidArgumentError("the searches of all groups must probe equally often")
            offsets.append(tuple(answers))
    finally:
        probed = zip(*offsets, strict=True)
        lines.append(tuple(LineRecord(o, tuple(losses), *stand) for o, stand in zip(probed, stands, strict=True)))


def _send(search: Search, loss: float) -> Any:
    """The search's next offset, or its stand."""
    try:
        return search.send(loss)
    except StopIteration as end:
        return end.value
