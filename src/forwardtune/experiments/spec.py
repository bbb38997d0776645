"""What is compared: a frozen description, read from a TOML file.

A spec names workloads (data, network and base weights, or a function that gives them), methods with their grids of
rates, seeds, and one budget in queries that is the same for all methods. `docs/experiments.md` explains every key.
"""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import torch

from forwardtune.arguments import Params, probe_distance
from forwardtune.auto import REVIEW_QUERIES, SURVEY_QUERIES
from forwardtune.errors import ExperimentError, ForwardTuneError
from forwardtune.experiments.result import Rate
from forwardtune.files import check_depth
from forwardtune.methods import METHODS
from forwardtune.optimizer import LineSearch
from forwardtune.tasks import IMAGES, TEXTS, ImageWorkload, OwnWorkload, TextWorkload, Workload, kind_of
from forwardtune.tasks.texts.workload import PACKED
from forwardtune.toml_tables import build, is_name, one_of, value

E = TypeVar("E")

LEAST_AUTO = 60
"""Queries below which a rate cannot be found."""
DECAYS = ("cosine", "linear", "none")
ADAMW = "AdamW"
BACKPROPAGATION = 3
"""Queries that a step by backpropagation is counted as: a forward pass, and a backward one that costs twice as much."""
ADAPTER_INSTEAD = 'backpropagation cannot tune packed weights; set an adapter ("lora"), or leave AdamW out'


@dataclass(frozen=True)
class Method:
    """A method, its rates and its settings; `label` tells variants of one method apart."""

    label: str
    method: str
    lr: tuple[Rate, ...]
    settings: Mapping[str, Any] = field(hash=False)

    def __post_init__(self) -> None:
        is_name("label", self.label)
        if not self.is_auto and (len(set(self.lr)) < len(self.lr) or min(self.grid) <= 0):
            raise ExperimentError(f"lr must list different rates above zero, not {list(self.lr)}")

    @property
    def is_auto(self) -> bool:
        """Whether it finds its rate while training."""
        return self.lr == ("auto",)

    @property
    def scale(self) -> str:
        """The units of its steps."""
        return str(self.settings.get("scale", METHODS[self.method].usual_scale))

    @property
    def grid(self) -> tuple[float, ...]:
        """Its rates, if it has any."""
        return tuple(lr for lr in self.lr if not isinstance(lr, str))

    def optimizer(self, params: Params, lr: Rate, **run: Any) -> LineSearch:
        kind: Callable[..., LineSearch] = METHODS[self.method]
        return kind(params, lr=lr, **self.settings, **run)

    @cached_property
    def queries_per_step(self) -> int:
        """Counted in a step along one line of one weight; every direction has a line.

        With a rate that is found while training some steps use a few more. Settings that are not valid raise an error.
        """
        self.optimizer([torch.zeros(1)], "auto" if self.is_auto else 1e-3)
        with torch.random.fork_rng(devices=[]):
            layer, calls = torch.nn.Linear(1, 1, bias=False), count(1.0)
        own_lines = self.settings["directions"] == "per-example"
        method = self if own_lines else replace(self, settings={**self.settings, "directions": 1})
        optimizer = method.optimizer(layer.parameters(), 1e-3, backend="reference")
        optimizer.step(lambda: layer(torch.zeros(1, 1))[0].detach() + next(calls))
        return optimizer.queries * self._directions

    @property
    def most_queries(self) -> int:
        """Of any of its steps."""
        if not self.is_auto:
            return self.queries_per_step
        return max(SURVEY_QUERIES * self._directions, self.queries_per_step + REVIEW_QUERIES)

    @property
    def _directions(self) -> int:
        """Those whose queries follow each other."""
        directions = self.settings["directions"]
        return directions if isinstance(directions, int) else 1

    @property
    def takes_more_queries(self) -> bool:
        """Whether it gets fewer steps than a two-point method, being compared at equal queries."""
        return self.queries_per_step > 2 * self._directions

    @property
    def title(self) -> str:
        """Its label, with the paper's prime where it gets fewer steps than the others."""
        return f"{self.label}\N{PRIME}" if self.takes_more_queries else self.label


class Backpropagation(Method):
    """Tuning by torch's AdamW, beside the methods that need no gradient."""

    def adamw(self, params: Iterable[torch.Tensor], lr: float) -> torch.optim.AdamW:
        return torch.optim.AdamW(params, lr, **self.settings)

    @property
    def scale(self) -> str:
        return "absolute"

    @cached_property
    def queries_per_step(self) -> int:
        """What a step is counted as. Settings that are not valid raise an error."""
        self.adamw([torch.zeros(1)], 1e-3)
        return BACKPROPAGATION

    @property
    def _directions(self) -> int:
        return 1

    @property
    def title(self) -> str:
        return f"{self.label} (backpropagation)"


@dataclass(frozen=True)
class Spec:
    """A comparison: every method with every rate and seed on every workload, at equal queries.

    rates_from: a workload; the others are run only at the rates that were best there.
    extend: whether a grid goes on beyond an end that was best.
    """

    name: str
    title: str
    description: str
    workloads: tuple[Workload, ...]
    methods: tuple[Method, ...]
    decay: str
    folder: Path
    text: str
    rates_from: str = ""
    extend: bool = False

    def workload(self, name: str) -> Workload:
        one_of("workload", name, [workload.name for workload in self.workloads])
        return next(workload for workload in self.workloads if workload.name == name)

    def method(self, label: str) -> Method:
        one_of("method", label, [method.label for method in self.methods])
        return next(method for method in self.methods if method.label == label)


@dataclass(frozen=True)
class _File:
    """The top of the file, but for what workloads may have in common."""

    title: str
    workloads: tuple[Mapping[str, Any], ...]
    methods: tuple[Mapping[str, Any], ...]
    description: str = ""
    decay: str = "cosine"
    distribution: str = "normal"
    rho: float | None = None
    directions: int = 1
    scale: str = ""
    rates_from: str = ""
    extend: bool = False


def _keys(*kinds: type[Workload]) -> set[str]:
    return {entry.name for kind in kinds for entry in fields(kind) if entry.init}


KEYS = _keys(ImageWorkload, TextWorkload, OwnWorkload)
COMMON = KEYS - {"name", "data", "pretrain", "task", "options"}
"""Keys that a file may give once for all its workloads."""


def load(path: Path | str) -> Spec:
    """The spec in a file, named after it."""
    path = Path(path)
    return parse(read_text(path), path.stem, path.parent)


def read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ExperimentError(
            f"the spec {path} cannot be read ({error}); `forwardtune presets` lists those that ship"
        ) from None


def parse(text: str, name: str, folder: Path) -> Spec:
    """The spec in a text; paths in it are relative to the folder."""
    try:
        table = tomllib.loads(text)
        check_depth(table)
    except (ValueError, RecursionError) as error:
        raise ExperimentError(f"the spec {name!r} is not TOML: {error}") from None
    for key in table:
        one_of(f"the spec {name!r}: the key", key, [*(field.name for field in fields(_File)), *sorted(COMMON)])
    common = {key: table.pop(key) for key in COMMON & table.keys()}
    top = build(_File, table, f"the spec {name!r}")
    one_of("decay", top.decay, DECAYS)
    workloads = _apart("workloads", "a name", lambda w: w.name, (_workload(entry, common) for entry in top.workloads))
    entries = _apart("methods", "a label", lambda m: m.label, (_method(entry, top) for entry in top.methods))
    told, chosen = (top.title, top.description.strip()), (top.rates_from, top.extend)
    spec = Spec(name, *told, workloads, entries, top.decay, folder, text, *chosen)
    if spec.rates_from:
        spec.workload(spec.rates_from)
    for workload in workloads:
        for method in entries:
            _check_gradient(workload, method)
            if workload.queries:
                steps(workload, method, workload.queries)
    return spec


def _apart(what: str, key: str, name: Callable[[E], str], entries: Iterable[E]) -> tuple[E, ...]:
    """The entries, made one after the other until two have the same name."""
    made: dict[str, E] = {}
    for entry in entries:
        if name(entry) in made:
            raise ExperimentError(f"two {what} are called {name(entry)!r}; give each {key} of its own")
        made[name(entry)] = entry
    return tuple(made.values())


def steps(workload: Workload, method: Method, queries: int) -> int:
    """How many steps of a method the budget allows."""
    if method.is_auto and queries < LEAST_AUTO:
        raise ExperimentError(
            f"{workload.name}: {queries} queries are too few for {method.label} to find its rate; give at least "
            f"{LEAST_AUTO}, or a number for lr"
        )
    allowed = queries // method.most_queries
    if allowed < workload.evaluations:
        raise ExperimentError(
            f"{workload.name}: {queries:,} queries are {allowed} steps of {method.label}, too few for "
            f"{workload.evaluations} evaluations; raise the budget or lower evaluations"
        )
    return allowed


def _check_gradient(workload: Workload, method: Method) -> None:
    """Refuses backpropagation where there is no gradient."""
    if not isinstance(method, Backpropagation):
        return
    if workload.objective != "loss":
        raise ExperimentError(
            f"{workload.name}: {workload.objective} has no gradient, which {method.label} needs; set objective to "
            '"loss", or leave the method out'
        )
    if getattr(workload, "dtype", "") in PACKED and getattr(workload, "adapter", "") == "none":
        raise ExperimentError(f"{workload.name}: {ADAPTER_INSTEAD}")


def _workload(entry: Mapping[str, Any], common: Mapping[str, Any]) -> Workload:
    if {"queries", "epochs"} & entry.keys():
        common = {key: given for key, given in common.items() if key not in ("queries", "epochs")}
    own = "task" in entry
    usual = str(entry["task"]).replace(":", "-") if own else f"{entry.get('data')}-{entry.get('network')}"
    name = entry.get("name", usual)
    where, table = f"the workload {name!r}", {"name": name, **common, **entry}
    if not own:
        if "data" not in table:
            raise ExperimentError(f"{where} has no 'data'; give it, or a 'task' of your own")
        one_of(f"{where}: data", value(str, table["data"], where), (*IMAGES, *TEXTS))
    kind = OwnWorkload if own else kind_of(table["data"])
    of_others = table.keys() & KEYS - _keys(kind)
    if of_others:
        what = table["task" if own else "data"]
        raise ExperimentError(f"{where}: {min(of_others)} does not apply to {what}; leave it out")
    return build(kind, table, where)


def _method(entry: Mapping[str, Any], top: _File) -> Method:
    known = {"label": entry.get("label", entry.get("method")), "method": entry.get("method"), "lr": entry.get("lr")}
    where = f"the method {known['label']!r}"
    for key, given in known.items():
        if given is None:
            raise ExperimentError(f"{where} has no {key!r}; give it")
    one_of("method", value(str, known["method"], where), (*METHODS, ADAMW))
    is_auto = known["lr"] == "auto"
    rates = known["lr"] if isinstance(known["lr"], list) else [known["lr"]]
    if not is_auto and any(isinstance(lr, str) for lr in rates):
        raise ExperimentError(f'{where}: lr must be a list of rates, or "auto", not {known["lr"]!r}')
    if is_auto and "rho" in entry:
        raise ExperimentError(f'{where}: lr = "auto" finds the distance of probes, too; leave rho out')
    if known["method"] == ADAMW:
        return _backpropagation(entry, known, where)
    shared: dict[str, Any] = {"distribution": top.distribution, "directions": top.directions}
    own = inspect.signature(METHODS[known["method"]]).parameters.keys() - {"params", "lr", "run"}
    accepted = own - ({"rho"} if is_auto else set()) | shared.keys() | {"scale", "probes", "rounding"}
    for key in entry.keys() - known.keys():
        one_of(f"{where}: the setting", key, sorted(accepted))
    if top.scale:
        shared["scale"] = top.scale
    if "rho" in accepted:
        scale = entry.get("scale", top.scale or METHODS[known["method"]].usual_scale)
        shared["rho"] = probe_distance(None, top.rho, scale)
    settings = {**shared, **{key: entry[key] for key in sorted(entry.keys() - known.keys())}}
    return _checked(Method, known, settings, where)


def _backpropagation(entry: Mapping[str, Any], known: Mapping[str, Any], where: str) -> Method:
    """Of what methods have in common at the top of the file, nothing applies to it."""
    if known["lr"] == "auto":
        raise ExperimentError(f"{where}: AdamW does not find its rate; give a list of rates for lr")
    for key in entry.keys() - known.keys():
        one_of(f"{where}: the setting", key, ("betas", "weight_decay"))
    betas = value(tuple[float, ...], entry.get("betas", (0.9, 0.999)), f"{where}: betas")
    decay = value(float, entry.get("weight_decay", 0.0), f"{where}: weight_decay")
    if len(betas) != 2:
        raise ExperimentError(f"{where}: betas must be two numbers, not {list(betas)}")
    return _checked(Backpropagation, known, {"weight_decay": decay, "betas": list(betas)}, where)


def _checked(kind: type[Method], known: Mapping[str, Any], settings: Mapping[str, Any], where: str) -> Method:
    """The method, once its settings are known to be valid."""
    is_auto = known["lr"] == "auto"
    try:
        method = build(kind, {**known, "lr": [1.0] if is_auto else known["lr"], "settings": settings}, where)
        method = replace(method, lr=("auto",)) if is_auto else method
        method.queries_per_step  # noqa: B018
    except ExperimentError:
        raise
    except (ForwardTuneError, TypeError, ValueError, ArithmeticError) as error:
        raise ExperimentError(f"{where}: {error}") from None
    return method
