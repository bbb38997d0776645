"""What layers compute in: forward passes in bfloat16, with the weights and the losses in float32.

Autocast rounds a layer's weights and inputs as it computes. Convolutions are prepared for it: the channels are last in
memory, and taps of a kernel that only ever see padding, as eight of nine do on an image of one pixel, are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

COMPUTE = ("float32", "bfloat16")


def computed(dtype: str, device: torch.device, forward: Callable[[], Tensor]) -> Tensor:
    """What a forward pass in this dtype returns, in float32; `"float32"` leaves it as it is."""
    if dtype == "float32":
        return forward()
    # Weights move between two uses, so a rounded copy must not be used twice.
    with torch.autocast(device.type, getattr(torch, dtype), cache_enabled=False), _Convolutions():
        return forward().float()


class _Convolutions(TorchFunctionMode):
    """Convolutions of images are made by `convolution`."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.conv2d and not kwargs and len(args) == 7 and not isinstance(args[4], str):
            return convolution(*args)
        return func(*args, **(kwargs or {}))


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], groups: int,
) -> Tensor:  # fmt: skip
    """`F.conv2d` without the taps that only see padding, and with the channels last in memory."""
    axes = [taps(x.shape[2 + i], weight.shape[2 + i], stride[i], padding[i], dilation[i]) for i in (0, 1)]
    for i, (first, last, _, _) in enumerate(axes):
        weight = weight.narrow(2 + i, first, last - first + 1)
    (_, _, top, bottom), (_, _, left, right) = axes
    x, weight = (
        tensor.to(torch.get_autocast_dtype(x.device.type), memory_format=torch.channels_last) for tensor in (x, weight)
    )
    if top != bottom or left != right or min(top, left) < 0:
        x, top, left = F.pad(x, (left, right, top, bottom)), 0, 0
    return F.conv2d(x, weight, bias, stride, (top, left), dilation, groups)


def taps(size: int, kernel: int, stride: int, padding: int, dilation: int) -> tuple[int, int, int, int]:
    """The first and last tap that see data along an axis, and the padding that remains before and after it.

    >>> taps(1, 3, 1, 1, 1)  # a pixel under the middle of three taps
    (1, 1, 0, 0)
    >>> taps(8, 3, 1, 1, 1)
    (0, 2, 1, 1)
    """
    reach = ((size + 2 * padding - dilation * (kernel - 1) - 1) // stride) * stride - padding  # of the last output
    seen = [tap for tap in range(kernel) if reach + tap * dilation >= 0 and tap * dilation - padding < size]
    if len(seen) in (0, kernel):
        return 0, kernel - 1, padding, padding
    first, last = seen[0], seen[-1]
    return first, last, padding - first * dilation, reach + last * dilation - (size - 1)
