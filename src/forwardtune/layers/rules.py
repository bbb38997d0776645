"""What each kind of layer computes when every example sees weights of its own.

With `W + c r_i s_i^T` in place of `W`, example i's output changes by `c (s_i . x_i) r_i`: two passes over activations
instead of one over the weights. A rule is given a layer, its input and output, and the nudges of its parameters, and
returns the output with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forwardtune.noise.outer import Factors


class Nudge(NamedTuple):
    """How a parameter is perturbed: `amplitude` times the direction of each example's line.

    `factors` have one row per example.
    """

    amplitude: float
    factors: Factors


Nudges = Mapping[str, Nudge]
"""By the parameter's name in its layer."""
Rule = Callable[[Any, Tensor, Tensor, Nudges], Tensor]


def linear(layer: nn.Linear, x: Tensor, y: Tensor, nudges: Nudges) -> Tensor:
    if "weight" in nudges:
        amplitude, (rows, columns) = nudges["weight"]
        y = _add_outer(y, x, columns, rows, amplitude)
    return _with_bias(y, nudges, -1)


def transposed(layer: Any, x: Tensor, y: Tensor, nudges: Nudges) -> Tensor:
    """GPT-2's Conv1D, a linear map whose weight has inputs for rows."""
    if "weight" in nudges:
        amplitude, (rows, columns) = nudges["weight"]
        y = _add_outer(y, x, rows, columns, amplitude)
    return _with_bias(y, nudges, -1)


def _add_outer(y: Tensor, x: Tensor, inputs: Tensor, outputs: Tensor, amplitude: float) -> Tensor:
    """`y_i + amplitude (inputs_i . x_i) outputs_i` for every position of every example."""
    flat = x.flatten(1, -2) if x.ndim > 2 else x[:, None]
    along = torch.bmm(flat, inputs.to(x.dtype)[:, :, None])
    change = torch.bmm(along * amplitude, outputs.to(x.dtype)[:, None, :])
    return y + change.view(len(x), *x.shape[1:-1], -1)


def embedding(layer: nn.Embedding, x: Tensor, y: Tensor, nudges: Nudges) -> Tensor:
    amplitude, (rows, columns) = nudges["weight"]
    sign = rows.gather(1, x.flatten(1)).view(x.shape).to(y.dtype)
    return y + amplitude * sign[..., None] * _spread(columns, y, -1)


def convolution(layer: nn.Conv1d | nn.Conv2d, x: Tensor, y: Tensor, nudges: Nudges) -> Tensor:
    """Input channels are summed with their signs, so that one channel per group and example is convolved."""
    if "weight" in nudges:
        amplitude, (rows, columns, taps) = nudges["weight"]
        b, groups, spatial = len(x), layer.groups, layer.weight.dim() - 2
        grouped = x.reshape(b, groups, x.shape[1] // groups, -1)
        summed = torch.einsum("bgcn,bc->bgn", grouped, columns.to(x.dtype)).reshape(1, b * groups, *x.shape[2:])
        kernels = taps.to(x.dtype).repeat_interleave(groups, 0).view(b * groups, 1, *layer.kernel_size)
        convolve: Any = F.conv1d if spatial == 1 else F.conv2d
        done = convolve(summed, kernels, None, layer.stride, layer.padding, layer.dilation, b * groups)
        done = done.view(b, groups, *done.shape[2:]).repeat_interleave(rows.shape[1] // groups, 1)
        y = y + done * (amplitude * _spread(rows, y, 1))
    return _with_bias(y, nudges, 1)


def norm(layer: Any, x: Tensor, y: Tensor, nudges: Nudges) -> Tensor:
    """LayerNorm, GroupNorm, BatchNorm, RMSNorm: weight and bias are applied to what is normalized."""
    axis = -1 if isinstance(layer, nn.LayerNorm) or _is_rms_norm(layer) else 1
    if "weight" in nudges:
        amplitude, (signs,) = nudges["weight"]
        y = y + (amplitude * normalized(layer, x) * _spread(signs, y, axis)).to(y.dtype)
    return _with_bias(y, nudges, axis)


def normalized(layer: Any, x: Tensor) -> Tensor:
    """What a norm multiplies by its weight."""
    if isinstance(layer, nn.LayerNorm):
        return F.layer_norm(x, layer.normalized_shape, None, None, layer.eps)
    if isinstance(layer, nn.GroupNorm):
        return F.group_norm(x, layer.num_groups, None, None, layer.eps)
    if isinstance(layer, nn.RMSNorm):
        return F.rms_norm(x, layer.normalized_shape, None, layer.eps)
    if _is_rms_norm(layer):  # which compute in float32
        eps = next(getattr(layer, name) for name in ("variance_epsilon", "eps") if hasattr(layer, name))
        return x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    mean, variance = layer.running_mean, layer.running_var
    if layer.training or mean is None:
        return F.batch_norm(x, None, None, None, None, True, 0.0, layer.eps)
    return F.batch_norm(x, mean, variance, None, None, False, 0.0, layer.eps)


def _with_bias(y: Tensor, nudges: Nudges, axis: int) -> Tensor:
    if "bias" not in nudges:
        return y
    amplitude, (signs,) = nudges["bias"]
    return y + amplitude * _spread(signs, y, axis)


def _spread(signs: Tensor, y: Tensor, axis: int) -> Tensor:
    """Signs (examples, n) in the shape of y, n along the axis."""
    shape = [1] * y.ndim
    shape[0], shape[axis] = signs.shape
    return signs.to(y.dtype).view(shape)


def _is_rms_norm(layer: Any) -> bool:
    """Torch's, and those that most language models bring along, which compute the same."""
    return isinstance(layer, nn.RMSNorm) or type(layer).__name__.endswith(("RMSNorm", "T5LayerNorm"))


def scaling(layer: Any, x: Tensor, y: Tensor, nudges: Nudges) -> Tensor:
    """peft's IA3: a vector that the input of a linear map is multiplied by, or its output."""
    ((amplitude, (rows, columns)),) = nudges.values()
    signs = (rows[:, :, None] * columns[:, None, :]).flatten(1)
    change: Tensor
    if not layer.is_feedforward:
        change = layer.base_layer(x) * (amplitude * _spread(signs, y, -1))
        return y + change.to(y.dtype)
    change = layer.base_layer(x * (amplitude * _spread(signs, x, -1)))
    if layer.base_layer.bias is not None:
        change = change - layer.base_layer(torch.zeros_like(x))
    return y + change.to(y.dtype)


def rule_of(layer: Any) -> Rule | None:
    """The rule for a layer; None if there is none."""
    kind = type(layer)
    if kind in RULES:
        strange = isinstance(layer, nn.Conv1d | nn.Conv2d) and layer.padding_mode != "zeros"
        strange |= isinstance(layer, nn.LayerNorm | nn.RMSNorm) and len(layer.normalized_shape) > 1
        strange |= isinstance(layer, nn.Embedding) and layer.max_norm is not None
        return None if strange else RULES[kind]
    if kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers."):
        return transposed
    if kind.__name__.startswith("Linear") and kind.__module__.startswith("peft.tuners.ia3."):
        return None if layer.disable_adapters or layer.merged or len(layer.active_adapters) > 1 else scaling
    return norm if _is_rms_norm(layer) and set(dict(layer.named_parameters(recurse=False))) == {"weight"} else None


RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear,
    nn.Embedding: embedding,
    nn.Conv1d: convolution,
    nn.Conv2d: convolution,
    nn.LayerNorm: norm,
    nn.RMSNorm: norm,
    nn.GroupNorm: norm,
    nn.BatchNorm1d: norm,
    nn.BatchNorm2d: norm,
}
