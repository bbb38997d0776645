"""Which layers use which parameters, as one query shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
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


class Usage(TorchFunctionMode):
    """Watches a query: `inside` are the slots that were used while their layer computed, `outside` the others.

    Of `torch.compile`'s modules the parts are not seen: then `compiled` is True.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        super().__init__()
        self._numbers = numbered(slots)
        self._computing: list[set[int]] = []
        self.inside: set[int] = set()
        self.outside: set[int] = set()
        self.compiled = False

    def __call__(self, query: Callable[[], Any]) -> Any:
        with ExitStack() as watching:
            watching.enter_context(register_module_forward_pre_hook(self._begin))
            watching.enter_context(register_module_forward_hook(self._end, always_call=True))
            watching.enter_context(self)
            return query()

    def _begin(self, layer: nn.Module, args: Any) -> None:
        self.compiled |= type(layer).__name__ == "OptimizedModule"
        self._computing.append(set(tuned_in(layer, self._numbers).values()))

    def _end(self, layer: nn.Module, args: Any, output: Any) -> None:
        self._computing.pop()

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):  # more than a question about a tensor
            for leaf in tree_leaves([args, kwargs]):
                if isinstance(leaf, nn.Parameter) and leaf.data_ptr() in self._numbers:
                    number = self._numbers[leaf.data_ptr()]
                    used = self.inside if any(number in own for own in self._computing) else self.outside
                    used.add(number)
        return result
