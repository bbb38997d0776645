"""The buffers of the modules that a closure runs, as they were before it ran.

Modules are discovered by hooks, which are set during the first query of each step (and all queries of the first step);
the other queries check the modules known so far, without hooks. `torch.compile(model)` returns a module that is handled
as a whole; since hooks would trigger recompilation, none are set once such a module has been seen. Inside code that is
compiled otherwise (the closure itself, `model.compile()`) no module is discovered.

Buffers of more than `LARGE` elements (masks, quantised weights) are assumed constant, and not copied until one is seen
to change. Buffers that share memory with the weights being tuned are left to the line.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import is_lazy

LARGE = 100_000

# Torch warns that a global hook fires for the compiled module as well as for its parts; here that is intended.
warnings.filterwarnings("ignore", r"Using `torch.compile\(module\)` when there are global hooks on modules")


class Modules:
    """What is known of the modules that a run's closures call."""

    def __init__(self) -> None:
        self.with_buffers: WeakSet[nn.Module] = WeakSet()
        self.large_that_change: set[tuple[int, str]] = set()
        self.compiled = False
        self.steps = 0


class _Saved(NamedTuple):
    tensor: Tensor
    owner: tuple[int, str]
    """The module's id, and the buffer's name there."""
    version: int
    value: Tensor | None


class Buffers:
    """The buffers of one step. `tuned` holds the storages of the weights, which are not restored."""

    def __init__(self, modules: Modules, tuned: frozenset[int]) -> None:
        modules.steps += 1
        self._modules, self._tuned = modules, tuned
        self._queries = 0
        self._thread = threading.get_ident()
        self._saved: dict[int, _Saved] = {}
        self._entered: dict[tuple[nn.Module, str], Tensor] = {}
        self._replaced: dict[tuple[nn.Module, str], tuple[Tensor, Tensor | None]] = {}
        """Buffers that a module reassigned: the first tensor and the latest."""

    def watch(self, closure: Callable[[], Any]) -> Any:
        """Calls the closure and saves buffers before the modules that it runs change them."""
        self._queries += 1
        if self._modules.compiled or (self._queries > 1 and self._modules.steps > 1):
            known = list(self._modules.with_buffers)
            self._note(known)
            try:
                return closure()
            finally:
                self._note_replaced(known)
        with ExitStack() as hooks:
            hooks.enter_context(register_module_forward_pre_hook(self._enter))
            if self._modules.steps == 1 or self._modules.with_buffers:
                hooks.enter_context(register_module_forward_hook(self._leave, always_call=True))
            return closure()

    def _enter(self, module: nn.Module, args: Any) -> None:
        parts = self._parts(module)
        if parts:
            self._note(parts)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._note_replaced(self._parts(module))

    def _parts(self, module: nn.Module) -> Iterable[nn.Module]:
        """The modules to check when this one is called: its parts too if no hook fires for them."""
        compiled = "_orig_mod" in module._modules
        scripted = isinstance(module, torch.jit.ScriptModule)
        if not (compiled or scripted or module._buffers):
            return ()
        if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
            return ()
        self._modules.compiled |= compiled
        return module.modules() if compiled or scripted else (module,)

    def _note(self, modules: Iterable[nn.Module]) -> None:
        for module in modules:
            if len(module._buffers):
                self._modules.with_buffers.add(module)
                for name, buffer in module._buffers.items():
                    if buffer is not None and not is_lazy(buffer):
                        self._entered[module, name] = buffer
                        if id(buffer) not in self._saved:
                            self._saved[id(buffer)] = self._save(module, name, buffer)

    def _save(self, module: nn.Module, name: str, buffer: Tensor) -> _Saved:
        owner = id(module), name
        version = 0 if buffer.is_inference() else buffer._version
        constant = buffer.numel() > LARGE and owner not in self._modules.large_that_change
        value = None if constant or not self._can_be_written(buffer) else buffer.clone()
        return _Saved(buffer, owner, version, value)

    def _can_be_written(self, buffer: Tensor) -> bool:
        if buffer.layout != torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(buffer):
            return False
        expanded = any(size > 1 and stride == 0 for size, stride in zip(buffer.shape, buffer.stride(), strict=True))
        return not expanded and buffer.untyped_storage().data_ptr() not in self._tuned

    def _note_replaced(self, modules: Iterable[nn.Module]) -> None:
        for module in modules:
            if not isinstance(module, torch.jit.ScriptModule):  # whose buffers are new Python objects at every access
                for name in list(module._buffers):
                    old, new = self._entered.get((module, name)), module._buffers[name]
                    if old is not None and new is not old:
                        first, _ = self._replaced.get((module, name), (old, None))
                        self._replaced[module, name] = first, new

    def restore(self) -> None:
        """Restores what was saved."""
        for saved in self._saved.values():
            if saved.value is not None:
                with torch.inference_mode(saved.tensor.is_inference()), torch.no_grad():
                    saved.tensor.copy_(saved.value)
            elif not saved.tensor.is_inference() and saved.version != saved.tensor._version:
                self._modules.large_that_change.add(saved.owner)
        for (module, name), (first, latest) in self._replaced.items():
            if module._buffers.get(name) is latest:
                module._buffers[name] = first
        self._replaced.clear()
