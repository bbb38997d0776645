"""What an optimizer knows of its run: options and counters that travel with the parameter groups, and the noise."""

from __future__ import annotations

import inspect
import math
from typing import Any

from torch.optim import Optimizer

from forwardtune.arguments import Directions, Probes, Rounding, count_elements, names_of
from forwardtune.auto import Auto, agreement, is_surveying, start
from forwardtune.errors import NonFiniteLossError, warn
from forwardtune.layers.layerwise import usual_probes
from forwardtune.noise import Distribution, Field, Slot
from forwardtune.noise.field import View
from forwardtune.record import StepRecord
from forwardtune.scales import Scale, relative_scales

OLDER_RUN = {"plateaus": 0, "scale": "absolute", "auto": None, "probes": "in-place", "rounding": "nearest"}
"""What states lack that were saved before it could be chosen or was counted."""


MANY_PLATEAUS = 20
"""This many steps without any difference in the loss are worth a warning, if they are most of the run."""


class RunState(Optimizer):
    """The part of every optimizer that is the same whatever its search."""

    backend: str
    max_nonfinite: int
    _settings: tuple[str, ...]
    _field: Field | None = None
    _warned = False
    _warned_of_plateaus = False

    @property
    def _run(self) -> dict[str, Any]:
        """The run's counters and options; every group holds them, since `state_dict` saves nothing but groups."""
        run: dict[str, Any] = self.param_groups[0]["run"]
        return run

    @_run.setter
    def _run(self, value: dict[str, Any]) -> None:
        for group in self.param_groups:
            group["run"] = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        # Without its wrapper, which would first import torch._dynamo: that takes nearly as long as torch itself.
        inspect.unwrap(Optimizer.add_param_group)(self, param_group)

    def _complete_run(self) -> None:
        """Adds what states lack that are from before it existed."""
        run = {**OLDER_RUN, **self._run}
        self._run = {**run, "auto": run["auto"] and {**start(), **run["auto"]}}

    @property
    def field(self) -> Field:
        """The noise over all parameters."""
        params = [group["params"] for group in self.param_groups]
        if self._field is None or not self._field.covers(params):
            scales = [group.get("scales") or [1.0] * len(group["params"]) for group in self.param_groups]
            self._field = Field(
                params,
                seed=self.seed,
                distribution=self.distribution,
                backend=self.backend,
                scales=scales,
                names=map(names_of, self.param_groups),
                products=self.by_example,
                stochastic=self.rounding == "stochastic",
            )
        return self._field

    def _measure_scales(self) -> None:
        """Gives groups that have not moved yet their scales."""
        if self.scale == "relative" and any(group.get("scales") is None for group in self.param_groups):
            self.field.refresh()  # notices memory that was taken away
            moving = [slot.tensor for slot in self.field.slots]
            scales = dict(zip(map(View.of, moving), relative_scales(moving), strict=True))
            for group in self.param_groups:
                if group.get("scales") is None:
                    group["scales"] = tuple(scales.get(View.of(tensor), 1.0) for tensor in group["params"])
            self._field = None

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The tensors that the latest step moved, each with its number and group."""
        return (self._field or self.field).slots

    @property
    def method(self) -> str:
        """The method's name, as a `state_dict` has it."""
        return str(self._run["method"])

    @property
    def seed(self) -> int:
        """The seed of the noise."""
        return int(self._run["seed"])

    @property
    def auto(self) -> Auto | None:
        """What is known of the size of steps, if it is found while training; see :mod:`forwardtune.auto`."""
        auto: Auto | None = self._run["auto"]
        return auto

    @property
    def agreement(self) -> float | None:
        """The mean cosine between the gradients of two examples, where lines may be their own and lr is auto."""
        return agreement(self.auto) if self.auto else None

    @property
    def scale(self) -> Scale:
        """The units of offsets."""
        scale: Scale = self._run["scale"]
        return scale

    @property
    def probes(self) -> Probes:
        """Whether all weights move to a probe, or those of a layer while it computes; settled by the first step."""
        probes: Probes = self._run["probes"]
        return usual_probes(self.field.slots) if probes == "auto" else probes

    @property
    def rounding(self) -> Rounding:
        """How sums of 16-bit weights are rounded."""
        rounding: Rounding = self._run["rounding"]
        return rounding

    @property
    def distribution(self) -> Distribution:
        """The distribution of the directions' elements."""
        distribution: Distribution = self._run["distribution"]
        return distribution

    @property
    def directions(self) -> Directions:
        """How many directions a step searches."""
        directions: Directions = self._run["directions"]
        return directions

    @property
    def by_example(self) -> bool:
        """Whether the closure returns a loss per example, each of which may have a line of its own."""
        return not isinstance(self.directions, int)

    @property
    def shares_lines(self) -> bool:
        """Whether examples that may have lines of their own share a common one in the next step."""
        return self.auto is not None and self.auto["shared"]

    @property
    def _is_surveying(self) -> bool:
        return self.auto is not None and is_surveying(self.auto)

    @property
    def steps(self) -> int:
        """Steps of this run so far, taken or not; also the number of the next step."""
        return int(self._run["step"])

    @property
    def queries(self) -> int:
        """Queries of this run so far: how often the closure was called."""
        return int(self._run["queries"])

    @property
    def nonfinite(self) -> int:
        """Consecutive steps, up to the latest, that were not taken because of a bad loss or offset."""
        return int(self._run["nonfinite"])

    @property
    def plateaus(self) -> int:
        """Steps of this run that saw the same loss at all their probes."""
        return int(self._run["plateaus"])

    def __repr__(self) -> str:
        run = self._run
        shown = {
            name: run[name] for name in ("seed", "scale", "distribution", "directions", "probes", "step", "queries")
        }
        lines = [f"{type(self).__name__} (", f"    backend: {self.field.backends}"]
        lines += [f"    {name}: {value}" for name, value in shown.items()]
        found = () if self.auto is None else ("lr", "rho")
        if self.auto:
            lines.append("    lr: auto, " + ("surveying" if self._is_surveying else f"probes at {self.auto['r']:.4g}"))
        for number, group in enumerate(self.param_groups):
            lines.append(f"Parameter Group {number}: {count_elements(group):,} elements")
            if found and group["lr"] != 1:
                lines.append(f"    lr: {group['lr']:g} times what is found")
            settings = {name: group[name] for name in self._settings if group.get(name) is not None}
            lines += [f"    {name}: {value}" for name, value in settings.items() if name not in found]
        return "\n".join([*lines, ")"])

    def _complain(self, record: StepRecord) -> None:
        """A step was not taken: warns once, and gives up after too many in a row."""
        firsts = [groups[0] for groups in record.lines]
        last = next((line for line in firsts if not all(map(math.isfinite, line.losses))), firsts[-1])
        what = (
            f"in step {record.step} a loss was not finite, or an offset was beyond {self.field.reach:.4g}, too far for "
            f"the weights to return exactly: losses {last.losses} at offsets {last.offsets}, decision t = {last.t}"
        )
        advice = "Check the batch." if self.auto else "Try a smaller lr or rho, or check the batch."
        if self.nonfinite >= self.max_nonfinite:
            raise NonFiniteLossError(
                f"{self.max_nonfinite} steps in a row were not taken; {what}. "
                f"The weights are those after the last good step. {advice}"
            )
        if not self._warned:
            self._warned = True
            warn(
                f"Step not taken: {what}. This warning is not repeated; {self.max_nonfinite} in a row end the run. "
                f"{advice}"
            )

    def _advise(self) -> None:
        """Warns once if most steps see no difference in the loss at all."""
        if self.plateaus >= MANY_PLATEAUS and 2 * self.plateaus > self.steps and not self._warned_of_plateaus:
            self._warned_of_plateaus = True
            warn(
                f"{self.plateaus} of {self.steps} steps saw the same loss at all their probes: the objective is flat "
                f"at this distance. Make the batch larger, {'' if self.auto else 'probe further away (a larger rho), '}"
                "or minimize a loss that changes with every weight, such as the cross-entropy. This warning is not "
                "repeated; `plateaus` keeps counting."
            )
