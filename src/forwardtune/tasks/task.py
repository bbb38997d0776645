"""A workload made ready: its data in memory, its model, its base weights in a file."""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor, nn

from forwardtune.errors import ExperimentError
from forwardtune.heads import FEWEST
from forwardtune.tasks.sources import Sources
from forwardtune.tasks.workload import Workload

FIT = 64  # examples of a forward pass to which a head is fitted
BEFORE = "before"


@dataclass(frozen=True)
class Scores:
    """How well a model does on fixed examples: losses, and the task's metrics on the test set."""

    train_loss: float
    test_loss: float
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class DataFacts:
    """What a result says about its data.

    digest: tells whether two machines have the same data.
    note: what a reader of the results should know about the data.
    majority: the accuracy of always answering the majority class of the test examples, where there are classes.
    """

    name: str
    train: int
    test: int
    digest: str
    note: str = ""
    majority: float | None = None


def before_fit(base: Path) -> dict[str, float]:
    """The test scores, as a file of base weights tells them, of the model before what is new in it was fitted."""
    with safe_open(base, "pt") as file:
        told = (file.metadata() or {}).get(BEFORE)
    return json.loads(told) if told else {}


class Task(ABC):
    """A model tuned to a set of examples."""

    metrics: tuple[str, ...] = ("accuracy",)
    """Methods are compared by the first."""
    note = ""
    """What a reader of the results should know about the data."""

    def __init__(self, workload: Workload, sources: Sources, device: str, examples: int, tests: int) -> None:
        self.workload, self.sources, self.device = workload, sources, torch.device(device)
        self.examples, self.tests = examples, tests
        self.queries = workload.budget(examples)

    def with_workload(self, workload: Workload) -> Self:
        """The same task under a workload that differs in its budget or its evaluations only."""
        task = copy.copy(self)
        task.workload, task.queries = workload, workload.budget(self.examples)
        return task

    @property
    def data(self) -> DataFacts:
        return DataFacts(self.workload.data, self.examples, self.tests, self.data_digest, self.note, self.majority)

    @property
    def majority(self) -> float | None:
        """The accuracy of always answering the majority class, where it is reported."""
        return None

    @property
    @abstractmethod
    def data_digest(self) -> str:
        """Tells whether two machines have the same data."""

    @property
    @abstractmethod
    def guessing(self) -> float:
        """The loss of a uniform guess."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor: ...

    @abstractmethod
    def losses(self, model: nn.Module, batch: Any) -> Tensor:
        """One loss per example of the batch, all in one forward pass."""

    @abstractmethod
    def batch(self, chosen: Tensor) -> Any:
        """Training examples by index."""

    @torch.inference_mode()
    def evaluate(self, model: nn.Module) -> Scores:
        """On the same examples every time, without dropout and with BatchNorm's running statistics."""
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        scores = self.score(model, *self._sample)
        model.train(modes[0][1])
        for module, training in modes:
            module.training = training
        return scores

    @abstractmethod
    def score(self, model: nn.Module, train: Tensor, test: Tensor) -> Scores:
        """On some training and test examples, by index."""

    @cached_property
    def _sample(self) -> tuple[Tensor, Tensor]:
        """The examples that models are evaluated on: drawn once."""
        sizes = (self.examples, self.workload.train_examples), (self.tests, self.workload.test_examples)
        train, test = (torch.randperm(n, generator=torch.Generator().manual_seed(0))[: k or n] for n, k in sizes)
        return train, test

    @property
    @abstractmethod
    def base_id(self) -> str:
        """A hash of all that determines the base weights: data, the content of files, recipes."""

    @abstractmethod
    def check(self) -> None:
        """Raises now if something that a run needs cannot be loaded."""

    def _examples_to_fit(self) -> Iterator[Tensor]:
        """The training examples that the head is fitted to, drawn once, by index and in batches."""
        if self.examples < FEWEST:
            raise ExperimentError(
                f"{self.examples} training examples are too few to fit a head; give at least {FEWEST}, or leave the "
                "head as it was drawn (fit = 0, of the command --fit 0)"
            )
        order = torch.randperm(self.examples, generator=torch.Generator().manual_seed(0))
        yield from order[: self.workload.fit].split(FIT)  # type: ignore[no-untyped-call]

    def _told_before(self, model: nn.Module) -> dict[str, str]:
        """What `before_fit` reads, as metadata of the file."""
        return {BEFORE: json.dumps(dict(self.evaluate(model).metrics))}

    def describe(self, model: nn.Module) -> str:
        """What will be tuned, in words."""
        return ""

    @abstractmethod
    def make_base(self, file: Path) -> nn.Module:
        """Writes the weights and buffers that every run of the workload starts from, and returns the model."""

    @abstractmethod
    def start(self, base: Path) -> nn.Module:
        """The model with the base weights."""
