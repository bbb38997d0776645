"""Packed weights: parameters of a quantized model, which stay as they are while others are tuned.

bitsandbytes packs two 4-bit weights into a byte of an integer parameter and keeps their scales beside it; torchao has
tensors that wrap integers and scales. Neither package is imported: what is asked here, any such tensor answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

REPACKS = "support_avx512bf16_for_cpu"
"""What bitsandbytes' 4-bit layers call it; see `keep_as_packed`."""


def is_packed(tensor: Tensor) -> bool:
    """Whether a parameter is no array of floating-point numbers."""
    return not tensor.is_floating_point() or _is_wrapper(tensor)


def count_weights(tensor: Tensor) -> int:
    """How many weights are in a parameter, packed or not."""
    state = getattr(tensor, "quant_state", None)
    return tensor.numel() if state is None else math.prod(state.shape)


def parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """The arrays that a tensor consists of: itself, unless it wraps others."""
    if not _is_wrapper(tensor):
        yield tensor
        return
    wrapper: Any = tensor
    for name in wrapper.__tensor_flatten__()[0]:
        yield from parts_of(getattr(wrapper, name))


def scales_in(model: nn.Module) -> dict[str, Tensor]:
    """What a model keeps beside packed parameters, by its name in the `state_dict`; nothing if none is packed."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if not any(is_packed(parameter) for parameter in parameters.values()):
        return {}
    known = parameters.keys() | dict(model.named_buffers(remove_duplicate=False)).keys()
    return {
        name: value
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor) and name not in known and not _is_wrapper(value)
    }


def keep_as_packed(model: nn.Module) -> None:
    """Keeps bitsandbytes from packing 4-bit weights anew in the first forward pass, which would round their scales.

    It does so on some CPUs, in eval mode.
    """
    for module in model.modules():
        if hasattr(module, REPACKS):
            setattr(module, REPACKS, False)


def _is_wrapper(tensor: Tensor) -> bool:
    return hasattr(tensor, "__tensor_flatten__")
