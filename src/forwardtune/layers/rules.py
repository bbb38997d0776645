"""What each kind of layer computes when every example sees weights of its own.

With `W + c r_i s_i^T` in place of `W`, example i's output changes by `c (s_i . x_i) r_i`: two passes over activations
instead of one over the weights. A rule is given a layer, its input and output, and the nudges of its parameters, and
returns the output with them, for which it may use the memory of the output.
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
    return _linear(x, y, nudges, lambda rows, columns: (columns, rows))


def transposed(layer: Any, x: Tensor, y: Tensor, nudges: Nudges) -> Tensor:
    """GPT-2's Conv1D, a linear map whose weight has inputs for rows."""
    return _linear(x, y, nudges, lambda rows, columns: (rows, columns))


def _linear(x: Tensor, y: Tensor, nudges: Nudges, order: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Tensor:
    """`y_i + (c s_i . x_i) r_i + c' b_i` for every position of every example, in one pass over y."""
    left, right = [], []
    if "weight" in nudges:
        amplitude, (rows, columns) = nudges["weight"]
        inputs, outputs = order(rows, columns)
        flat = x.flatten(1, -2) if x.ndim > 2 else x[:, None]
        left.append(torch.bmm(flat, (amplitude * inputs.to(x.dtype))[:, :, None]))
        right.append(outputs)
    if "bias" in nudges:
        amplitude, (signs,) = nudges["bias"]
        left.append(y.new_full((len(y), 1, 1), amplitude))
        right.append(signs)
    positions = max(part.shape[1] for part in left)
    factors = torch.cat([part.expand(-1, positions, -1) for part in left], -1)
    y.view(len(y), -1, y.shape[-1]).baddbmm_(factors, torch.stack(right, 1).to(y.dtype))
    return y


def embedding(layer: nn.Embedding, x: Tensor, y: Tensor, nudges: Nudges) -> Tensor:
    amplitude, (rows, columns) = nudges["weight"]
    signs = rows.gather(1, x.reshape(len(x), -1)).view(x.shape)
    return y.addcmul_(signs.to(y.dtype)[..., None], amplitude * _spread(columns, y, -1))


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
        y.addcmul_(done, amplitude * _spread(rows, y, 1))
    return _with_bias(y, nudges, 1)


def norm(layer: Any, x: Tensor, y: Tensor, nudges: Nudges) -> Tensor:
    """LayerNorm, GroupNorm, BatchNorm, RMSNorm: weight and bias are applied to what is normalized."""
    axis = -1 if isinstance(layer, nn.LayerNorm) or _is_rms_norm(layer) else 1
    if "weight" in nudges:
        amplitude, (signs,) = nudges["weight"]
        y.addcmul_(normalized(layer, x).to(y.dtype), amplitude * _spread(signs, y, axis))
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
    return y.add_(amplitude * _spread(signs, y, axis))


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
