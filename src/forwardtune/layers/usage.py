"""Which layers use which parameters, as queries show."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from forwardtune.noise.types import Slot

CONTAINERS = (nn.ParameterDict, nn.ParameterList)
"""They are never called: what they hold belongs to the layer that holds them."""


def numbered(slots: Sequence[Slot]) -> dict[int, int]:
    """The position of each slot among them, by the address of its memory."""
    return {slot.tensor.data_ptr(): number for number, slot in enumerate(slots) if slot.tensor.numel()}


def tuned_in(layer: nn.Module, numbers: Mapping[int, int]) -> dict[str, int]:
    """Those of a layer's own parameters that are tuned: their numbers, by their names in the layer."""
    return {name: numbers[address(tensor)] for name, tensor in _own(layer) if address(tensor) in numbers}


def address(tensor: Tensor) -> int:
    """Where a tensor's memory begins; 0 for one that has none of its own, being a wrapper around others."""
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def _own(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in layer._parameters.items():
        if tensor is not None:
            yield name, tensor
    for name, child in layer._modules.items():
        if isinstance(child, CONTAINERS):
            yield from ((f"{name}.{key}", tensor) for key, tensor in child.named_parameters(recurse=False))


GIVE = {"data", "T", "mT", "H", "mH", "real"}
"""The attributes of a tensor that give its elements."""
ASK = {"size", "dim", "numel", "nelement", "stride", "storage_offset", "data_ptr", "element_size", "get_device"}
ASK |= {"untyped_storage", "has_names", "__hash__", "__repr__", "__format__", "__len__"}
"""Methods that ask something about a tensor but do not give its elements."""


@lru_cache(maxsize=4096)
def gives_elements(function: Any) -> bool:
    """Whether a function of torch does more with a tensor than to ask about its shape or its memory."""
    name = getattr(function, "__name__", "")
    if name == "__get__":
        return getattr(function.__self__, "__name__", "") in GIVE
    return name not in ASK and not name.startswith("is_") and name != "__set__"


class Usage(TorchFunctionMode):
    """Watches queries: a slot that is used while none of its layers computes is told to `on_outside`, just before.

    Of compiled modules the parts are not seen, nor what other threads do.
    """

    def __init__(self, slots: Sequence[Slot], on_outside: Callable[[int], None]) -> None:
        super().__init__()
        self._numbers, self._on_outside = numbered(slots), on_outside
        self._computing: list[set[int]] = []
        self._thread = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        self._computing, self._thread = [], threading.get_ident()
        with (
            register_module_forward_pre_hook(self._begin),
            register_module_forward_hook(self._end, always_call=True),
            self,
        ):
            yield

    def _is_seen(self) -> bool:
        return not torch.compiler.is_compiling() and threading.get_ident() == self._thread

    def _begin(self, layer: nn.Module, args: Any) -> None:
        if self._is_seen():
            self._computing.append(set(tuned_in(layer, self._numbers).values()))

    def _end(self, layer: nn.Module, args: Any, output: Any) -> None:
        if self._is_seen():
            self._computing.pop()

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not torch.compiler.is_compiling() and gives_elements(function):
            for leaf in _leaves((*args, *(kwargs or {}).values())):
                number = self._numbers.get(address(leaf))
                if number is not None and not any(number in own for own in self._computing):
                    self._on_outside(number)
        return function(*args, **(kwargs or {}))


def _leaves(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _leaves(value)
