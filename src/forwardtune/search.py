"""Searches along a line: generators that yield offsets, are sent losses and return a decision (see `optimizer`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

from forwardtune.errors import InvalidArgumentError
from forwardtune.line import Offsets
from forwardtune.record import Decision, LineRecord, Review, StepRecord

Search = Generator[float, float, Decision]
Memory = dict[str, Any]
"""What a group's search remembers from step to step: plain, immutable values."""


class StepSearch:
    """The searches of one step: those of all groups, along one direction after the other.

    `start` and `memories` have one entry per group: a function that starts its search, and the memory it is given.
    """

    def __init__(self, start: Sequence[Callable[[Memory], Search]], memories: Sequence[Memory], reach: float) -> None:
        self._start, self.memories, self._reach = start, memories, reach
        self._lines: list[tuple[LineRecord, ...]] = []
        self._by_example = self._shared = False

    def run(self, query: Callable[[int, Offsets], float], directions: int) -> bool:
        """Searches until all directions are done or a number is unsound; returns whether all numbers were sound."""
        for direction in range(directions):
            searches = [start(memory) for start, memory in zip(self._start, self.memories, strict=True)]
            if not drive(searches, partial(query, direction), self._reach, self._lines):
                return False
        return True

    def run_shared(self, query: Callable[[Offsets], Sequence[float]]) -> bool:
        """Searches along a line that all examples share, by the mean of their losses; else as `run_together`."""
        self._by_example = self._shared = True
        probed: list[Sequence[float]] = []

        def mean(offsets: Offsets) -> float:
            losses = query(offsets)
            if probed and len(losses) != len(probed[0]):
                raise InvalidArgumentError(
                    f"the closure returned {len(probed[0])} losses and then {len(losses)} in the same step; it must "
                    "return one for each example of its batch"
                )
            probed.append(losses)
            return fmean(losses) if all(map(math.isfinite, losses)) else math.nan

        searches = [start(memory) for start, memory in zip(self._start, self.memories, strict=True)]
        sound = drive(searches, mean, self._reach, self._lines)
        (common,) = self._lines
        if not probed:  # beyond reach
            return sound
        self._lines = [tuple(replace(line, losses=own) for line in common) for own in zip(*probed, strict=True)]
        return sound

    def run_together(self, query: Callable[[Offsets], Sequence[float]]) -> bool:
        """Searches along as many directions as a query has losses, all at the same offsets.

        Returns whether all numbers were sound.
        """
        self._by_example = True
        searches = [start(memory) for start, memory in zip(self._start, self.memories, strict=True)]
        offsets, probed = tuple(next(search) for search in searches), []
        together: list[list[Search]] = []
        while _within(self._reach, offsets):
            losses = query(offsets)
            probed.append((offsets, losses))
            if not together:
                together = [self._begun(offsets) for _ in losses]
            if not all(map(math.isfinite, losses)):
                self._lines = _records(probed, [])
                return False
            answers = [[_send(search, loss) for search in own] for own, loss in zip(together, losses, strict=True)]
            if all(isinstance(answer, Decision) for own in answers for answer in own):
                self._lines = _records(probed, answers)
                return all(_within(self._reach, (decision.t for decision in own)) for own in answers)
            if any(own != answers[0] for own in answers):
                raise InvalidArgumentError(
                    "lines of their own are probed together, and this method probes where each line's slope leads it; "
                    "use another, or a number of directions"
                )
            offsets = tuple(answers[0])
        return False

    def run_again(self, record: StepRecord, directions: int | str) -> tuple[bool, list[float]]:
        """Searches with the losses of a record; returns whether all numbers were sound, and losses that were left."""
        if isinstance(directions, int):
            losses = [loss for groups in reversed(record.lines) for loss in reversed(groups[0].losses)]
            return self.run(lambda *_: losses.pop() if losses else math.nan, directions), losses
        by_probe = list(zip(*(groups[0].losses for groups in record.lines), strict=True))[::-1]
        nothing = [math.nan] * len(record.lines)
        search = self.run_shared if record.shared else self.run_together
        taken = search(lambda _: by_probe.pop() if by_probe else nothing)
        return taken, [loss for losses in by_probe for loss in losses]

    def _begun(self, offsets: Offsets) -> list[Search]:
        """The searches of one more line, all groups', after their first probe."""
        searches = [start(memory) for start, memory in zip(self._start, self.memories, strict=True)]
        if tuple(map(next, searches)) != offsets:
            raise InvalidArgumentError("the searches of all lines must probe at the same offsets")
        return searches

    def record(
        self, step: int, *, queries: int, taken: bool, raised: bool = False, review: Review | None = None
    ) -> StepRecord:
        return StepRecord.of(
            step,
            self._lines,
            queries=queries,
            taken=taken,
            raised=raised,
            review=review,
            by_example=self._by_example,
            shared=self._shared,
        )


def drive(
    searches: Sequence[Search],
    query: Callable[[Offsets], float],
    reach: float,
    lines: list[tuple[LineRecord, ...]],
) -> bool:
    """Runs the searches of all groups along one direction, probe by probe, as long as all numbers are sound.

    Returns whether all were: losses finite, and offsets within reach. What the searches did is added to `lines`, even
    if a query raises.
    """
    offsets = [tuple(next(search) for search in searches)]
    losses: list[float] = []
    decisions = [Decision(0.0)] * len(searches)
    try:
        while _within(reach, offsets[-1]):
            losses.append(math.nan)  # stays if the query raises
            losses[-1] = query(offsets[-1])
            if not math.isfinite(losses[-1]):
                return False
            answers = [_send(search, losses[-1]) for search in searches]
            ended = {isinstance(answer, Decision) for answer in answers}
            if ended == {True}:
                decisions = answers
                return _within(reach, (decision.t for decision in decisions))
            if True in ended:
                raise InvalidArgumentError("the searches of all groups must probe equally often")
            offsets.append(tuple(answers))
        return False
    finally:
        probed = zip(*offsets, strict=True)
        lines.append(tuple(LineRecord(o, tuple(losses), *d) for o, d in zip(probed, decisions, strict=True)))


def _records(
    probed: Sequence[tuple[Offsets, Sequence[float]]], decisions: Sequence[Sequence[Decision]]
) -> list[tuple[LineRecord, ...]]:
    """What the lines did that were searched together, in each group."""
    offsets = list(zip(*(offsets for offsets, _ in probed), strict=True))
    losses = list(zip(*(losses for _, losses in probed), strict=True))
    decisions = decisions or [[Decision(0.0)] * len(offsets)] * len(losses)
    return [
        tuple(LineRecord(at, own, *decision) for at, decision in zip(offsets, decided, strict=True))
        for own, decided in zip(losses, decisions, strict=True)
    ]


def _within(reach: float, offsets: Iterable[float]) -> bool:
    return all(abs(t) <= reach for t in offsets)


def _send(search: Search, loss: float) -> Any:
    """The search's next offset, or its decision."""
    try:
        return search.send(loss)
    except StopIteration as end:
        return end.value
