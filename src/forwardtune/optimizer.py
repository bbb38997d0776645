"""The engine: a `torch.optim.Optimizer` around a search along random lines.

A method is a generator function, its search. It yields the offsets at which it wants the loss, is sent the losses, and
returns where it wants to stand:

    def search(memory, *, lr, rho):
        gamma = ((yield +rho) - (yield -rho)) / (2 * rho)
        return Stand(-lr * gamma, gamma=gamma)

Each parameter group runs a search of its own with its own settings; all walk in step, so that every probe is one
evaluation for all of them. The engine owns everything else: noise, moves, common random numbers, bad losses, state.
"""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import Unpack

from forwardtune.errors import InvalidArgumentError, NonFiniteLossError
from forwardtune.line import Line
from forwardtune.noise import NOISE_VERSION, Distribution, Field
from forwardtune.noise.field import check_number, check_tensor
from forwardtune.objective import Closure, Objective

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class Stand(NamedTuple):
    """Where a search wants to stand, and what it saw on the way."""

    t: float
    gamma: float | None = None
    sigma: float | None = None


Search = Generator[float, float, Stand]
Memory = dict[str, Any]
"""What a group's search remembers from step to step: plain, immutable values."""


class RunOptions(TypedDict, total=False):
    """Settings that every method shares; they hold for the whole run, not for a group."""

    seed: int
    distribution: Distribution
    directions: int
    backend: str
    max_nonfinite: int


@dataclass(frozen=True)
class LineRecord:
    """One search: the offsets it probed, the losses there, and its stand."""

    offsets: tuple[float, ...]
    losses: tuple[float, ...]
    t: float
    gamma: float | None = None
    sigma: float | None = None


@dataclass(frozen=True)
class StepRecord:
    """What happened in a step. `lines[j][g]` is direction j in group g; the short names are those of `lines[0][0]`."""

    step: int
    lines: tuple[tuple[LineRecord, ...], ...]
    loss: float
    queries: int
    taken: bool

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


class LineSearch(Optimizer):
    """Base of all methods: subclasses give `search` and, in their constructor, its settings with their defaults."""

    search: Callable[..., Search]
    _settings: tuple[str, ...]
    last_step: StepRecord | None = None
    _warned = False

    def __init__(self, params: Params, defaults: Mapping[str, Any], **run: Unpack[RunOptions]) -> None:
        unknown = run.keys() - RunOptions.__annotations__
        if unknown:
            raise TypeError(f"{type(self).__name__} got an unexpected keyword argument {min(unknown)!r}")
        seed, directions = run.get("seed", 0), run.get("directions", 1)
        check_number("seed", seed)
        check_number("direction", directions)
        check_positive(directions=directions, max_nonfinite=run.get("max_nonfinite", 10))
        self.backend = run.get("backend", "auto")
        self.max_nonfinite = run.get("max_nonfinite", 10)
        self._field: Field | None = None
        super().__init__(_as_groups(params), {**defaults, "memory": {}})
        # Replaced as a whole at every step and never changed in place, so that a `state_dict` is a snapshot.
        self._run = {
            "noise": NOISE_VERSION,
            "seed": seed,
            "distribution": run.get("distribution", "rademacher"),
            "directions": directions,
            "step": 0,
            "queries": 0,
            "nonfinite": 0,
        }
        self.field  # noqa: B018  (a bad distribution, backend or parameter is an error now, not at the first step)

    @property
    def _run(self) -> dict[str, Any]:
        run: dict[str, Any] = self.state["run"]  # type: ignore[index]
        return run

    @_run.setter
    def _run(self, value: dict[str, Any]) -> None:
        self.state["run"] = value  # type: ignore[index]

    @property
    def field(self) -> Field:
        """The noise over all parameters."""
        if self._field is None:
            self._field = Field(
                [group["params"] for group in self.param_groups],
                seed=self._run["seed"],
                distribution=self._run["distribution"],
                backend=self.backend,
            )
        return self._field

    @property
    def queries(self) -> int:
        """How often the closure has been evaluated in this run."""
        return int(self._run["queries"])

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._settings = tuple(inspect.getfullargspec(cls.search).kwonlyargs)

    def settings(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments of a group's search: its settings, and `d`, the dimension of the whole line."""
        known = {**group, "lr": float(group["lr"]), "d": self.field.dimension}
        return {name: known[name] for name in self._settings}

    def check(self, group: Mapping[str, Any]) -> None:
        """Refuses settings that make no sense; subclasses add their own."""
        if not 0 <= group["lr"] < math.inf:
            raise InvalidArgumentError(f"lr must be zero or above, and finite, not {group['lr']!r}")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        misplaced = param_group.keys() & RunOptions.__annotations__.keys()
        if misplaced:
            raise InvalidArgumentError(f"{min(misplaced)!r} holds for the whole run; pass it to {type(self).__name__}")
        param_group = {**self.defaults, **param_group, **_unnamed(param_group["params"])}
        for param in param_group["params"]:
            check_tensor(param)
        self.check(param_group)
        super().add_param_group(param_group)
        self._field = None

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Evaluates the closure a few times along a random line, moves, and returns the loss at the old weights.

        The closure computes the loss of one batch and returns it as a tensor or a number. It is called under
        `no_grad`, always with the same random numbers and buffers. The loss returned is the mean of those
        probed nearest to the old weights, in the closure's own type.
        """
        if closure is None:
            raise InvalidArgumentError(
                f"{type(self).__name__}.step needs a closure that returns the loss, for instance "
                "optimizer.step(lambda: loss_fn(model(x), y))"
            )
        self.field.refresh()
        run = self._run
        check_number("step", run["step"])
        objective = Objective(closure, {p.device for group in self.param_groups for p in group["params"]})
        memories = [dict(group["memory"]) for group in self.param_groups]
        lines: list[tuple[LineRecord, ...]] = []
        taken = True
        try:
            with Line(self.field, run["step"], len(self.param_groups)) as line:
                while taken and len(lines) < run["directions"]:
                    lines.append(self._walk(line, len(lines), objective, memories))
                    taken = all(math.isfinite(value) for record in lines[-1] for value in (*record.losses, record.t))
                shares = [[record.t / run["directions"] for record in records] for records in lines]
                line.goto(dict(enumerate(shares)) if taken else {})
        except BaseException:
            objective.rewind()
            self._run = _after(run, objective, nonfinite=run["nonfinite"])
            raise
        self._run = _after(run, objective, nonfinite=0 if taken else run["nonfinite"] + 1)
        loss = _loss_near_zero(lines) if taken else lines[-1][0].losses[-1]
        self.last_step = StepRecord(run["step"], tuple(lines), loss, self.queries, taken)
        if taken:
            for group, memory in zip(self.param_groups, memories, strict=True):
                group["memory"] = memory
        else:
            objective.rewind(generators=False)
            self._complain(self.last_step)
        return objective.like_closure(loss)

    def _walk(self, line: Line, direction: int, objective: Objective, memories: list[Memory]) -> tuple[LineRecord, ...]:
        """Runs all groups' searches along one direction, probe by probe, up to a loss that is not finite."""
        searches = [
            self.search(memory, **self.settings(group))
            for group, memory in zip(self.param_groups, memories, strict=True)
        ]
        offsets = [tuple(next(search) for search in searches)]
        losses: list[float] = []
        stands = [Stand(0.0)] * len(searches)
        while True:
            line.goto({direction: offsets[-1]})
            losses.append(objective())
            if not math.isfinite(losses[-1]):
                break
            answers = [_send(search, losses[-1]) for search in searches]
            if isinstance(answers[0], Stand):
                stands = answers
                break
            offsets.append(tuple(answers))
        probed = zip(*offsets, strict=True)
        return tuple(LineRecord(o, tuple(losses), *stand) for o, stand in zip(probed, stands, strict=True))

    def _complain(self, record: StepRecord) -> None:
        """A loss (or the step made of it) was not finite: warn once, give up after too many in a row."""
        seen = f"losses {record.lines[-1][0].losses} at step {record.step}"
        advice = "Try a smaller lr or rho, or look at the batch."
        if self._run["nonfinite"] >= self.max_nonfinite:
            raise NonFiniteLossError(
                f"{self.max_nonfinite} steps in a row met a loss that is not finite, the last with {seen}. "
                f"The weights are those of the last good step. {advice}"
            )
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{seen} are not finite. The step was not taken, nor will others like it be; "
                f"{self.max_nonfinite} in a row end the run. {advice}",
                RuntimeWarning,
                stacklevel=4,
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        run = state_dict.get("state", {}).get("run")
        if run is None:
            raise InvalidArgumentError(
                f"this is not the state of a forwardtune optimizer; make a new {type(self).__name__}"
            )
        if run["noise"] != NOISE_VERSION:
            raise InvalidArgumentError(
                f"this state was made with noise version {run['noise']}, and this forwardtune makes version "
                f"{NOISE_VERSION}: the run would go on with other directions; install the release it was made with"
            )
        super().load_state_dict(copy.deepcopy(state_dict))
        self._field = None

    def __getstate__(self) -> dict[str, Any]:
        ours = ("backend", "max_nonfinite", "last_step")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in ours}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._field = None

    def __repr__(self) -> str:
        run = self._run
        shown = {name: run[name] for name in ("seed", "distribution", "directions", "step", "queries")}
        lines = [f"{type(self).__name__} (", f"    backend: {self.field.backends}"]
        lines += [f"    {name}: {value}" for name, value in shown.items()]
        for number, group in enumerate(self.param_groups):
            lines.append(f"Parameter Group {number}: {sum(p.numel() for p in group['params']):,} elements")
            lines += [f"    {name}: {value}" for name, value in sorted(self.settings(group).items())]
        return "\n".join([*lines, ")"])


def check_positive(**settings: Any) -> None:
    """Refuses settings that are not finite numbers above zero."""
    for name, value in settings.items():
        if not 0 < value < math.inf:
            raise InvalidArgumentError(f"{name} must be above zero and finite, not {value!r}")


def _as_groups(params: Params) -> list[dict[str, Any]]:
    if isinstance(params, Tensor):
        raise InvalidArgumentError("pass a list of parameters, for instance model.parameters(), not a single tensor")
    items: list[Any] = list(params)
    if not items:
        raise InvalidArgumentError(
            "the list of parameters is empty; pass model.parameters(), and only once if it is a generator"
        )
    return items if isinstance(items[0], dict) else [{"params": items}]


def _unnamed(params: Any) -> dict[str, Any]:
    """A group's tensors, each once, and their names if they came with names."""
    items = [params] if isinstance(params, Tensor) else list(params)
    if not items:
        raise InvalidArgumentError("a parameter group is empty; give it parameters or leave it out")
    named = isinstance(items[0], tuple)
    pairs = items if named else [("", item) for item in items]
    for _, tensor in pairs:
        if not isinstance(tensor, Tensor):
            raise InvalidArgumentError(f"only tensors can be tuned, not {type(tensor).__name__}")
    first = {tensor: name for name, tensor in reversed(pairs)}
    tensors = list(dict.fromkeys(tensor for _, tensor in pairs))
    return {"params": tensors, "param_names": [first[tensor] for tensor in tensors]} if named else {"params": tensors}


def _after(run: Mapping[str, Any], objective: Objective, *, nonfinite: int) -> dict[str, Any]:
    """The run's counters after a step."""
    return {
        **run,
        "step": run["step"] + 1,
        "queries": run["queries"] + objective.queries,
        "nonfinite": nonfinite,
    }


def _send(search: Search, loss: float) -> Any:
    """The search's next offset, or its stand."""
    try:
        return search.send(loss)
    except StopIteration as end:
        return end.value


def _loss_near_zero(lines: Iterable[tuple[LineRecord, ...]]) -> float:
    """The mean of the losses that each direction saw nearest to the old weights."""
    near = []
    for first, *_ in lines:
        distance = min(abs(t) for t in first.offsets)
        near += [loss for t, loss in zip(first.offsets, first.losses, strict=True) if abs(t) == distance]
    return sum(near) / len(near)
