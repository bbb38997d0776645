"""The losses that the searches of a step are sent: at a position of a common line, or of lines of examples' own."""

from __future__ import annotations

from statistics import fmean

from forwardtune.errors import NoOwnLinesError, warn
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

    If a `check` finds that examples could not have lines of their own, they are counted as one example in this step:
    from such a record `auto` takes that they share their lines for good.
    """

    def __init__(self, line: Line, check: Perturbation | None, objective: Objective) -> None:
        self._line, self._check, self._objective = line, check, objective
        self._is_one = False

    def __call__(self, offsets: Offsets) -> list[float]:
        position, check = {COMMON: offsets}, self._check
        if check:
            try:
                return self._line.at(position, lambda: own_losses(check, self._objective, (0.0,) * len(offsets)))
            except NoOwnLinesError as error:
                warn(f"{error.reason}; all examples share common lines")
                self._objective.discount()
                self._check, self._is_one = None, True
        losses = example_losses(self._line.at(position, self._objective.query))
        return [fmean(losses)] if self._is_one else losses
