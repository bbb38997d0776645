"""A model, data and a loss of the user's own, as a function that a spec names returns them."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import default_collate

from forwardtune.errors import ExperimentError
from forwardtune.files import replace_file, translated
from forwardtune.metrics import ARROWS, own_name
from forwardtune.tasks.identity import RULES, fingerprint
from forwardtune.tasks.own.code import Code
from forwardtune.tasks.own.workload import OwnWorkload
from forwardtune.tasks.sources import Sources
from forwardtune.tasks.task import DataFacts, Scores, Task
from forwardtune.toml_tables import is_name, one_of

KNOWN_BY = 32
"""Examples of a set, at equal distances, by which it is known."""

Function = Callable[[nn.Module, Any], Tensor]
"""Of a model and a batch: one number, or one per example."""


@dataclass(frozen=True)
class OwnTask:
    """A model to tune, examples, and what is minimized.

    model: any module, with the weights that runs start from; those that need no gradient stay as they are.
    train, test: examples by index: map-style datasets, lists. An example is the same whenever it is asked for.
    loss: of a model and a batch, a tensor: one number or, for lines of examples' own, one per example.
    metrics: on the test examples, by name: which value is the best, ``"lowest"`` or ``"highest"``, and a function as
        for the loss, of which the mean over the examples is taken. Methods are compared by the first; without any, by
        the test loss.
    collate: makes a batch of a list of examples.
    guessing: the loss of a guess, if that of the first weights may be much lower: a run is given up at ten times the
        larger of the two.
    """

    model: nn.Module
    train: Any
    test: Any
    loss: Function
    metrics: Mapping[str, tuple[str, Function]] = field(default_factory=dict)
    collate: Callable[[list[Any]], Any] = default_collate
    guessing: float = 0.0


class Batch(NamedTuple):
    """So many examples, collated."""

    content: Any
    examples: int


class UserTask(Task):
    """What an `OwnTask` has is tuned, in the mode that its model is in.

    The function that makes it is called in every process, with torch's generator seeded and in one thread, so that it
    makes the same everywhere. The weights are made once and then read from their file.
    """

    workload: OwnWorkload

    def __init__(self, workload: OwnWorkload, sources: Sources, device: str) -> None:
        self._code, self._name = Code(workload.task, sources.folder), f"the task {workload.task}"
        self.device = torch.device(device)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with self._seeded():
                self.own = self._checked(self._code.make(workload.options or {}))
        finally:
            torch.set_num_threads(threads)
        self._functions = {own_name(name, best): function for name, (best, function) in self.own.metrics.items()}
        self.metrics = tuple(self._functions) or ("loss",)
        super().__init__(workload, sources, device, len(self.own.train), len(self.own.test))

    def _checked(self, own: Any) -> OwnTask:
        """What was returned, if it is what it should be."""
        if not isinstance(own, OwnTask):
            raise ExperimentError(f"{self._name}: its function must return an OwnTask, not {_kind(own)}")
        if not isinstance(own.model, nn.Module):
            raise ExperimentError(f"{self._name}: model must be a torch.nn.Module, not {_kind(own.model)}")
        for name, examples in (("train", own.train), ("test", own.test)):
            if not (hasattr(examples, "__len__") and hasattr(examples, "__getitem__")):
                raise ExperimentError(
                    f"{self._name}: {name} must have a length and give examples by index, as a list or a map-style "
                    f"dataset does, which {_kind(examples)} does not"
                )
            if not len(examples):
                raise ExperimentError(f"{self._name}: {name} has no examples")
        if not isinstance(own.metrics, Mapping):
            raise ExperimentError(f"{self._name}: metrics must be a dict, not {_kind(own.metrics)}")
        for name, pair in own.metrics.items():
            if not (isinstance(pair, tuple) and len(pair) == 2 and callable(pair[1])):
                raise ExperimentError(
                    f'{self._name}: the metric {name!r} must be a pair, ("lowest" or "highest", function), not {pair!r}'
                )
            one_of(f"{self._name}: the best value of {name!r}", pair[0], ARROWS)
            is_name(f"{self._name}: a metric's name", name)
        for name in ("loss", "collate"):
            if not callable(getattr(own, name)):
                raise ExperimentError(f"{self._name}: {name} must be a function, not {_kind(getattr(own, name))}")
        return own

    @contextmanager
    def _seeded(self) -> Iterator[None]:
        """Torch's generators as they always are at this point, and afterwards as they were."""
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(0)
            yield

    @property
    def data(self) -> DataFacts:
        return DataFacts(self.workload.task, self.examples, self.tests, self.data_digest)

    @cached_property
    def data_digest(self) -> str:
        """By some of the examples, which are read twice: the same must come."""
        digest = hashlib.sha256()
        for name, examples in (("train", self.own.train), ("test", self.own.test)):
            digest.update(f"{name} {len(examples)}".encode())
            for i in range(0, len(examples), max(1, len(examples) // KNOWN_BY)):
                first, again = (_digest(self._example(name, examples, i)) for _ in range(2))
                if first != again:
                    raise ExperimentError(
                        f"{self._name}: {name}[{i}] is another each time; an example must stay the same (random "
                        "changes of examples can be made in the loss)"
                    )
                digest.update(first)
        return digest.hexdigest()

    def _example(self, name: str, examples: Any, i: int) -> Any:
        with self._code.telling(f"{name}[{i}]"):
            return examples[i]

    @property
    def guessing(self) -> float:
        return self.own.guessing

    def batch(self, chosen: Tensor) -> Batch:
        return self._batch("train", self.own.train, chosen)

    def _batch(self, name: str, examples: Any, chosen: Tensor) -> Batch:
        those = [self._example(name, examples, i) for i in chosen.tolist()]
        with self._code.telling(f"collate of {len(those)} examples of {name}"):
            return Batch(_on(self.device, self.own.collate(those)), len(those))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._values("loss", self.own.loss, model, batch).mean()

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        values = self._values("loss", self.own.loss, model, batch)
        if len(values) != batch.examples:
            raise ExperimentError(
                f"{self._name}: lines of examples' own need a loss that returns one number per example, and this one "
                f"returns one for a batch of {batch.examples}"
            )
        return values

    def _values(self, name: str, function: Function, model: nn.Module, batch: Batch) -> Tensor:
        """What a function of the user's gives for a batch: one number, or one per example."""
        with self._code.telling(name):
            values = function(model, batch.content)
        got = f"a tensor of shape {tuple(values.shape)}" if isinstance(values, Tensor) else _kind(values)
        if not isinstance(values, Tensor) or (values.numel() != 1 and values.shape != (batch.examples,)):
            raise ExperimentError(
                f"{self._name}: {name} must return a tensor, of one number or one per example ({batch.examples} here), "
                f"not {got}"
            )
        values = values.reshape(-1)
        return values if values.is_floating_point() else values.to(torch.get_default_dtype())

    def score(self, model: nn.Module, train: Tensor, test: Tensor) -> Scores:
        with torch.inference_mode(False), torch.no_grad(), self._seeded():
            (train_loss,) = self._means({"loss": self.own.loss}, model, "train", train)
            test_loss, *others = self._means({"loss": self.own.loss, **self._functions}, model, "test", test)
        return Scores(train_loss, test_loss, dict(zip(self.metrics, others or [test_loss], strict=True)))

    def _means(self, functions: Mapping[str, Function], model: nn.Module, name: str, chosen: Tensor) -> list[float]:
        """Of each function over some examples."""
        sums = [0.0] * len(functions)
        for some in chosen.split(self.workload.batch):  # type: ignore[no-untyped-call]
            batch = self._batch(name, getattr(self.own, name), some)
            for i, (called, function) in enumerate(functions.items()):
                sums[i] += len(some) * self._values(called, function, model, batch).double().mean().item()
        return [total / len(chosen) for total in sums]

    @cached_property
    def base_id(self) -> str:
        """By the code, the options, some of the examples, and the shapes of the weights."""
        with self._code.telling("the state of its model"):
            shapes = [(name, list(value.shape), str(value.dtype)) for name, value in _state(self.own.model).items()]
        return fingerprint([RULES, self._code.digest, self.workload.options, self.data_digest, shapes])

    def check(self) -> None:
        """Computes the loss and the metrics of one batch."""
        model, some = self._copy(), torch.arange(self.workload.batch)
        with torch.no_grad(), self._seeded():
            loss = self.loss(model, self.batch(some)).item()
            if not math.isfinite(loss):
                raise ExperimentError(f"{self._name}: its loss is {loss} before any step; it must be finite")
            batch = self._batch("test", self.own.test, some[: self.tests])
            for name, function in self._functions.items():
                self._values(name, function, model, batch)

    def _copy(self) -> nn.Module:
        with self._code.telling("a copy of its model"):
            return copy.deepcopy(self.own.model).to(self.device)

    def make_base(self, file: Path) -> nn.Module:
        state = {name: value.cpu().contiguous().clone() for name, value in _state(self.own.model).items()}
        with translated(ExperimentError, f"{file} cannot be written"):
            replace_file(file, lambda new: save_file(state, new))
        return self._copy()

    def start(self, base: Path) -> nn.Module:
        model = self._copy()
        model.load_state_dict(load_file(base), strict=False)
        return model


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Weights and buffers, without what else a module may keep in its state."""
    return {name: value.detach() for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def _kind(value: object) -> str:
    return type(value).__name__


def _on(device: torch.device, value: Any) -> Any:
    """A batch with what of it can be moved on the device."""
    if hasattr(value, "to"):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _on(device, entry) for key, entry in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_on(device, entry) for entry in value))
    return type(value)(_on(device, entry) for entry in value) if isinstance(value, list | tuple) else value


def _digest(value: Any) -> bytes:
    """Of an example: numbers, texts, tensors, arrays, images, and lists, tuples and dicts of those."""
    if isinstance(value, Tensor):
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        content = repr((str(value.dtype), tuple(value.shape))).encode() + raw
    elif hasattr(value, "tobytes"):
        content = value.tobytes()
    elif isinstance(value, Mapping):
        content = b"".join(_digest(entry) for pair in value.items() for entry in pair)
    elif isinstance(value, list | tuple):
        content = b"".join(map(_digest, value))
    elif isinstance(value, str | bytes | int | float | complex | bool | None):
        content = repr(value).encode()
    else:
        content = b""
    return hashlib.sha256(type(value).__name__.encode() + content).digest()
