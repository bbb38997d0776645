"""A run by backpropagation: what a gradient is worth, beside the methods that do without one.

It starts from the same base weights as they do and sees the same batches, in the same mode of the model, and its rate
decays alike. It has no ledger: at its evaluations it writes a checkpoint, from which it resumes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from forwardtune.errors import ExperimentError
from forwardtune.experiments.spec import ADAPTER_INSTEAD, Backpropagation
from forwardtune.experiments.under_way import RunUnderWay, StartOver
from forwardtune.files import replace_file, translated
from forwardtune.packed import is_packed


class BackpropagationUnderWay(RunUnderWay):
    """A run by backpropagation, and its checkpoint: the losses of its steps, what they move, and torch's generators."""

    losses: list[float]

    @property
    def queries(self) -> int:
        return len(self.losses) * self.run.method.queries_per_step

    @property
    def weights(self) -> int:
        return sum(parameter.numel() for group in self.optimizer.param_groups for parameter in group["params"])

    def _start(self, model: nn.Module) -> None:
        assert isinstance(self.run.method, Backpropagation)
        if getattr(self.run.workload, "adapter", "none") == "none" and any(map(is_packed, model.parameters())):
            raise ExperimentError(f"{self.run.title}: {ADAPTER_INSTEAD}")
        tuned = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer, self.losses = self.run.method.adamw(tuned, float(self.run.lr)), []

    def _step(self, model: nn.Module, batch: Any) -> float:
        self.optimizer.zero_grad()
        loss = self.task.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.losses.append(loss.item())
        self.tracer.add_loss(self.queries, self.losses[-1])
        return self.losses[-1]

    def _keep(self, model: nn.Module, step: int) -> None:
        if not 0 < step < self.steps:
            return
        checkpoint = {
            "losses": self.losses,
            "moved": _moved(model),
            "optimizer": self.optimizer.state_dict(),
            "generators": [get() for get, _ in self._generators],
        }
        with translated(ExperimentError, f"{self.file} cannot be written; make room, then run the same command again"):
            replace_file(self.file, partial(torch.save, checkpoint))

    def _take_up(self, model: nn.Module) -> int:
        self._start(model)
        try:
            checkpoint = torch.load(self.file, "cpu", weights_only=True)
            for name, tensor in _moved(model).items():
                tensor.copy_(checkpoint["moved"][name])
            self.optimizer.load_state_dict(checkpoint["optimizer"])
            for (_, put), state in zip(self._generators, checkpoint["generators"], strict=True):
                put(state)
            for loss in checkpoint["losses"]:
                self.losses.append(loss)
                self.tracer.add_loss(self.queries, loss)
        except Exception as error:  # torch.load raises whatever it meets
            raise StartOver(f"{self.file} is damaged ({error})") from None
        step = len(self.losses)
        self.log.begin(step, self.task.base_id)
        self._check_evaluations([due for due in self.due if due < step])
        return step

    @property
    def _generators(self) -> list[tuple[Any, Any]]:
        """How torch's generators are asked for their states, and given them back."""
        pairs: list[tuple[Any, Any]] = [(torch.get_rng_state, torch.set_rng_state)]
        if self.task.device.type != "cpu":
            module = torch.get_device_module(self.task.device)
            there = {"device": self.task.device}
            pairs.append((partial(module.get_rng_state, **there), partial(module.set_rng_state, **there)))
        return pairs


def _moved(model: nn.Module) -> dict[str, Tensor]:
    """All that steps change in a model: the weights that are tuned, and buffers."""
    tuned = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {**tuned, **dict(model.named_buffers())}
