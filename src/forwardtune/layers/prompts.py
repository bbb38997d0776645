"""peft's prompts: one row for all examples, computed before anyone knows how many there are, and then repeated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def is_prompt(layer: nn.Module) -> bool:
    kind = type(layer)
    return kind.__name__ == "PromptEmbedding" and kind.__module__.startswith("peft.tuners.prompt_tuning.")


class RepeatedRow(Tensor):
    """A row which, repeated for n examples, is `own(n)`; to everything else it is a plain tensor."""

    own: Callable[[int], Tensor]

    @staticmethod
    def of(row: Tensor, own: Callable[[int], Tensor]) -> RepeatedRow:
        prompt = row.as_subclass(RepeatedRow)
        prompt.own = own
        return prompt

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.repeat:
                prompt, examples, *others = args
                return prompt.own(examples).repeat(1, *others)
            return func(*args, **kwargs or {})
