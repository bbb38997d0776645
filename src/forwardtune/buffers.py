"""The buffers of the modules that a closure runs, as they were before it ran.

Modules are found by hooks that are there while the closure runs. Hooks cost time at every call of every module, so they
are set in the first step and in every hundredth; in between, the modules that the closure called, and all their parts,
are looked at without hooks. `torch.compile(model)` returns a module that is seen as a whole; since hooks would make the
compiler start over, none are set after its first step. Inside code that is compiled otherwise (the closure itself,
`model.compile()`) nothing is seen.

Buffers of more than `LARGE` elements (masks, quantised weights) are taken for constants, and not copied until one is
seen to change.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import is_lazy

HOOKS_EVERY = 100
LARGE = 100_000

# Torch warns that a global hook fires for the compiled module as well as for its parts; here that is the purpose.
warnings.filterwarnings("ignore", r"Using `torch.compile\(module\)` when there are global hooks on modules")


class Modules:
    """What is known of the modules that a run's closures call."""

    def __init__(self) -> None:
        self.found: WeakSet[nn.Module] = WeakSet()
        self.large_that_change: set[tuple[int, str]] = set()
        self.compiled = False
        self.swapped = False
        """Whether a module has other buffers while it runs than outside, as in `torch.func.functional_call`."""
        self._steps = 0

    def wants_hooks(self) -> bool:
        """Asked once a step."""
        self._steps += 1
        return self.swapped or (self._steps % HOOKS_EVERY == 1 and not (self.compiled and self._steps > 1))


class _Buffer(NamedTuple):
    tensor: Tensor
    version: int
    value: Tensor | None


class Buffers:
    """The buffers of one step."""

    def __init__(self, modules: Modules) -> None:
        self._modules = modules
        self._hooks = modules.wants_hooks()
        self._before: dict[nn.Module, dict[str, _Buffer]] = {}
        self._replaced: dict[tuple[nn.Module, str], Tensor | None] = {}
        self._depth = 0
        self._thread = threading.get_ident()

    def watch(self, closure: Callable[[], Any]) -> Any:
        """Calls the closure and notes buffers before the modules that it runs change them."""
        if not self._hooks:
            found = list(self._modules.found)
            self._note(found)
            result = closure()
            self._note_replaced(found)
            return result
        self._depth = 0
        with register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._leave):
            result = closure()
        self._hooks = not self._modules.compiled
        for module, buffers in self._before.items():
            for name, before in buffers.items():
                now = module._buffers[name]
                if now is not before.tensor and now is not self._replaced.get((module, name)) and not _scripted(module):
                    self._modules.swapped = True
        return result

    def _enter(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
            return
        self._modules.compiled |= "_orig_mod" in module._modules
        if self._depth == 0:
            self._modules.found.update(part for part in module.modules() if len(part._buffers))
        self._depth += 1
        self._note(self._parts(module))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
            return
        self._depth -= 1
        self._note_replaced(self._parts(module))

    @staticmethod
    def _parts(module: nn.Module) -> Iterable[nn.Module]:
        """The modules to look at when this one is called: its parts too if they will not be called in the open."""
        return module.modules() if "_orig_mod" in module._modules or _scripted(module) else (module,)

    def _note(self, modules: Iterable[nn.Module]) -> None:
        for module in modules:
            if len(module._buffers) and module not in self._before:
                buffers = module._buffers.items()
                self._before[module] = {
                    name: self._snapshot(module, name, b) for name, b in buffers if b is not None and not is_lazy(b)
                }

    def _snapshot(self, module: nn.Module, name: str, buffer: Tensor) -> _Buffer:
        """A buffer with a copy of its value, unless it is taken for a constant or its elements share memory."""
        constant = buffer.numel() > LARGE and (id(module), name) not in self._modules.large_that_change
        expanded = 0 in buffer.stride() and not buffer.is_contiguous()
        return _Buffer(buffer, _version(buffer), None if constant or expanded else buffer.clone())

    def _note_replaced(self, modules: Iterable[nn.Module]) -> None:
        for module in modules:
            if not _scripted(module):
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
                    self._modules.large_that_change.add((id(module), name))
        for (module, name), replacement in self._replaced.items():
            if module._buffers.get(name) is replacement:
                module._buffers[name] = self._before[module][name].tensor
        self._replaced.clear()


def _scripted(module: nn.Module) -> bool:
    """A scripted module calls its parts unseen, and its buffers are new Python objects at every look."""
    return isinstance(module, torch.jit.ScriptModule)


def _version(tensor: Tensor) -> int:
    """How often torch has written to the tensor; inference tensors do not count (and BatchNorm does not tell)."""
    return 0 if tensor.is_inference() else tensor._version
