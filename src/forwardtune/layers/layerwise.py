"""Probes that leave every bit of the weights as it was: a layer's weights move only while it computes.

Before a layer computes they are copied and moved to the probe; afterwards they are put back from the copy, of which
there is one at a time. Parameters that are used outside their layer stay at the probe until the query ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_map_only

from forwardtune.layers.usage import Usage, numbered, tuned_in
from forwardtune.noise.mover import Mover
from forwardtune.noise.outer import OuterMover
from forwardtune.noise.types import Term

Moves = Sequence[tuple[int, Sequence[Term]]]


class Layerwise:
    """The layers of the model that a mover's slots belong to."""

    def __init__(self, mover: Mover | OuterMover) -> None:
        self._mover, self.slots = mover, mover.slots
        self._numbers = numbered(self.slots)
        self._parts: dict[tuple[int, ...], Mover | OuterMover] = {}
        self._held: tuple[int, ...] | None = None
        self._moves: Moves = ()
        self._away: dict[int, Tensor] = {}
        self._moved: list[tuple[int, ...]] = []
        self._spare: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def query(self, moves: Moves, query: Callable[[], Any]) -> Any:
        """What a query returns when all weights have made these moves.

        The first one shows which parameters are used outside their layers, and moves those from then on.
        """
        self._moves = moves
        if self._held is not None:
            return self._made(self._held, query)
        usage = Usage(self.slots, lambda number: self._move((number,)))
        with usage.watching():
            result = self._made((), query)
        self._held = tuple(n for n in range(len(self.slots)) if n in usage.outside or n not in usage.inside)
        return result

    def _made(self, held: tuple[int, ...], query: Callable[[], Any]) -> Any:
        with ExitStack() as hooks:
            if len(held) < len(self.slots):
                hooks.enter_context(register_module_forward_pre_hook(self._depart))
                hooks.enter_context(register_module_forward_hook(self._return, always_call=True))
            try:
                self._move(held)
                return query()
            finally:
                self.restore()

    def restore(self) -> None:
        """Puts back all weights that are away."""
        self._moved.clear()
        self._put_back(tuple(self._away))

    def _depart(self, layer: nn.Module, args: Any) -> None:
        own = tuple(n for n in dict.fromkeys(tuned_in(layer, self._numbers).values()) if n not in self._away)
        self._moved.append(own)
        self._move(own)

    def _return(self, layer: nn.Module, args: Any, output: Any) -> Any:
        own = self._moved.pop()
        if not own:
            return None
        memory = {self.slots[n].tensor.untyped_storage().data_ptr() for n in own}

        def kept(tensor: Tensor) -> Tensor:  # of a layer that returns its weights
            return tensor.clone() if tensor.untyped_storage().data_ptr() in memory else tensor

        output = tree_map_only(Tensor, kept, output)
        self._put_back(own)
        return output

    def _move(self, numbers: tuple[int, ...]) -> None:
        numbers = tuple(number for number in numbers if number not in self._away)
        if not numbers or not any(terms for _, terms in self._moves):
            return
        if numbers not in self._parts:
            self._parts[numbers] = self._mover.part([self.slots[number] for number in numbers])
        with torch._C.DisableTorchFunction():  # which usage would watch
            for number in numbers:
                self._away[number] = self._copy(self.slots[number].tensor)
            self._parts[numbers].chain(self._moves)

    def _copy(self, tensor: Tensor) -> Tensor:
        spare = self._spare.pop((tensor.dtype, tensor.device), None)
        if spare is None or len(spare) < tensor.numel():
            spare = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        spare[: tensor.numel()].view(tensor.shape).copy_(tensor)
        return spare

    def _put_back(self, numbers: tuple[int, ...]) -> None:
        for number in numbers:
            if number in self._away:
                tensor, copy = self.slots[number].tensor, self._away[number]
                with (
                    torch.inference_mode(),
                    torch._C.DisableTorchFunction(),
                ):  # the former lets inference tensors change
                    tensor.copy_(copy[: tensor.numel()].view(tensor.shape))
                del self._away[number]
                kind = tensor.dtype, tensor.device
                self._spare[kind] = max(copy, self._spare.get(kind, copy), key=len)
