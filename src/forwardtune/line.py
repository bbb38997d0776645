"""The line: the position of the weights along the step's random directions, and how they move.

The weights are `x + sum_j t_j * s_j`, with one offset `t_j` per direction and parameter group. A move from one position
to another is one pass over the weights that takes each of them back to `x` and forth to its new value while it is in a
register. Floating-point sums are rounded, but subtracting what was added restores `x` bit for bit, unless the sum had
crossed a power of two or was a tie; then it may be off by one unit in the last place. The path is fully described by
its offsets and gives the same bits every time.

Where probes are made layer by layer, the weights are at a probe only while their layer computes, and the only moves for
good are those to the destination and, of a retreat, back along the trail.
"""

from __future__ import annotations

import _signal  # below `signal`, without its conversions to enums, which would dominate a small model's step
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

from forwardtune.layers.layerwise import Layerwise
from forwardtune.noise import Field, Term
from forwardtune.record import Review

T = TypeVar("T")

HELD = tuple(int(getattr(signal, name)) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))

Offsets = tuple[float, ...]
"""One offset per parameter group."""
Position = Mapping[int, Offsets]
"""The offsets of the weights along each direction; along directions that are not named they are zero."""


Trail = Sequence[tuple[int, Position]]
"""The latest steps, in order, each with the position it moved to."""
StepMove = tuple[int, Sequence[Term]]
"""The terms of one pass along directions of a step."""
REVIEWED_AT = (0.0, 2.0)
"""Where a trail is reviewed: at its start, and twice as far as it led."""
ENDS = {False: 1.0, True: 0.0}
"""Where a review ends: where the trail led or, if the weights go back, at its start."""


class Line:
    """The weights of a field during one step. An exception puts them back, unless they have settled.

    With `layers` probes are made layer by layer.
    """

    def __init__(
        self, field: Field, step: int, groups: int, trail: Trail = (), layers: Layerwise | None = None
    ) -> None:
        self.field, self._step, self._trail, self._layers = field, step, trail, layers
        self._along, self.reviewing = 1.0, False
        self.settled = False
        self._zero = (0.0,) * groups
        self._position: Position = {}
        self._interrupts = _Interrupts()

    def __enter__(self) -> Line:
        self._interrupts.take_over()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is not None and not self.settled:
                self.goto({})
        finally:
            self.field.touch()
            self._interrupts.give_back()
            self._interrupts.release()

    def at(self, position: Position, query: Callable[[], T]) -> T:
        """What a query returns at a position."""
        if self._layers:
            return self._aside([(self._step, terms_between({}, position, self._zero)[0])], query)
        self.goto(position)
        return query()

    def _at_part(self, part: float, query: Callable[[], T]) -> T:
        """What a query returns where the steps of the trail would have led had they been `part` times as long."""
        if self._layers:
            self.reviewing = True
            return self._aside(list(moves_along(self._trail, 1.0, part, self._zero)), query)
        self.goto_along(part)
        return query()

    def _aside(self, moves: Sequence[StepMove], query: Callable[[], T]) -> T:
        assert self._layers
        self._layers.holding = self._interrupts.held
        try:
            result: T = self._layers.query(moves, query)
        finally:
            self._layers.restore()  # if a signal came before weights were put back
        return result

    def goto(self, target: Position) -> None:
        """Moves the weights to a position."""
        self._interrupts.hold = True
        try:
            self._move(target)
        finally:
            self._interrupts.release()

    def goto_along(self, part: float) -> None:
        """Moves the weights to where they would be had the steps of the trail been `part` times as long."""
        self._interrupts.hold = True
        try:
            moves = list(moves_along(self._trail, self._along, part, self._zero))
            self.reviewing = True
            if moves:
                self.field.mover.chain(moves)
            self._along = part
        finally:
            self._interrupts.release()

    def review(self, query: Callable[[], float], is_damage: Callable[[float, float], bool]) -> Review:
        """Queries the loss at the start of the trail and twice as far as it led, where the weights then are again.

        If the losses show damage they stay at its start. Otherwise they always take the same path, even if a query
        raises, so that a review is described by its trail and its outcome.
        """
        losses: list[float] = []
        left, back = list(REVIEWED_AT), False
        try:
            while left:
                losses.append(self._at_part(left[0], query))
                left.pop(0)
            back = is_damage(*losses)
        finally:
            if self.reviewing:
                for part in (*(() if self._layers else left), ENDS[back]):
                    self.goto_along(part)
        before, beyond = losses
        return Review(len(self._trail), before, beyond, back)

    def settle(self, target: Position, before: Callable[[], None], after: Callable[[], None]) -> None:
        """Moves the weights for good: nothing interrupts the step from the call of `before` until the line is left.

        If `before` raises, nothing moves.
        """
        self._interrupts.hold = True
        before()
        self._move(target)
        after()
        self.settled = True

    def _move(self, target: Position) -> None:
        terms, position = terms_between(self._position, target, self._zero)
        if terms:
            self.field.mover.move(self._step, terms)
        self._position = position


def terms_between(here: Position, there: Position, zero: Offsets) -> tuple[list[Term], Position]:
    """The terms that lead from one position to another, and the latter with its directions in that order."""
    order = [*reversed(list(here)), *(direction for direction in there if direction not in here)]  # last in, first out
    terms = []
    for direction in order:
        back, forth = here.get(direction, zero), there.get(direction, zero)
        if back != forth:
            terms.append(Term(direction, back, forth))
    return terms, {direction: there[direction] for direction in order if direction in there}


def moves_along(trail: Trail, here: float, there: float, zero: Offsets) -> Iterator[StepMove]:
    """The moves back from one multiple of a trail to its start, last in first out, and forth to another."""
    if here == there:
        return
    for step, position in reversed(trail):
        yield step, terms_between(_times(here, position), {}, zero)[0]
    for step, position in trail:
        yield step, terms_between({}, _times(there, position), zero)[0]


def _times(factor: float, position: Position) -> Position:
    return {direction: tuple(factor * t for t in offsets) for direction, offsets in position.items()}


class _Interrupts:
    """Holds back Ctrl-C, SIGTERM and SIGHUP while the weights move, so that no move is ever left half done."""

    def __init__(self) -> None:
        self.hold = False
        self._held: list[tuple[int, Any]] = []
        self._handlers: dict[int, Any] = {}

    def take_over(self) -> None:
        if threading.current_thread() is threading.main_thread():  # the only one where Python runs signal handlers
            for number in HELD:
                handler = _signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    _signal.signal(number, self._handle)

    def _handle(self, number: int, frame: Any) -> None:
        if self.hold:
            self._held.append((number, frame))
        else:
            self._handlers[number](number, frame)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Holds signals back until the end of the block, or further if they were held before."""
        before, self.hold = self.hold, True
        try:
            yield
        finally:
            if not before:
                self.release()

    def release(self) -> None:
        self.hold = False
        while self._held:
            self._handle(*self._held.pop(0))

    def give_back(self) -> None:
        for number, handler in self._handlers.items():
            if _signal.getsignal(number) == self._handle:
                _signal.signal(number, handler)
