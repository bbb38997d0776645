"""Which layers use which parameters, as one query shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from forwardtune.noise.types import Slot

CONTAINERS = (nn.ParameterDict, nn.ParameterList)
"""They are never called: what they hold belongs to the layer that holds them."""


def numbered(slots: Sequence[Slot]) -> dict[int, int]:
    """The position of each slot among them, by the address of its memory."""
    return {slot.tensor.data_ptr(): number for number, slot in enumerate(slots) if slot.tensor.numel()}


def tuned_in(layer: nn.Module, numbers: Mapping[int, int]) -> dict[str, int]:
    """Those of a layer's own parameters that are tuned: their numbers, by their names in the layer."""
    return {name: numbers[tensor.data_ptr()] for name, tensor in _own(layer) if tensor.data_ptr() in numbers}


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
ASK |= {"untyped_storage", "has_names", "type", "__hash__", "__repr__", "__format__", "__len__"}
"""Methods that ask something about a tensor but do not give its elements."""


def gives_elements(function: Any) -> bool:
    """Whether a function of torch does more with a tensor than to ask about its shape or its memory."""
    name = getattr(function, "__name__", "")
    if name == "__get__":
        return getattr(function.__self__, "__name__", "") in GIVE
    return name not in ASK and not name.startswith("is_") and name != "__set__"


class Usage(TorchFunctionMode):
    """Watches a query: which slots are used while their layer computes (`inside`), and which otherwise.

    `on_outside` is told of the latter, each before its first use. Of `torch.compile`'s modules the parts are not seen:
    all slots count as used outside.
    """

    def __init__(self, slots: Sequence[Slot], on_outside: Callable[[int], None]) -> None:
        super().__init__()
        self._numbers, self._on_outside = numbered(slots), on_outside
        self._computing: list[set[int]] = []
        self.inside: set[int] = set()
        self.outside: set[int] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        with (
            register_module_forward_pre_hook(self._begin),
            register_module_forward_hook(self._end, always_call=True),
            self,
        ):
            yield

    def _begin(self, layer: nn.Module, args: Any) -> None:
        if type(layer).__name__ == "OptimizedModule":
            for number in self._numbers.values():
                self._use_outside(number)
        self._computing.append(set(tuned_in(layer, self._numbers).values()))

    def _end(self, layer: nn.Module, args: Any, output: Any) -> None:
        self._computing.pop()

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if gives_elements(function):
            for leaf in tree_leaves([args, kwargs]):
                if isinstance(leaf, Tensor) and (number := self._numbers.get(_address(leaf))) is not None:
                    if any(number in own for own in self._computing):
                        self.inside.add(number)
                    else:
                        self._use_outside(number)
        return function(*args, **(kwargs or {}))

    def _use_outside(self, number: int) -> None:
        if number not in self.outside:
            self.outside.add(number)
            self._on_outside(number)


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a wrapper around other tensors
        return 0
