"""What is compared: a frozen description, read from a TOML file.

A spec names workloads (data, network, base weights), methods with their grids of rates, seeds, and one budget in
forward passes for all methods alike. `docs/experiments.md` explains every key.
"""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import torch

from forwardtune.arguments import Params
from forwardtune.errors import ExperimentError, ForwardTuneError
from forwardtune.experiments.toml_tables import build, one_of, value
from forwardtune.methods import METHODS
from forwardtune.optimizer import LineSearch

IMAGES = ("digits", "mnist", "cifar10")
TEXTS = ("sst2", "mrpc", "qnli", "rte", "stsb", "files")
NETWORKS = ("cnn", "densenet121", "resnet18", "vgg11", "vit_b_16")
TRANSFORMER = "transformer"
SETUPS = ("prompt", "similarity", "head")
ADAPTERS = ("none", "lora", "prefix", "prompt", "ia3")
OBJECTIVES = ("loss", "accuracy", "f1")
DTYPES = ("float32", "bfloat16", "float16", "float64")
DECAYS = ("cosine", "linear", "none")


@dataclass(frozen=True)
class Pretrain:
    """Backpropagation (Adam) on a source set, before the runs begin.

    shift: rolls the source's images by so many pixels, down and to the right.
    invert: turns bright into dark in the source's images.
    head: whether tuning starts with the head that was trained, or with a new one.
    """

    data: str
    steps: int
    batch: int = 64
    lr: float = 1e-3
    seed: int = 0
    shift: int = 0
    invert: bool = False
    head: str = "new"

    def __post_init__(self) -> None:
        one_of("data", self.data, IMAGES)
        one_of("head", self.head, ("new", "keep"))
        _at_least(1, steps=self.steps, batch=self.batch)
        _above_zero(lr=self.lr)


@dataclass(frozen=True)
class Workload:
    """What is tuned on what, how often it is looked at, and how long.

    weights: ``"random"``, ``"torchvision"`` or a file (.safetensors, .pth) in the spec's or the data's folder; all but
        the head is taken from it. Of a transformer: its folder there, ``"package:NAME/FOLDER"`` for one inside an
        installed package, or, with a download, a hub's name.
    pretrain: what is done to them before the runs begin.
    queries, epochs: the budget of a run; an epoch is one of a method with two evaluations a step.
    evaluations: how often, at equal distances, the weights are looked at, beside at the start.
    train_examples, test_examples: on how many fixed examples of either set; 0 means all.

    Of texts only:
    setup: how they are put to the model, ``"prompt"``, ``"similarity"`` or ``"head"``; by default what it can.
    adapter: ``"lora"``, ``"prefix"``, ``"prompt"`` or ``"ia3"`` is tuned in the place of the model's own weights.
    objective: ``"loss"``, or ``"accuracy"`` or ``"f1"``, which have no gradient, of the batch.
    template, words: the question and its answers, for a task whose own are not wanted.
    max_length: tokens of an example at most.
    pad_token: for a tokenizer that has none, where a head needs it.
    train, test, text, label: of ``data = "files"``: tables (.csv, .tsv, .jsonl), and the names of their columns.
    """

    name: str
    data: str
    network: str
    weights: str
    batch: int
    seeds: tuple[int, ...]
    pretrain: Pretrain | None = None
    queries: int | None = None
    epochs: int | None = None
    evaluations: int = 40
    train_examples: int = 0
    test_examples: int = 0
    setup: str = ""
    adapter: str = "none"
    objective: str = "loss"
    template: str = ""
    words: tuple[str, ...] = ()
    max_length: int = 128
    pad_token: str = ""
    dtype: str = "float32"
    train: str = ""
    test: str = ""
    text: tuple[str, ...] = ()
    label: str = ""

    def __post_init__(self) -> None:
        one_of("data", self.data, (*IMAGES, *TEXTS))
        one_of("network", self.network, NETWORKS if self.data in IMAGES else (TRANSFORMER,))
        self._check_texts()
        _is_name("name", self.name)
        if self.batch == 1 and self.network in ("densenet121", "resnet18"):
            raise ExperimentError(
                f"{self.network} normalises over the batch, which must have at least 2 examples, not 1"
            )
        if (self.queries is None) == (self.epochs is None):
            raise ExperimentError("the budget is given by either queries or epochs")
        for name, least in (("batch", 1), ("queries", 1), ("epochs", 1), ("evaluations", 1)):
            if (given := getattr(self, name)) is not None:
                _at_least(least, **{name: given})
        _at_least(0, train_examples=self.train_examples, test_examples=self.test_examples)
        if len(set(self.seeds)) < len(self.seeds) or not all(0 <= seed < 2**63 for seed in self.seeds):
            raise ExperimentError(f"seeds must be different whole numbers from 0 to 2^63, not {list(self.seeds)}")

    def _check_texts(self) -> None:
        defaults = {field.name: field.default for field in fields(self)}
        files = ("train", "test", "text", "label")
        unused: tuple[str, ...] = () if self.data == "files" else files
        if self.data in IMAGES:
            unused = (*files, "setup", "adapter", "objective", "template", "words", "max_length", "pad_token", "dtype")
        for name in unused:
            if getattr(self, name) != defaults[name]:
                raise ExperimentError(f"{name} has no meaning for {self.data}; leave it out")
        if self.data in IMAGES:
            return
        if self.pretrain:
            raise ExperimentError("pretrain has no meaning for texts; start from the weights of a model")
        if self.data == "files":
            for name in ("train", "text", "label"):
                if not getattr(self, name):
                    raise ExperimentError(f"texts from files need {name!r}; give it")
            if len(self.text) > 2:
                raise ExperimentError(f"an example has one text or two, not {len(self.text)}")
        if self.setup:
            one_of("setup", self.setup, SETUPS)
        if self.setup == "head" and (self.template or self.words):
            raise ExperimentError("a head is not asked by template and words; leave them out, or choose another setup")
        one_of("adapter", self.adapter, ADAPTERS)
        one_of("objective", self.objective, OBJECTIVES)
        one_of("dtype", self.dtype, DTYPES)
        if self.objective != "loss" and self.data == "stsb":
            raise ExperimentError(f"stsb asks for scores, which have no {self.objective}; tune by the loss")
        _at_least(8, max_length=self.max_length)

    def budget(self, examples: int) -> int:
        """Forward passes a run may use, given the size of the training set."""
        if self.batch > examples:
            raise ExperimentError(
                f"{self.name}: a batch of {self.batch} is more than the {examples:,} training examples of {self.data}; "
                "lower batch"
            )
        return self.queries or 2 * (self.epochs or 0) * (examples // self.batch)


@dataclass(frozen=True)
class Method:
    """A method, its rates and its settings; `label` tells variants of one method apart."""

    label: str
    method: str
    lr: tuple[float, ...]
    settings: Mapping[str, Any] = field(hash=False)

    def __post_init__(self) -> None:
        _is_name("label", self.label)
        if len(set(self.lr)) < len(self.lr) or min(self.lr) <= 0:
            raise ExperimentError(f"lr must list different rates above zero, not {list(self.lr)}")

    def optimizer(self, params: Params, lr: float, **run: Any) -> LineSearch:
        kind: Callable[..., LineSearch] = METHODS[self.method]
        return kind(params, lr=lr, **self.settings, **run)

    @cached_property
    def queries_per_step(self) -> int:
        """Counted in a step along a line of one weight, which also shows whether the settings make sense."""
        optimizer = self.optimizer([torch.zeros(1)], 1e-3, backend="reference")
        optimizer.step(count(1.0).__next__)
        return optimizer.queries

    @property
    def takes_more_queries(self) -> bool:
        """Whether it gets fewer steps than a two-point method, being compared at equal queries."""
        return bool(self.queries_per_step > 2 * self.settings["directions"])

    @property
    def title(self) -> str:
        """Its label, with the paper's prime where it gets fewer steps than the others."""
        return f"{self.label}\N{PRIME}" if self.takes_more_queries else self.label


@dataclass(frozen=True)
class Spec:
    """A comparison: every method with every rate and seed on every workload, at equal queries.

    rates_from: a workload; the others are run only at the rates that were best there.
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
    rho: float = 1e-3
    directions: int = 1
    rates_from: str = ""


COMMON = {field.name for field in fields(Workload)} - {"name", "data", "pretrain"}


def read(path: Path | str) -> Spec:
    """The spec in a file, named after it."""
    path = Path(path)
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ExperimentError(
            f"the spec {path} cannot be read ({error}); `forwardtune presets` lists those that ship"
        ) from None
    return parse(text, path.stem, path.parent)


def parse(text: str, name: str, folder: Path) -> Spec:
    """The spec in a text; paths in it are relative to the folder."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ExperimentError(f"the spec {name!r} is not TOML: {error}") from None
    for key in table:
        one_of(f"the spec {name!r}: the key", key, [*(field.name for field in fields(_File)), *sorted(COMMON)])
    common = {key: table.pop(key) for key in COMMON & table.keys()}
    top = build(_File, table, f"the spec {name!r}")
    one_of("decay", top.decay, DECAYS)
    workloads = tuple(_workload(entry, common) for entry in top.workloads)
    entries = [_method(entry, top) for entry in top.methods]
    for what, names in (("workloads", [w.name for w in workloads]), ("methods", [m.label for m in entries])):
        double = {n for n in names if names.count(n) > 1}
        if double:
            key = "a name" if what == "workloads" else "a label"
            raise ExperimentError(f"two {what} are called {min(double)!r}; give each {key} of its own")
    spec = Spec(
        name, top.title, top.description.strip(), workloads, tuple(entries), top.decay, folder, text, top.rates_from
    )
    if spec.rates_from:
        spec.workload(spec.rates_from)
    for workload in workloads:
        if workload.queries:
            for method in entries:
                steps(workload, method, workload.queries)
    return spec


def steps(workload: Workload, method: Method, queries: int) -> int:
    """How many steps of a method the budget allows."""
    allowed = queries // method.queries_per_step
    if allowed < workload.evaluations:
        raise ExperimentError(
            f"{workload.name}: {queries:,} queries are {allowed} steps of {method.label}, too few for "
            f"{workload.evaluations} evaluations; raise the budget or lower evaluations"
        )
    return allowed


def _workload(entry: Mapping[str, Any], common: Mapping[str, Any]) -> Workload:
    if {"queries", "epochs"} & entry.keys():
        common = {key: given for key, given in common.items() if key not in ("queries", "epochs")}
    name = entry.get("name", f"{entry.get('data')}-{entry.get('network')}")
    return build(Workload, {"name": name, **common, **entry}, f"the workload {name!r}")


def _method(entry: Mapping[str, Any], top: _File) -> Method:
    known = {"label": entry.get("label", entry.get("method")), "method": entry.get("method"), "lr": entry.get("lr")}
    where = f"the method {known['label']!r}"
    for key, given in known.items():
        if given is None:
            raise ExperimentError(f"{where} has no {key!r}; give it")
    one_of("method", value(str, known["method"], where), METHODS)
    shared: dict[str, Any] = {"distribution": top.distribution, "directions": top.directions}
    accepted = inspect.signature(METHODS[known["method"]]).parameters.keys() - {"params", "lr", "run"} | shared.keys()
    for key in entry.keys() - known.keys():
        one_of(f"{where}: the setting", key, sorted(accepted))
    if "rho" in accepted:
        shared["rho"] = top.rho
    settings = {**shared, **{key: entry[key] for key in sorted(entry.keys() - known.keys())}}
    method = build(Method, {**known, "settings": settings}, where)
    try:
        method.queries_per_step  # noqa: B018
    except (ForwardTuneError, TypeError) as error:
        raise ExperimentError(f"{where}: {error}") from None
    return method


def _is_name(what: str, given: str) -> None:
    """Refuses what cannot be part of a file's name or of a table."""
    if not given or not given.isprintable() or set(given) & set('/\\|<>:"?*'):
        raise ExperimentError(f'{what} must be text without any of / \\ | < > : " ? *, not {given!r}')


def _at_least(least: int, **settings: int) -> None:
    for name, given in settings.items():
        if given < least:
            raise ExperimentError(f"{name} must be at least {least}, not {given}")


def _above_zero(**settings: float) -> None:
    for name, given in settings.items():
        if given <= 0:
            raise ExperimentError(f"{name} must be above zero, not {given:g}")
