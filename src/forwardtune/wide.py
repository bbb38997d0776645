"""A wide head: one that reads, beside its own input, what layers below it computed.

What a pretrained model knows of new data is seldom all in its last layer: that of an ImageNet network at 32 x 32 pixels
has a single position left, while the layers before it still see strokes and edges. A head that reads them all, fitted
by `forwardtune.heads`, costs one forward pass per example.

Maps are averaged over the cells of a grid, sequences over their positions. The new weights are zero at first, so that
a widened model computes what it did before.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forwardtune.errors import InvalidArgumentError

WIDTH = 8192
"""Numbers that a wide head reads beside its own input, about: the layers have equal shares."""

Shape = tuple[int, ...]
T = TypeVar("T")


class Reading:
    """A hook of a layer that keeps its output, averaged, until the head of the same pass takes it.

    cells: of the grid over a map, on either axis.
    """

    def __init__(self, layer: str, cells: int) -> None:
        self.layer, self.cells = layer, cells
        self._kept: dict[int, Tensor] = {}  # by thread

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._kept[get_ident()] = averaged(output_of(output), self.cells)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}}

    def take(self) -> Tensor:
        try:
            return self._kept.pop(get_ident())
        except KeyError:
            raise InvalidArgumentError(
                f"the wide head reads {self.layer!r}, which did not run before it; call the whole model"
            ) from None


class WideHead(nn.Module):
    """A linear map of a head's own input and of what readings keep. `widen_head` makes one."""

    def __init__(self, linear: nn.Linear, readings: Sequence[Reading]) -> None:
        super().__init__()
        self.linear, self.readings = linear, list(readings)

    def forward(self, x: Tensor) -> Tensor:
        read = [reading.take().to(x.dtype) for reading in self.readings]
        output: Tensor = self.linear(torch.cat([x, *read], 1))
        return output

    def extra_repr(self) -> str:
        return "reads " + ", ".join(
            f"{reading.layer} ({reading.cells} x {reading.cells})" if reading.cells > 1 else reading.layer
            for reading in self.readings
        )


@torch.no_grad()
def widen_head(
    model: nn.Module,
    head: str | nn.Linear,
    inputs: Any,
    *,
    layers: Sequence[str] | None = None,
    width: int = WIDTH,
    forward: Callable[[Any], Any] | None = None,
) -> WideHead:
    """Puts a wide head in the place of a linear one; the model computes the same until it is fitted or tuned.

    head: the last `Linear` in the model, or its name, which is that of the wide head then: `fit_head` takes it.
    inputs: those of any batch, which the model is called with once.
    layers: the names of those that are read, each of which runs once. By default, the last layer at each resolution of
        a network for images (N, C, H, W), or the blocks of a transformer (N, T, C).
    width: how many numbers are read in all, about.
    forward: computes the outputs from inputs, if that takes more than calling the model with them.

    >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    >>> widen_head(net, "4", torch.zeros(2, 1, 8, 8), width=16)
    WideHead(
      reads 1 (2 x 2)
      (linear): Linear(in_features=20, out_features=2, bias=True)
    )
    """
    modules: dict[str, nn.Module] = dict(model.named_modules())
    if isinstance(head, nn.Module):
        head = next((name for name, module in modules.items() if module is head), "")
    old = modules.get(head) if head else None
    if type(old) is not nn.Linear or not old.weight.is_floating_point():
        kind = "no layer of the model" if old is None else f"a {type(old).__name__}"
        raise InvalidArgumentError(f"the head {head!r} is {kind}; name the Linear that the model ends with")
    if width < 1:
        raise InvalidArgumentError(f"width must be at least 1, not {width}")
    shapes = _shapes(model, head, modules, partial(forward or model, inputs))
    read = _usual(modules, shapes, width) if layers is None else _chosen(modules, shapes, layers)
    readings = [Reading(name, _cells(shapes[name], width // len(read))) for name in read]
    more = sum(_features(shapes[reading.layer], reading.cells) for reading in readings)
    size, dtype = (old.in_features + more, old.out_features, old.bias is not None), old.weight.dtype
    linear = nn.Linear(*size, device="meta", dtype=dtype).to_empty(device=old.weight.device)
    linear.weight.zero_()
    linear.weight[:, : old.in_features] = old.weight
    if old.bias is not None:
        linear.bias.copy_(old.bias)
    wide = WideHead(linear.requires_grad_(old.weight.requires_grad), readings).train(old.training)
    for reading in readings:
        modules[reading.layer].register_forward_hook(reading)
    parent, _, name = head.rpartition(".")
    setattr(model.get_submodule(parent), name, wide)
    return wide


def averaged(output: Tensor, cells: int) -> Tensor:
    """One row per example: of a map the means over a grid, of a sequence those over its positions."""
    if output.ndim == 4:
        return F.adaptive_avg_pool2d(output, cells).flatten(1)
    return output.mean(1) if output.ndim == 3 else output.clone()  # the next layer may work in place


def evenly(items: Sequence[T], few: int) -> list[T]:
    """So many of a sequence, at equal distances, up to its last."""
    return [items[(i + 1) * len(items) // few - 1] for i in range(few)]


def output_of(output: Any) -> Any:
    """The first of a layer's outputs, which blocks of transformers return with others."""
    return output[0] if isinstance(output, tuple | list) and output else output


def _shapes(model: nn.Module, head: str, modules: Mapping[str, nn.Module], run: Callable[[], Any]) -> dict[str, Shape]:
    """What the layers that finish before the head return one row per example of, in the order in which they finish."""
    shapes: dict[str, Shape] = {}
    calls: Counter[str] = Counter()
    heads: list[Shape] = []

    def note(name: str, module: nn.Module, args: Any, output: Any) -> None:
        output = output_of(output)
        calls[name] += 1
        if name == head:
            heads.append(tuple(output.shape))
        elif not heads and isinstance(output, Tensor) and 2 <= output.ndim <= 4 and output.is_floating_point():
            shapes[name] = tuple(output.shape)

    hooks = [module.register_forward_hook(partial(note, name)) for name, module in modules.items() if name]
    try:
        with _evaluating(model):
            run()
    finally:
        for hook in hooks:
            hook.remove()
    if len(heads) != 1 or len(heads[0]) != 2:
        found = f"returns {heads[0]}" if len(heads) == 1 else f"runs {len(heads)} times"
        raise InvalidArgumentError(f"the head {head!r} {found}; it must run once, with one row for each example")
    return {name: shape for name, shape in shapes.items() if shape[0] == heads[0][0] and calls[name] == 1}


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _usual(modules: Mapping[str, nn.Module], shapes: Mapping[str, Shape], width: int) -> list[str]:
    """The last layer at each resolution that maps shrink to, without single positions; else the blocks of sequences."""
    last: dict[Shape, str] = {}
    smallest = math.inf
    for name, shape in shapes.items():
        if len(shape) == 4 and 1 < math.prod(shape[2:]) <= smallest:
            smallest = math.prod(shape[2:])
            last[shape[2:]] = name
    blocks = [name for name, shape in shapes.items() if len(shape) == 3 and _is_block(modules, name)]
    if blocks:
        few = min(len(blocks), max(1, width // max(shapes[name][-1] for name in blocks)))
        return evenly(blocks, few)
    if not last:
        raise InvalidArgumentError("there are no maps and no blocks to read below the head; name layers")
    return list(last.values())


def _is_block(modules: Mapping[str, nn.Module], name: str) -> bool:
    """Whether it is one of a list of like modules, and not inside of another such block."""
    parent = name.rpartition(".")[0]
    listed = modules.get(parent)
    if not isinstance(listed, nn.Sequential | nn.ModuleList) or len(listed) < 2 or not list(modules[name].children()):
        return False
    return len({type(child) for child in listed}) == 1 and not (parent and _inside(modules, parent))


def _inside(modules: Mapping[str, nn.Module], name: str) -> bool:
    return _is_block(modules, name) or ("." in name and _inside(modules, name.rpartition(".")[0]))


def _chosen(modules: Mapping[str, nn.Module], shapes: Mapping[str, Shape], layers: Sequence[str]) -> list[str]:
    for name in layers:
        if name not in modules:
            raise InvalidArgumentError(f"the model has no layer {name!r} to read; name some of its modules")
        if name not in shapes:
            raise InvalidArgumentError(
                f"the layer {name!r} cannot be read: it must run once, before the head, and return one row per "
                "example: of numbers, of positions (N, T, C) or a map (N, C, H, W)"
            )
    if not layers or len(set(layers)) < len(layers):
        raise InvalidArgumentError("name layers to read, each once")
    return list(layers)


def _cells(shape: Shape, share: int) -> int:
    """The finest grid whose numbers do not exceed a layer's share."""
    if len(shape) != 4:
        return 1
    return max(1, min(math.isqrt(share // shape[1]), *shape[2:]))


def _features(shape: Shape, cells: int) -> int:
    return shape[1] * cells**2 if len(shape) == 4 else shape[-1]
