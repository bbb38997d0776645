"""Checks of what users pass, with errors that say what to do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Set
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from forwardtune.errors import InvalidArgumentError

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


def is_number(value: Any) -> bool:
    return (isinstance(value, Real) and not isinstance(value, bool)) or (
        isinstance(value, Tensor) and value.numel() == 1
    )


def plain(value: Any) -> Any:
    """A number as Python's own int or float (state must not hold numpy's or tensors); anything else as it is."""
    if not is_number(value):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def check_positive(**settings: Any) -> None:
    """Refuses settings that are not finite numbers above zero."""
    for name, value in settings.items():
        if not is_number(value) or not 0 < value < math.inf:
            raise InvalidArgumentError(f"{name} must be a number above zero and finite, not {value!r}")


def check_integer(least: int, **settings: Any) -> None:
    """Refuses settings that are not integers of at least the given size."""
    for name, value in settings.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InvalidArgumentError(f"{name} must be an integer of at least {least}, not {value!r}")


def as_groups(params: Params) -> list[dict[str, Any]]:
    if isinstance(params, Tensor | torch.nn.Module):
        raise InvalidArgumentError(
            f"pass a list of parameters, for instance model.parameters(), not a {type(params).__name__}"
        )
    if isinstance(params, Set):
        raise InvalidArgumentError("the noise depends on the order of the parameters; pass a list, not a set")
    items: list[Any] = list(params)
    if not items:
        raise InvalidArgumentError("the list of parameters is empty; a generator can be used only once")
    return items if isinstance(items[0], dict) else [{"params": items}]


def tensors_of(params: Any) -> dict[str, Any]:
    """A group's tensors, each once, and their names if they came with names."""
    items = [params] if isinstance(params, Tensor) else list(params)
    if not items:
        raise InvalidArgumentError("a parameter group is empty; give it parameters or leave it out")
    named = isinstance(items[0], tuple)
    if any(isinstance(item, tuple) != named for item in items):
        raise InvalidArgumentError("name all parameters of a group or none")
    pairs = items if named else [("", item) for item in items]
    for _, tensor in pairs:
        if not isinstance(tensor, Tensor):
            raise InvalidArgumentError(f"only tensors can be tuned, not {type(tensor).__name__}")
    first = {tensor: name for name, tensor in reversed(pairs)}
    tensors = list(dict.fromkeys(tensor for _, tensor in pairs))
    return {"params": tensors, "param_names": [first[tensor] for tensor in tensors]} if named else {"params": tensors}
