"""The buffers of the modules that a closure runs, as they were before it ran.

Modules are found by hooks that are there while the closure runs. What `torch.compile(model)` returns is seen as a
whole; since hooks would make the compiler start over at every step, the modules found beside a compiled one are
remembered and looked at without hooks from then on. Inside code that is compiled otherwise (the closure itself,
`model.compile()`) nothing is seen.

Buffers of more than `LARGE` elements (masks, quantised weights) are taken for constants, and not copied until one is
seen to change.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import is_lazy

LARGE = 100_000
_large_that_change: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()

# Torch warns that a global hook fires for the compiled module as well as for its parts; here that is the purpose.
warnings.filterwarnings("ignore", r"Using `torch.compile\(module\)` when there are global hooks on modules")


class _Buffer(NamedTuple):
    tensor: Tensor
    version: int
    value: Tensor | None


class Buffers:
    """The buffers of one step; `remembered` outlives it and holds modules that are looked at without hooks."""

    def __init__(self, remembered: WeakSet[nn.Module]) -> None:
        self._before: dict[nn.Module, dict[str, _Buffer]] = {}
        self._replaced: dict[tuple[nn.Module, str], Tensor | None] = {}
        self._remembered = remembered
        self._compiled = False
        self._thread = threading.get_ident()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Notes buffers before the modules that run in the block change them."""
        if self._remembered:
            self._note(self._remembered)
            yield
            self._note_replaced(self._remembered)
            return
        with register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._leave):
            yield
        if self._compiled:
            self._remembered.update(self._before)

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._note(self._parts(module))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._note_replaced(self._parts(module))

    def _parts(self, module: nn.Module) -> Iterable[nn.Module]:
        """The modules to look at when this one is called: its own parts too if they will not be called in the open."""
        if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
            return ()
        compiled = "_orig_mod" in module._modules
        self._compiled |= compiled
        return module.modules() if compiled or isinstance(module, torch.jit.ScriptModule) else (module,)

    def _note(self, modules: Iterable[nn.Module]) -> None:
        for module in modules:
            if module not in self._before and len(module._buffers):
                buffers = module._buffers.items()
                self._before[module] = {
                    name: _snapshot(module, name, b) for name, b in buffers if b is not None and not is_lazy(b)
                }

    def _note_replaced(self, modules: Iterable[nn.Module]) -> None:
        for module in modules:
            if not isinstance(module, torch.jit.ScriptModule):  # whose buffers are new Python objects at every look
                for name, before in self._before.get(module, {}).items():
                    if module._buffers.get(name) is not before.tensor:
                        self._replaced[module, name] = module._buffers.get(name)

    def restore(self) -> None:
        """Back to what was noted."""
        for module, buffers in self._before.items():
            for name, before in buffers.items():
                if before.value is not None:
                    with torch.inference_mode(before.tensor.is_inference()):
                        before.tensor.copy_(before.value)
                elif before.version != _version(before.tensor):
                    _large_that_change.setdefault(module, set()).add(name)
        for (module, name), replacement in self._replaced.items():
            if module._buffers.get(name) is replacement:
                module._buffers[name] = self._before[module][name].tensor
        self._replaced.clear()


def _snapshot(module: nn.Module, name: str, buffer: Tensor) -> _Buffer:
    """A buffer with a copy of its value, unless it is taken for a constant or its elements share memory."""
    constant = buffer.numel() > LARGE and name not in _large_that_change.get(module, ())
    expanded = any(size > 1 and stride == 0 for size, stride in zip(buffer.shape, buffer.stride(), strict=True))
    return _Buffer(buffer, _version(buffer), None if constant or expanded else buffer.clone())


def _version(tensor: Tensor) -> int:
    """How often torch has written to the tensor; inference tensors do not count (and BatchNorm does not tell)."""
    return 0 if tensor.is_inference() else tensor._version
