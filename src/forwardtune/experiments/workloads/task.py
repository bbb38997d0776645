"""A workload made ready: its data in memory, its network, its base weights in a file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forwardtune.experiments.spec import Workload
from forwardtune.experiments.workloads.sources import Sources

Evaluation = dict[str, float]
"""How well a network does: `train_loss`, `test_loss` and the task's metrics on the test set."""


class Task(ABC):
    """Tuning a network to a set of examples."""

    metrics: tuple[str, ...] = ("accuracy",)
    """The first is the one that methods are compared by."""
    note = ""
    """What a reader of the results should know about the data."""

    def __init__(self, workload: Workload, sources: Sources, device: str, examples: int, tests: int) -> None:
        self.workload, self.sources, self.device = workload, sources, torch.device(device)
        self.examples, self.tests = examples, tests
        self.queries = workload.budget(examples)

    @property
    def data(self) -> dict[str, Any]:
        """What a result says of the data."""
        found = {"name": self.workload.data, "train": self.examples, "test": self.tests, "digest": self.data_digest}
        return {**found, "note": self.note} if self.note else found

    @property
    @abstractmethod
    def data_digest(self) -> str:
        """Tells whether two machines have the same data."""

    @property
    @abstractmethod
    def guessing(self) -> float:
        """The loss of knowing nothing."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor: ...

    @abstractmethod
    def batch(self, chosen: Tensor) -> Any:
        """Training examples by their numbers."""

    @torch.inference_mode()
    def evaluate(self, model: nn.Module) -> Evaluation:
        """On the same examples every time, without dropout and with the running statistics."""
        training = model.training
        model.eval()
        found = self.score(model, *self._sample)
        model.train(training)
        return found

    @abstractmethod
    def score(self, model: nn.Module, train: Tensor, test: Tensor) -> Evaluation:
        """On some examples of either set, by their numbers."""

    @cached_property
    def _sample(self) -> tuple[Tensor, Tensor]:
        """The examples that are looked at: drawn once."""
        sizes = (self.examples, self.workload.train_examples), (self.tests, self.workload.test_examples)
        train, test = (torch.randperm(n, generator=torch.Generator().manual_seed(0))[: k or n] for n, k in sizes)
        return train, test

    @property
    @abstractmethod
    def base_id(self) -> str:
        """Known by all that decides the base weights: data, a file's content, recipes."""

    @abstractmethod
    def check(self) -> None:
        """Notices now what could not be had later."""

    def describe(self, model: nn.Module) -> str:
        """What will be tuned, in words."""
        return ""

    @abstractmethod
    def make_base(self, file: Path) -> None:
        """Writes the weights and buffers that every run of the workload starts from."""

    @abstractmethod
    def start(self, base: Path) -> nn.Module:
        """The network with the base weights."""
