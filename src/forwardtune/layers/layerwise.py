"""Probes that leave every bit of the weights as it was: a layer's weights move only while it computes.

Before a layer computes they are copied and moved to the probe; afterwards they are put back from the copy, of which
there is one at a time. A parameter that is used outside its layer moves just before that, and stays until the query
ends. One that was not seen to be used (by a compiled or scripted function, a fused layer, another thread, or not at
all) is held from then on: it moves before the query and stays until it ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_map_only

from forwardtune.layers.usage import Usage, numbered, tuned_in
from forwardtune.noise.mover import Mover
from forwardtune.noise.outer import OuterMover
from forwardtune.noise.types import Slot, Term

Moves = Sequence[tuple[int, Sequence[Term]]]


def usual_probes(slots: Iterable[Slot]) -> Literal["layerwise", "in-place"]:
    """How probes of these are made unless that is chosen: layer by layer if any has 16 bits."""
    return "layerwise" if any(slot.tensor.element_size() == 2 for slot in slots) else "in-place"


class Layerwise:
    """The layers of the model that a mover's slots belong to.

    `holding` is entered while weights move or return, to hold signals back; `repeated` is called before a query is made
    once more.
    """

    def __init__(self, mover: Mover | OuterMover) -> None:
        self._mover, self.slots = mover, mover.slots
        self.holding: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.repeated: Callable[[], None] = lambda: None
        self._numbers, self._usage = numbered(self.slots), Usage(self.slots, lambda number: self._move((number,)))
        self._parts: dict[tuple[int, ...], Mover | OuterMover] = {}
        self._moves: Moves = ()
        self.held: tuple[int, ...] = ()
        self._seen: set[int] = set()
        self._away: dict[int, Tensor] = {}
        self._moved: list[tuple[int, ...]] = []
        self._spare: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._thread = 0

    def query(self, moves: Moves, query: Callable[[], Any]) -> Any:
        """What a query returns when all weights have made these moves.

        It is repeated if a weight was not seen to be used that is not held yet.
        """
        self._moves = [move for move in moves if move[1]]
        result = self._made(query)
        unseen = tuple(n for n in self._numbers.values() if n not in self._seen)
        if unseen and self._moves:
            self.held = (*self.held, *unseen)
            self.repeated()
            result = self._made(query)
        return result

    def _made(self, query: Callable[[], Any]) -> Any:
        self._seen, self._thread = set(), threading.get_ident()
        try:
            self._move(self.held)
            if len(self.held) == len(self._numbers) or not self._moves:
                return query()
            with (
                register_module_forward_pre_hook(self._depart),
                register_module_forward_hook(self._return, always_call=True),
                self._usage.watching(),
            ):
                return query()
        finally:
            self.restore()

    def restore(self) -> None:
        """Puts back all weights that are away."""
        self._moved.clear()
        self._put_back(tuple(self._away))

    def _depart(self, layer: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling() and threading.get_ident() == self._thread:
            own = dict.fromkeys(tuned_in(layer, self._numbers).values())
            self._moved.append(tuple(n for n in own if n not in self._away))
            self._move(self._moved[-1])

    def _return(self, layer: nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
            return None
        own = self._moved.pop()
        if not own:
            return None
        memory = {_storage(self.slots[n].tensor) for n in own}

        def kept(tensor: Tensor) -> Tensor:  # of a layer that returns its weights
            return tensor.clone() if _storage(tensor) in memory else tensor

        output = tree_map_only(Tensor, kept, output)
        self._put_back(own)
        return output

    def _move(self, numbers: tuple[int, ...]) -> None:
        numbers = tuple(number for number in numbers if number not in self._away)
        if not numbers or not self._moves:
            return
        self._seen.update(numbers)
        if numbers not in self._parts:
            self._parts[numbers] = self._mover.part([self.slots[number] for number in numbers])
        with self.holding(), torch._C.DisableTorchFunction():  # which usage would watch
            for number in numbers:
                self._away[number] = self._copy(self.slots[number].tensor)
            self._parts[numbers].chain(self._moves)

    def _copy(self, tensor: Tensor) -> Tensor:
        spare = self._spare.pop((tensor.dtype, tensor.device), None)
        if spare is None or len(spare) < tensor.numel():
            with torch.inference_mode(False):
                spare = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        with torch.inference_mode():
            spare[: tensor.numel()].view(tensor.shape).copy_(tensor)
        return spare

    def _put_back(self, numbers: tuple[int, ...]) -> None:
        with self.holding(), torch.inference_mode(), torch._C.DisableTorchFunction():  # inference tensors may change
            for number in numbers:
                if number in self._away:
                    tensor, copy = self.slots[number].tensor, self._away[number]
                    tensor.copy_(copy[: tensor.numel()].view(tensor.shape))
                    del self._away[number]
                    kind = tensor.dtype, tensor.device
                    self._spare[kind] = max(copy, self._spare.get(kind, copy), key=len)


def _storage(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a wrapper around others
        return 0
