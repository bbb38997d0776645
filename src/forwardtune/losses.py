"""The losses that the searches of a step are sent: at a position of a common line, or of lines of examples' own."""

from __future__ import annotations

from forwardtune.errors import NoOwnLinesError
from forwardtune.layers.perturbation import Perturbation, example_losses
from forwardtune.line import Line, Offsets
from forwardtune.noise.types import COMMON
from forwardtune.objective import Objective


def common_loss(line: Line, objective: Objective, direction: int, offsets: Offsets) -> float:
    """The loss at one position."""
    return line.at({direction: offsets}, objective)


def own_losses(perturbation: Perturbation, objective: Objective, offsets: Offsets) -> list[float]:
    """The losses of all examples, each at the offset along its own line."""
    with perturbation.at(offsets):
        losses = objective.query()
    return example_losses(losses, perturbation.examples)


class SharedLosses:
    """The losses of all examples at positions of the common line.

    A `check` tells whether there is one loss for each example, as far as the layers show how many there are.
    """

    def __init__(self, line: Line, check: Perturbation | None, objective: Objective) -> None:
        self._line, self._check, self._objective = line, check, objective

    def __call__(self, offsets: Offsets) -> list[float]:
        position, check = {COMMON: offsets}, self._check
        if check:
            try:
                return self._line.at(position, lambda: own_losses(check, self._objective, (0.0,) * len(offsets)))
            except NoOwnLinesError:  # which matters only if lines of their own are to be tried
                self._check = None
        return example_losses(self._line.at(position, self._objective.query))
