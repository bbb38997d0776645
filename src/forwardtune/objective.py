"""The user's closure as a function of the weights alone.

A step compares losses, so its evaluations must differ in nothing but the weights. Each of them starts from the same
state of torch's random generators (the CPU's and those of the parameters' devices) and of the buffers of every module
that runs, and the state that the last one leaves behind stays: afterwards the generators and BatchNorm's running
statistics have advanced as if the closure had been called once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from forwardtune.errors import InvalidArgumentError

Closure = Callable[[], Any]


class Objective:
    """One step's view of the closure: call it for the loss at the present weights."""

    def __init__(self, closure: Closure, devices: Iterable[torch.device]) -> None:
        self._closure = closure
        self._generators = _Generators(device for device in devices if device.type != "cpu")
        self._buffers = _Buffers()
        self._fresh = True
        self.last: Any = None
        self.queries = 0

    def __call__(self) -> float:
        if self._fresh:
            self._fresh = False
            with self._buffers.watch():
                return self._evaluate()
        self.rewind()
        return self._evaluate()

    def _evaluate(self) -> float:
        torch.clear_autocast_cache()  # it may hold casts of the weights as they were
        self.queries += 1
        self.last = self._closure()
        return _as_float(self.last)

    def rewind(self, *, generators: bool = True) -> None:
        """Back to the state before the first evaluation."""
        self._buffers.restore()
        if generators:
            self._generators.restore()

    def like_closure(self, loss: float) -> Tensor | float:
        """A loss in the closure's own currency: a tensor if it returns tensors."""
        return self.last.new_tensor(loss) if isinstance(self.last, Tensor) else loss


def _as_float(loss: Any) -> float:
    if isinstance(loss, Tensor):
        if loss.numel() != 1 or loss.is_complex():
            raise InvalidArgumentError(
                f"the closure must return one real number, not a {loss.dtype} tensor of shape {tuple(loss.shape)}; "
                "reduce it, for instance with .mean()"
            )
        loss = loss.detach()
    try:
        return float(loss)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"the closure must return the loss as a tensor or a number, not {type(loss).__name__}"
        ) from error


class _Generators:
    """The state of torch's generators at the time of construction."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._cpu = torch.get_rng_state()
        self._others = [(device, torch.get_device_module(device).get_rng_state(device)) for device in devices]

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        for device, state in self._others:
            torch.get_device_module(device).set_rng_state(state, device)


class _Buffers:
    """The buffers of the modules that ran while it watched, as they were before."""

    def __init__(self) -> None:
        self._saved: dict[nn.Module, dict[str, tuple[Tensor, Tensor]]] = {}
        self._thread = threading.get_ident()

    def watch(self) -> Any:
        return register_module_forward_pre_hook(self._save)

    def _save(self, module: nn.Module, args: Any) -> None:
        buffers = module._buffers
        if buffers and module not in self._saved and threading.get_ident() == self._thread:
            self._saved[module] = {name: (b, b.clone()) for name, b in buffers.items() if b is not None}

    def restore(self) -> None:
        for module, buffers in self._saved.items():
            for name, (buffer, value) in buffers.items():
                module._buffers[name] = buffer.copy_(value)
