"""The engine: a `torch.optim.Optimizer` around a search along random lines.

A method is a generator function, its search. It yields the offsets at which it wants the loss, is sent the losses, and
returns where it wants to stand:

    def search(memory, *, lr, rho):
        gamma = ((yield +rho) - (yield -rho)) / (2 * rho)
        return Decision(-lr * gamma, gamma=gamma)

Each parameter group runs a search of its own with its own settings; all walk in step, so that every probe is one
evaluation for all of them. The engine owns everything else: noise, moves, common random numbers, bad losses, state.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, TypedDict

import torch
from torch.optim import Optimizer
from typing_extensions import Unpack

from forwardtune.arguments import Params, as_groups, check_integer, is_number, plain, tensors_of
from forwardtune.buffers import Modules
from forwardtune.errors import InvalidArgumentError, NonFiniteLossError, warn
from forwardtune.line import Line, Offsets
from forwardtune.noise import NOISE_VERSION, Distribution, Field, Slot
from forwardtune.noise.field import check_tensor
from forwardtune.noise.mover import check_number
from forwardtune.objective import Closure, Objective
from forwardtune.record import LineRecord, StepRecord
from forwardtune.search import Memory, Search, walk

MANY_PLATEAUS = 20
"""So many steps without any difference in the loss are worth a warning, if they are most of the run."""


class Recorder(Protocol):
    """Is told of every step of one optimizer, as :class:`forwardtune.Ledger` is."""

    def begin(self, optimizer: LineSearch) -> None:
        """A step begins: nothing has been evaluated and the weights have not moved."""

    def record(self, optimizer: LineSearch, record: StepRecord) -> None:
        """The step's probes are done, and after this call the weights go to where they will stand.

        If this raises an exception, or if the closure did, the step is undone and recorded (again) as one that
        `raised`; that call must not raise.
        """


class RunOptions(TypedDict, total=False):
    """Keyword arguments that every method takes; they hold for the whole run, not for a group.

    seed: the noise is a function of it; an integer below 2^64 (default 0).
    distribution: of the directions' elements, ``"rademacher"`` (default, the fastest), ``"normal"``, ``"uniform"`` or
        ``"sphere"``; all have ``E norm(s)^2 = d``.
    directions: how many independent directions a step searches from the same point; their moves are averaged and the
        evaluations multiply (default 1).
    backend: what moves the weights, ``"auto"`` (default), ``"numba"`` (CPU), ``"triton"`` (CUDA) or ``"reference"``
        (any device, slow). All give the same bits. One asked for by name that cannot run is an error.
    max_nonfinite: after so many steps in a row with a loss that is not finite the run ends with an error (default 10).
    recorder: is told of every step before the weights move for good, for instance a :class:`forwardtune.Ledger`; a copy
        of the optimizer, or one unpickled, has none (default None).
    """

    seed: int
    distribution: Distribution
    directions: int
    backend: str
    max_nonfinite: int
    recorder: Recorder | None


class LineSearch(Optimizer):
    """Base of all methods: subclasses give `search` and, in their constructor, its settings with their defaults."""

    search: Callable[..., Search]
    _settings: tuple[str, ...]
    last_step: StepRecord | None = None
    recorder: Recorder | None = None
    _warned = False
    _warned_of_plateaus = False

    def __init__(self, params: Params, defaults: Mapping[str, Any], **run: Unpack[RunOptions]) -> None:
        unknown = run.keys() - RunOptions.__annotations__
        if unknown:
            known = ", ".join([*self._settings, *RunOptions.__annotations__])
            raise TypeError(
                f"{type(self).__name__} got an unexpected keyword argument {min(unknown)!r}; it takes {known}"
            )
        seed, directions = run.get("seed", 0), run.get("directions", 1)
        check_number("seed", seed)
        check_integer(1, directions=directions, max_nonfinite=run.get("max_nonfinite", 10))
        check_number("direction", directions - 1)
        self.backend = run.get("backend", "auto")
        self.max_nonfinite = run.get("max_nonfinite", 10)
        self.recorder = run.get("recorder")
        if self.recorder is not None and (isinstance(self.recorder, type) or not hasattr(self.recorder, "begin")):
            raise InvalidArgumentError(
                f"recorder must be a Recorder, for instance ft.Ledger('run.ledger', model), not {self.recorder!r}"
            )
        self._field: Field | None = None
        self._modules = Modules()
        super().__init__(as_groups(params), {**defaults, "memory": {}})
        # Replaced as a whole at every step and never changed in place, so that a `state_dict` is a snapshot.
        self._run = {
            "method": type(self).__name__,
            "noise": NOISE_VERSION,
            "seed": seed,
            "distribution": run.get("distribution", "rademacher"),
            "directions": directions,
            "step": 0,
            "queries": 0,
            "nonfinite": 0,
            "plateaus": 0,
        }
        if not self.field.dimension:  # also: a bad distribution, backend or parameter is an error now, not later
            raise InvalidArgumentError("the parameters have no elements; there is nothing to tune")

    @property
    def _run(self) -> dict[str, Any]:
        """The run's counters and options; every group holds them, so that they travel with the groups."""
        run: dict[str, Any] = self.param_groups[0]["run"]
        return run

    @_run.setter
    def _run(self, value: dict[str, Any]) -> None:
        for group in self.param_groups:
            group["run"] = value

    @property
    def field(self) -> Field:
        """The noise over all parameters."""
        params = [group["params"] for group in self.param_groups]
        if self._field is None or not self._field.covers(params):
            self._field = Field(
                params,
                seed=self._run["seed"],
                distribution=self._run["distribution"],
                backend=self.backend,
            )
        return self._field

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The tensors that the latest step moved, each with its number and group."""
        return (self._field or self.field).slots

    @property
    def queries(self) -> int:
        """How often the closure has been evaluated in this run."""
        return int(self._run["queries"])

    @property
    def plateaus(self) -> int:
        """How many steps of this run saw the same loss at all their probes."""
        return int(self._run["plateaus"])

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._settings = tuple(inspect.getfullargspec(cls.search).kwonlyargs)

    def _settings_of(self, group: Mapping[str, Any], d: int) -> dict[str, Any]:
        """The keyword arguments of a group's search: its settings, and `d`, the dimension of the whole line."""
        known = {**group, "d": d}
        return {name: plain(known[name]) for name in self._settings}

    def check(self, group: Mapping[str, Any]) -> None:
        """Refuses settings that make no sense; subclasses add their own."""
        if not is_number(group["lr"]) or not 0 <= group["lr"] < math.inf:
            raise InvalidArgumentError(f"lr must be a number, zero or above and finite, not {group['lr']!r}")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "params" not in param_group:
            raise InvalidArgumentError(f"a parameter group has no 'params', only {', '.join(param_group) or 'nothing'}")
        misplaced = param_group.keys() & RunOptions.__annotations__.keys()
        if misplaced:
            raise InvalidArgumentError(f"{min(misplaced)!r} holds for the whole run; pass it to {type(self).__name__}")
        param_group = {**self.defaults, **param_group, **tensors_of(param_group["params"])}
        names = param_group.get(
            "param_names", [f"parameter {i} of its group" for i in range(len(param_group["params"]))]
        )
        for name, param in zip(names, param_group["params"], strict=True):
            check_tensor(param, name)
        self.check(param_group)
        for name in self._settings:
            if name in param_group and not (name == "lr" and isinstance(param_group["lr"], torch.Tensor)):
                param_group[name] = plain(param_group[name])
        if self.param_groups and "run" in self.param_groups[0]:
            param_group["run"] = self._run
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Evaluates the closure a few times along a random line, moves, and returns the loss at the old weights.

        The closure computes the loss of one batch and returns it as a tensor or a number. It is called under
        `no_grad`, always with the same random numbers and buffers. The loss returned is the mean of those
        probed nearest to the old weights, in the closure's own type.
        """
        if not callable(closure):
            raise InvalidArgumentError(
                f"{type(self).__name__}.step needs a closure that returns the loss, for instance "
                "optimizer.step(lambda: loss_fn(model(x), y)); it is evaluated several times, without a backward pass"
            )
        for group in self.param_groups:
            self.check(group)
        field, run, recorder = self.field, self._run, self.recorder
        field.refresh()
        check_number("step", run["step"])
        if recorder:
            recorder.begin(self)
        objective = Objective(closure, field, self._modules)
        memories = [dict(group["memory"]) for group in self.param_groups]
        lines: list[tuple[LineRecord, ...]] = []

        def probe(direction: int, offsets: Offsets) -> float:
            line.goto({direction: offsets})
            return objective()

        def record(*, taken: bool, raised: bool = False) -> StepRecord:
            queries = run["queries"] + objective.queries
            return StepRecord.of(run["step"], lines, queries=queries, taken=taken, raised=raised)

        def tell() -> None:
            if recorder:
                recorder.record(self, done)

        line = Line(field, run["step"], len(self.param_groups))
        try:
            with line:
                taken = self._explore(probe, memories, lines, field)
                if not taken:
                    objective.rewind(generators=False)
                done = record(taken=taken)
                line.settle(done.destination(), before=tell, after=lambda: self._count(done, memories))
        except BaseException:
            if not line.settled:
                objective.rewind()
                undone = record(taken=False, raised=True)
                self._count(undone)
                if recorder:
                    recorder.record(self, undone)
            raise
        if not taken:
            self._complain(done)
        elif done.is_flat:
            self._advise()
        return objective.like_closure(done.loss)

    def fast_forward(self, record: StepRecord) -> None:
        """Goes on as `step` did when it made this record, but evaluates nothing and moves nothing.

        A search that would answer otherwise than recorded is an error.
        """
        memories = [dict(group["memory"]) for group in self.param_groups]
        lines: list[tuple[LineRecord, ...]] = []
        again = record
        if not record.raised:
            losses = [loss for groups in reversed(record.lines) for loss in reversed(groups[0].losses)]
            taken = self._explore(lambda *_: losses.pop() if losses else math.nan, memories, lines, self.field)
            again = StepRecord.of(record.step, lines, queries=record.queries, taken=taken)
            if again.path() != record.path() or losses or record.step != self._run["step"]:
                raise InvalidArgumentError(
                    f"step {record.step} was made by another {type(self).__name__}: from the same losses this one goes "
                    f"to {again.path()}, and that one went to {record.path()}"
                )
        self._count(again, memories)

    def _explore(
        self,
        evaluate: Callable[[int, Offsets], float],
        memories: list[Memory],
        lines: list[tuple[LineRecord, ...]],
        field: Field,
    ) -> bool:
        """Searches along all directions, adding to `lines`; whether all numbers were sound."""
        for direction in range(self._run["directions"]):
            searches = [
                self.search(memory, **self._settings_of(group, field.dimension))
                for group, memory in zip(self.param_groups, memories, strict=True)
            ]
            walk(searches, partial(evaluate, direction), field.reach, lines)
            if not all(record.is_sound(field.reach) for record in lines[-1]):
                return False
        return True

    def _count(self, record: StepRecord, memories: list[Memory] | None = None) -> None:
        """A step is over."""
        run = self._run
        nonfinite = run["nonfinite"] if record.raised else 0 if record.taken else run["nonfinite"] + 1
        plateaus = run["plateaus"] + record.is_flat
        counters = {"queries": record.queries, "nonfinite": nonfinite, "plateaus": plateaus}
        self._run = {**run, "step": record.step + 1, **counters}
        if not record.raised:
            self.last_step = record
        if record.taken and memories:
            for group, memory in zip(self.param_groups, memories, strict=True):
                group["memory"] = memory

    def _complain(self, record: StepRecord) -> None:
        """A step was not taken: warn once, give up after too many in a row."""
        last = record.lines[-1][0]
        what = (
            f"a loss was not finite or an offset beyond {self.field.reach:.4g}, from where rounding lets no weight "
            f"find back: losses {last.losses} at offsets {last.offsets}, t {last.t}, step {record.step}"
        )
        advice = "Try a smaller lr or rho, or look at the batch."
        if self._run["nonfinite"] >= self.max_nonfinite:
            raise NonFiniteLossError(
                f"{self.max_nonfinite} steps in a row were not taken; {what}. "
                f"The weights are those after the last good step. {advice}"
            )
        if not self._warned:
            self._warned = True
            warn(
                f"Step not taken; {what}. This is the only warning; {self.max_nonfinite} in a row end the run. {advice}"
            )

    def _advise(self) -> None:
        """Warns once where most steps see no difference at all."""
        flat, steps = self.plateaus, self._run["step"]
        if flat >= MANY_PLATEAUS and 2 * flat > steps and not self._warned_of_plateaus:
            self._warned_of_plateaus = True
            warn(
                f"{flat} of {steps} steps saw the same loss at all their probes: the objective is flat at this "
                "distance. Probe further away (rho, or the lr of STP), make the batch larger, or tune by a loss that "
                "changes with every weight, such as the cross entropy. This is the only warning; `plateaus` counts on."
            )

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        for packed, group in zip(state["param_groups"], self.param_groups, strict=True):
            packed["elements"] = _elements(group)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = state_dict.get("param_groups", []) if isinstance(state_dict, dict) else []
        run = groups[0].get("run") if groups else None
        if not isinstance(run, dict) or not self._run.keys() - {"plateaus"} <= run.keys():
            raise InvalidArgumentError(f"this is not the state_dict of a {type(self).__name__} made by forwardtune")
        if run["method"] != type(self).__name__:
            raise InvalidArgumentError(
                f"this is the state of a {run['method']}; a {type(self).__name__} cannot go on from it"
            )
        if run["noise"] != NOISE_VERSION:
            raise InvalidArgumentError(
                f"this state was made with noise version {run['noise']}, and this forwardtune makes version "
                f"{NOISE_VERSION}: the run would go on with other directions; install the release it was made with"
            )
        ours, theirs = ([_elements(group) for group in part] for part in (self.param_groups, groups))
        if ours != theirs:
            raise InvalidArgumentError(
                f"this state is of a run over groups of {theirs} weights, not {ours}; "
                "give the optimizer the same parameters in the same order"
            )
        for group in groups:
            self.check(group)
        super().load_state_dict(state_dict)
        self._run = {"plateaus": 0, **self._run}  # states of older releases have no count

    def __getstate__(self) -> dict[str, Any]:
        ours = ("backend", "max_nonfinite", "last_step")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in ours}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._field = None
        self._modules = Modules()

    def __repr__(self) -> str:
        run = self._run
        shown = {name: run[name] for name in ("seed", "distribution", "directions", "step", "queries")}
        lines = [f"{type(self).__name__} (", f"    backend: {self.field.backends}"]
        lines += [f"    {name}: {value}" for name, value in shown.items()]
        for number, group in enumerate(self.param_groups):
            lines.append(f"Parameter Group {number}: {_elements(group):,} elements")
            settings = {name: group[name] for name in self._settings if group.get(name) is not None}
            lines += [f"    {name}: {value}" for name, value in settings.items()]
        return "\n".join([*lines, ")"])


def _elements(group: Mapping[str, Any]) -> int:
    """How many elements a group's parameters have, or had when its state was saved."""
    params = group["params"]
    if all(isinstance(p, torch.Tensor) for p in params):
        return sum(p.numel() for p in params)
    return int(group.get("elements", -1))
