"""The engine: a `torch.optim.Optimizer` around a search along random lines.

A method is a generator function, its search. It yields the offsets at which it wants the loss, is sent the losses, and
returns a decision, the offset to move to:

    def search(memory, *, lr, rho):
        gamma = ((yield +rho) - (yield -rho)) / (2 * rho)
        return Decision(-lr * gamma, gamma=gamma)

Each parameter group runs its own search with its own settings; all proceed in lockstep, so that every probe is one
query for all of them. The engine owns everything else: noise, moves, common random numbers, bad losses, state.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import Lock
from typing import Any

import torch
from typing_extensions import Unpack

from forwardtune.arguments import (
    PROBES,
    ROUNDINGS,
    Params,
    as_groups,
    check_choice,
    check_directions,
    check_integer,
    check_state_dict,
    count_elements,
    is_number,
    names_of,
    plain,
    tensors_of,
)
from forwardtune.auto import (
    after_review,
    after_step,
    is_damage,
    is_review_due,
    is_surveying,
    start,
    survey,
    trail_of,
    without_own_lines,
    without_trail,
)
from forwardtune.buffers import Modules
from forwardtune.errors import InvalidArgumentError, NoOwnLinesError, warn, warn_deprecated
from forwardtune.layers.layerwise import Layerwise
from forwardtune.layers.perturbation import Perturbation
from forwardtune.line import Line, Trail
from forwardtune.losses import SharedLosses, common_loss, own_losses
from forwardtune.noise import NOISE_VERSION, Field, Slot
from forwardtune.noise.field import check_tensor
from forwardtune.noise.mover import check_number
from forwardtune.objective import Closure, Objective
from forwardtune.record import Review, StepRecord
from forwardtune.run_options import Recorder, RunOptions
from forwardtune.run_state import OLDER_RUN, RunState
from forwardtune.scales import SCALES, Scale
from forwardtune.search import Memory, Search, StepSearch


class LineSearch(RunState):
    """Base class of all methods: a subclass defines `search` and passes its settings, with defaults, to `__init__`."""

    search: Callable[..., Search]
    usual_scale: Scale = "relative"
    last_step: StepRecord | None = None
    recorder: Recorder | None = None
    _is_auto = False
    _moving: list[tuple[int, int]] | None = None
    _layers: Layerwise | None = None
    _watched: tuple[Slot, ...] | None = None

    def __init__(self, params: Params, defaults: Mapping[str, Any], **run: Unpack[RunOptions]) -> None:
        unknown = run.keys() - RunOptions.__annotations__
        if unknown:
            known = ", ".join([*self._settings, *RunOptions.__annotations__])
            raise TypeError(
                f"{type(self).__name__} got an unexpected keyword argument {min(unknown)!r}; it takes {known}"
            )
        seed, directions = run.get("seed", 0), run.get("directions", 1)
        check_number("seed", seed)
        check_integer(1, max_nonfinite=run.get("max_nonfinite", 10))
        check_directions(directions, run.get("distribution", "rademacher"))
        self.backend = run.get("backend", "auto")
        self.max_nonfinite = run.get("max_nonfinite", 10)
        self.recorder = run.get("recorder")
        if self.recorder is not None and (isinstance(self.recorder, type) or not hasattr(self.recorder, "begin")):
            raise InvalidArgumentError(
                f"recorder must be a Recorder, for instance ft.Ledger('run.ledger', model), not {self.recorder!r}"
            )
        self._modules, self._stepping = Modules(), Lock()
        self._is_auto = is_auto = isinstance(defaults["lr"], str) and defaults["lr"] == "auto"
        if directions == "auto" and not is_auto:
            raise InvalidArgumentError(
                'directions="auto" needs lr="auto", which measures how examples agree; with an lr of your own use '
                'directions=1 or "per-example"'
            )
        scale = run.get("scale", self.usual_scale)
        probes, rounding = run.get("probes", "auto"), run.get("rounding", "stochastic")
        check_choice("scale", scale, SCALES)
        check_choice("probes", probes, PROBES)
        check_choice("rounding", rounding, ROUNDINGS)
        super().__init__(as_groups(params), {**defaults, "lr": 1.0 if is_auto else defaults["lr"], "memory": {}})
        # Replaced as a whole at every step, never modified in place, so that a `state_dict` is a snapshot.
        self._run = {
            "method": type(self).__name__,
            "noise": NOISE_VERSION,
            "seed": seed,
            "scale": scale,
            "distribution": run.get("distribution", "rademacher"),
            "directions": directions,
            "probes": probes,
            "rounding": rounding,
            "step": 0,
            "queries": 0,
            "nonfinite": 0,
            "plateaus": 0,
            "auto": start(directions) if is_auto else None,
        }
        if is_auto:
            self.settings_at(1.0, 1.0, self.defaults)  # refuses methods without a size to find
        if not self.field.dimension:  # making the field also checks distribution, backend and parameters
            raise InvalidArgumentError("the parameters have no elements; there is nothing to tune")

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._settings = tuple(inspect.getfullargspec(cls.search).kwonlyargs)

    def _settings_of(self, group: Mapping[str, Any], d: int) -> dict[str, Any]:
        """The keyword arguments of a group's search: its settings, and `d`, the dimension of the whole line."""
        known = {**group, "d": d}
        return {name: plain(known[name]) for name in self._settings}

    def settings_at(self, r: float, slope: float, settings: Mapping[str, Any]) -> dict[str, Any]:
        """A group's settings when steps are to probe and move about `r` far; its lr is then a factor.

        `slope` is the usual size of slopes at the start of the run. Methods that know ``lr="auto"`` override it.
        """
        raise InvalidArgumentError(f"{type(self).__name__} has no lr='auto'; give it a number")

    def check(self, group: Mapping[str, Any]) -> None:
        """Refuses invalid settings; subclasses add their own checks."""
        if not is_number(group["lr"]) or not 0 <= group["lr"] < math.inf:
            raise InvalidArgumentError(
                f"lr must be a number, zero or above and finite, not {group['lr']!r}; or leave it out"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "params" not in param_group:
            keys = ", ".join(param_group) or "nothing"
            raise InvalidArgumentError(f"a parameter group has no 'params', only {keys}; give it a list of parameters")
        if self._is_auto and "rho" in param_group:
            raise InvalidArgumentError("lr='auto' finds the distance of probes; leave rho out of the groups")
        if param_group.get("lr") == "auto":
            raise InvalidArgumentError(f"pass lr='auto' to {type(self).__name__}; the lr of a group is a number")
        misplaced = param_group.keys() & RunOptions.__annotations__.keys()
        if misplaced:
            raise InvalidArgumentError(
                f"{min(misplaced)!r} applies to the whole run; pass it to {type(self).__name__}, not to a group"
            )
        param_group = {**self.defaults, **param_group, **tensors_of(param_group["params"])}
        for name, param in zip(names_of(param_group), param_group["params"], strict=True):
            if param.requires_grad:
                check_tensor(param, name)
        self.check(param_group)
        for name in self._settings:
            if name in param_group and not (name == "lr" and isinstance(param_group["lr"], torch.Tensor)):
                param_group[name] = plain(param_group[name])
        if self.param_groups and "run" in self.param_groups[0]:
            param_group["run"] = self._run
        super().add_param_group(param_group)
        self._forget_trail()

    def _forget_trail(self) -> None:
        """Leaves earlier steps out of reviews, since they did not move what moves now."""
        if self.param_groups and self.param_groups[0].get("run", {}).get("auto"):
            self._run = {**self._run, "auto": without_trail(self._run["auto"])}

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Queries the closure a few times along a random line, moves, and returns the loss at the old weights.

        The closure computes the loss of one batch and returns it as a tensor or a number. It is called under
        `no_grad`, always with the same random numbers and buffers. The loss returned is the mean of the losses
        at the probes nearest to the old weights, in the closure's own type.
        """
        if not callable(closure):
            raise InvalidArgumentError(
                f"{type(self).__name__}.step needs a closure that returns the loss, for instance "
                "optimizer.step(lambda: loss_fn(model(x), y)); it is called several times, without a backward pass"
            )
        if not self._stepping.acquire(blocking=False):
            raise InvalidArgumentError(
                f"a step of this {type(self).__name__} is under way; do not call step inside a closure of the same "
                "optimizer, nor from two threads at once"
            )
        try:
            return self._step(closure)
        finally:
            self._stepping.release()

    def _step(self, closure: Closure) -> Any:
        for group in self.param_groups:
            self.check(group)
        self._measure_scales()
        field, recorder, step, queries = self.field, self.recorder, self.steps, self.queries
        field.refresh()
        moving = [(slot.parameter, slot.group) for slot in field.slots]
        if self._moving not in (None, moving):
            self._forget_trail()
        self._moving = moving
        check_number("step", step)
        self._run = {**self._run, "probes": self.probes}
        if recorder:
            recorder.begin(self)
        objective = Objective(closure, field, self._modules, by_example=self.by_example)
        trail = self._trail()
        line = Line(field, step, len(self.param_groups), trail, self._layerwise(field, objective))
        review, searches = None, self._searches(field, None)
        try:
            with line:
                if trail:
                    review = line.review(objective, partial(is_damage, self.auto or {}))
                    searches = self._searches(field, review)
                if isinstance(self.directions, int):
                    taken = searches.run(partial(common_loss, line, objective), self.directions)
                elif self.shares_lines:
                    is_new = self._is_surveying and self._watched is not field.slots
                    check = self._perturbation(field, step) if is_new else None
                    taken = searches.run_shared(SharedLosses(line, check, objective))
                    self._watched = field.slots if check else self._watched
                else:
                    try:
                        taken = searches.run_together(partial(own_losses, self._perturbation(field, step), objective))
                        self._watched = field.slots
                    except NoOwnLinesError as error:
                        if self.directions != "auto":
                            raise
                        warn(f"{error.reason}; all examples share common lines")
                        self._share_lines()
                        searches = self._searches(field, review)
                        taken = searches.run_shared(SharedLosses(line, None, objective))
                if not taken:
                    objective.rewind(generators=False)
                record = searches.record(step, queries=queries + objective.queries, taken=taken, review=review)
                line.settle(
                    record.destination(),
                    before=partial(self._tell, recorder, record),
                    after=partial(self._count, record, searches.memories),
                )
        except BaseException:
            if not line.settled:
                objective.rewind()
                used = queries + objective.queries
                if review is None and line.reviewing:
                    review = Review(len(trail), math.nan, math.nan)
                undone = searches.record(step, queries=used, taken=False, raised=True, review=review)
                self._count(undone)
                self._tell(recorder, undone)
            raise
        if not taken:
            self._complain(record)
        elif record.is_flat:
            self._advise()
        return objective.like_closure(record.loss)

    def fast_forward(self, record: StepRecord) -> None:
        """Takes up a step as if it had just made this record, without queries or moves.

        It is an error if the search decides otherwise than recorded.
        """
        if record.raised:
            self._count(record)
            return
        if self.by_example and record.shared and not self.shares_lines:
            self._share_lines()
        searches = self._searches(self.field, record.review)
        taken, losses = searches.run_again(record, self.directions)
        again = searches.record(record.step, queries=record.queries, taken=taken, review=record.review)
        reviewed = record.review.steps if record.review else 0
        if again.path() != record.path() or losses or record.step != self.steps or reviewed != len(self._trail()):
            raise InvalidArgumentError(
                f"step {record.step} was made by another {type(self).__name__}: from the same losses this one goes "
                f"to {again.path()}, and that one went to {record.path()}; make the optimizer with the run's settings"
            )
        self._count(again, searches.memories)

    def relive(self, record: StepRecord) -> None:
        """Deprecated: use `fast_forward`."""
        warn_deprecated("LineSearch.relive", "LineSearch.fast_forward")
        self.fast_forward(record)

    def _share_lines(self) -> None:
        """Examples turned out not to be able to have lines of their own."""
        self._run = {**self._run, "auto": without_own_lines(self._run["auto"])}

    def _trail(self) -> Trail:
        """The steps that the next one reviews, if a review is due."""
        if self.auto is None or not is_review_due(self.auto):
            return ()
        return trail_of(self.auto)

    def _layerwise(self, field: Field, objective: Objective) -> Layerwise | None:
        """What makes probes layer by layer, if that is asked for; it is kept as long as the same tensors move."""
        if self.probes != "layerwise":
            return None
        if self._layers is None or self._layers.slots is not field.slots:
            self._layers = Layerwise(field.mover)
        self._layers.repeated = objective.discount
        return self._layers

    def _perturbation(self, field: Field, step: int) -> Perturbation:
        """The layers of this step's probes; while surveying all examples see the same ones.

        Which layers use which parameters is watched in the first step of them.
        """
        names = {
            tensor.data_ptr(): name
            for group in self.param_groups
            for tensor, name in zip(group["params"], group.get("param_names", ()), strict=False)
        }
        return Perturbation(
            field.slots,
            [names.get(slot.tensor.data_ptr(), f"parameter {slot.parameter}") for slot in field.slots],
            partial(field.factors, step),
            shared=self._is_surveying,
            watch=self._watched is not field.slots,
        )

    def _searches(self, field: Field, review: Review | None) -> StepSearch:
        """The searches of a step after its review, with copies of the groups' memories."""
        settings = [self._settings_of(group, field.dimension) for group in self.param_groups]
        auto = self.auto and after_review(self.auto, review)
        return StepSearch(self._starts(auto, settings), [dict(g["memory"]) for g in self.param_groups], field.reach)

    def _starts(self, auto: Any, settings: Sequence[Mapping[str, Any]]) -> list[Callable[[Memory], Search]]:
        """What starts the search of each group, by its settings."""
        if auto is None:
            return [partial(self.search, **own) for own in settings]
        if is_surveying(auto):
            return [partial(survey, r=auto["r"])] * len(settings)
        return [partial(self.search, **self.settings_at(auto["r"], auto["slope"] or 1.0, own)) for own in settings]

    def _tell(self, recorder: Recorder | None, record: StepRecord) -> None:
        if recorder:
            recorder.record(self, record)

    def _count(self, record: StepRecord, memories: Sequence[Memory] | None = None) -> None:
        """Counts a step that is over and, if it was taken, keeps what the searches remember."""
        run = self._run
        nonfinite = run["nonfinite"] if record.raised else 0 if record.taken else run["nonfinite"] + 1
        plateaus = run["plateaus"] + record.is_flat
        counters = {"queries": record.queries, "nonfinite": nonfinite, "plateaus": plateaus}
        auto = run["auto"] and after_step(run["auto"], record)
        self._run = {**run, "step": record.step + 1, **counters, "auto": auto}
        if not record.raised:
            self.last_step = record
        if record.taken and memories:
            forget = auto and self.shares_lines != record.shared  # slopes of examples are not those of their mean
            for group, memory in zip(self.param_groups, memories, strict=True):
                group["memory"] = {} if forget else memory

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        for packed, group in zip(state["param_groups"], self.param_groups, strict=True):
            packed["elements"] = count_elements(group)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for group in check_state_dict(state_dict, self.param_groups, optional=OLDER_RUN.keys()):
            self.check(group)
        super().load_state_dict(state_dict)
        self._complete_run()
        self._field = None

    def __getstate__(self) -> dict[str, Any]:
        ours = ("backend", "max_nonfinite", "last_step", "_is_auto")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in ours}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.param_groups:
            self._complete_run()
        self._field = self._layers = self._watched = None
        self._modules, self._stepping = Modules(), Lock()
