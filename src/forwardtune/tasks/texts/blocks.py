"""What the blocks of a transformer compute of texts, beside what its last layer makes of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from forwardtune.wide import evenly, output_of


def blocks_of(model: nn.Module, depth: int, read: int) -> Sequence[nn.Module]:
    """So many, at equal distances, of the list of `depth` like modules; nothing where there is none."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth and len({type(block) for block in module}) == 1:
            return evenly(list(module), read)
    return ()


@contextmanager
def reading(blocks: Sequence[nn.Module], mask: Tensor, front: int) -> Iterator[list[Tensor]]:
    """While it lasts, each block appends the mean of its output over the tokens of every text, at length one.

    So many tokens in front, which an adapter puts there, are left out, and so is what the mask hides.
    """
    means: list[Tensor] = []
    weights = (mask / mask.sum(1, keepdim=True)).unsqueeze(-1).float()

    def read(module: nn.Module, args: Any, output: Any) -> None:
        hidden = output_of(output)[:, front : front + mask.shape[1]].float()
        means.append(F.normalize((hidden * weights).sum(1), dim=1))

    hooks = [block.register_forward_hook(read) for block in blocks]
    try:
        yield means
    finally:
        for hook in hooks:
            hook.remove()
