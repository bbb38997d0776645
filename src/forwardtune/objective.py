"""The user's closure as a function of the weights alone.

A step compares losses, so its queries must differ in nothing but the weights. Each query starts from the same state of
torch's random generators (the CPU's and those of the parameters' devices) and of the buffers of every module that runs.
The state that the last query leaves behind stays: afterwards the generators and BatchNorm's running statistics have
advanced as if the closure had been called once.

Random numbers that are not torch's, and state that is not a module's buffer, are not rewound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from numbers import Complex, Real
from typing import Any

import torch
from torch import Tensor

from forwardtune.buffers import Buffers, Modules
from forwardtune.errors import InvalidArgumentError
from forwardtune.noise import Field

Closure = Callable[[], Any]


class Objective:
    """The closure as one step queries it: call it for the loss at the current weights."""

    def __init__(self, closure: Closure, field: Field, modules: Modules, *, by_example: bool = False) -> None:
        self._closure, self._by_example = closure, by_example
        self._generators = _Generators(device for device in field.devices if device.type != "cpu")
        self._buffers = Buffers(modules, field.storages)
        self._last: Any = None
        self.queries = 0

    def __call__(self) -> float:
        """The loss; of losses by example, their mean."""
        loss = self.query()
        if self._by_example and isinstance(loss, Tensor):
            loss = loss.detach().to(torch.float64).mean()
        return _as_float(loss)

    def query(self) -> Any:
        """What the closure returns."""
        if self.queries:
            self.rewind()
        self.queries += 1
        torch.clear_autocast_cache()  # it may hold casts of the weights before the move
        self._last = self._buffers.watch(self._closure)
        return self._last

    def discount(self) -> None:
        """Leaves the latest query out of the count, since it is made once more."""
        self.queries -= 1
        self.rewind()

    def rewind(self, *, generators: bool = True) -> None:
        """Restores the state before the first query."""
        self._buffers.restore()
        if generators:
            self._generators.restore()

    def like_closure(self, loss: float) -> Tensor | float:
        """A loss in the closure's own type: a tensor if it returns tensors."""
        if self.queries == 0:
            return torch.tensor(loss)
        if not isinstance(self._last, Tensor):
            return loss
        dtype = self._last.dtype if self._last.is_floating_point() else torch.get_default_dtype()
        return torch.scalar_tensor(loss, dtype=dtype, device=self._last.device)


def _as_float(loss: Any) -> float:
    shape = tuple(getattr(loss, "shape", ()))
    if math.prod(shape) != 1:
        kind = "a tensor" if isinstance(loss, Tensor) else "an array"
        raise InvalidArgumentError(
            f"the closure must return one number, not {kind} of shape {shape}; reduce it, for instance with .mean()"
        )
    if hasattr(loss, "item"):
        loss = loss.item()
    is_complex = isinstance(loss, Complex) and not isinstance(loss, Real)
    if isinstance(loss, str) or is_complex or not hasattr(loss, "__float__"):
        raise InvalidArgumentError(
            f"the closure must return the loss as a tensor or a real number, not {type(loss).__name__}"
        )
    return float(loss)


class _Generators:
    """The state of torch's generators at the time of construction."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._cpu = torch.get_rng_state()
        self._others = [(device, torch.get_device_module(device).get_rng_state(device)) for device in devices]

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        for device, state in self._others:
            torch.get_device_module(device).set_rng_state(state, device)
