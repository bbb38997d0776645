"""A new head, fitted to what a pretrained model computes: where tuning should begin.

A head that was drawn at random tells the layers below it nothing, and no search along random lines is needed to find a
better one. Given its inputs a linear head is a convex problem with an explicit gradient,

    min  mean_i loss(W z_i + b, y_i) + penalty/2 norm(W)^2,    z: the inputs, standardized

and one forward pass per example shows the inputs. The penalty is the one with which a fifth of the examples, left out,
is predicted best; then all of them are fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forwardtune.errors import InvalidArgumentError
from forwardtune.wide import WideHead

PENALTIES = tuple(10.0**-k for k in range(-1, 5))
"""Tried from the strongest to the weakest, until examples left out are predicted worse."""
SMALLEST = 1e-2
"""Of the usual deviation of an input. One that hardly varies is not magnified further: the head would hang on it."""
FEWEST = 10
"""Examples, of which a fifth is left out."""
_REMEDY = "name the Linear that the model ends with"


@dataclass(frozen=True)
class FittedHead:
    """What a fit came to: on how many examples, with which penalty, and the loss of those left out beforehand."""

    examples: int
    penalty: float
    held_out_loss: float


@torch.no_grad()
def fit_head(
    model: nn.Module,
    head: str | nn.Linear | WideHead,
    batches: Iterable[tuple[Any, Tensor]],
    forward: Callable[[Any], Tensor] | None = None,
) -> FittedHead:
    """Fits a linear head in place, with one forward pass per batch, and one more of the first; nothing else changes.

    head: the last `Linear` in the model, whose outputs are the model's, or its name; or a wide head.
    batches: pairs of inputs and labels. Classes are fitted by the cross entropy; with floating-point labels the head
        has one output, which is fitted by the squared error.
    forward: computes the outputs from inputs, if that takes more than calling the model with them.

    >>> model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    >>> x = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    >>> fitted = fit_head(model, "2", [(x, (x[:, 0] > 0).long())])
    >>> fitted.examples, fitted.held_out_loss < 0.2
    (200, True)
    """
    layers: dict[str, nn.Module] = dict(model.named_modules())
    if isinstance(head, nn.Module):
        head = next((name for name, layer in layers.items() if layer is head), "")
    if isinstance(layers.get(head), WideHead):
        head = f"{head}.linear"
    linear = layers.get(head) if head else None
    if type(linear) is not nn.Linear or not linear.weight.is_floating_point():
        kind = "no layer of the model" if linear is None else f"a {type(linear).__name__}"
        raise InvalidArgumentError(f"the head {head!r} is {kind}; {_REMEDY}")
    x, y = _inputs(model, head, linear, batches, model if forward is None else forward)
    if len(x) < FEWEST:
        raise InvalidArgumentError(f"{len(x)} examples are too few to fit a head; give at least {FEWEST}")
    y = _checked_labels(y, linear).to(x.dtype if y.is_floating_point() else torch.long)
    made = fit_linear(x, y, linear.out_features, bias=linear.bias is not None)
    linear.weight.copy_(made.weight)
    if linear.bias is not None:
        linear.bias.copy_(made.bias)
    return FittedHead(len(x), made.penalty, made.held_out.mean().item())


class FittedLinear(NamedTuple):
    """A weight and a bias, the penalty, and the losses of the examples that were left out to find it."""

    weight: Tensor
    bias: Tensor
    penalty: float
    held_out: Tensor


def fit_linear(x: Tensor, y: Tensor, outputs: int, *, bias: bool = True) -> FittedLinear:
    """The weight and the bias of a head with these inputs.

    y: classes, or the probability of each, which are fitted by the cross entropy; or numbers for one output, which are
        fitted by the squared error.
    """
    scale = x.var(0, correction=0).sqrt() if bias else x.square().mean(0).sqrt()
    usual = scale.square().mean().sqrt()
    scale = scale.clamp(min=SMALLEST * usual) if usual > 0 else torch.ones_like(scale)
    shift = x.mean(0) if bias else torch.zeros_like(scale)
    z = x.new_full((len(x), x.shape[1] + 1), float(bias))
    torch.sub(x, shift, out=z[:, :-1]).div_(scale)
    out = is_left_out(len(z)).to(z.device)
    penalty, best, solution = PENALTIES[0], z.new_full((int(out.sum()),), torch.inf), z.new_zeros(outputs, z.shape[1])
    for tried in PENALTIES:
        solution = _solve(solution, z[~out], y[~out], tried)
        losses = _losses(z[out] @ solution.T, y[out])
        if not losses.mean() < best.mean():
            break
        penalty, best = tried, losses
    solution = _solve(solution, z, y, penalty)
    weight, constant = solution[:, :-1] / scale, solution[:, -1]
    return FittedLinear(weight, constant - weight @ shift, penalty, best)


def is_left_out(examples: int) -> Tensor:
    """A fifth of the examples, drawn once, as a mask."""
    order = torch.randperm(examples, generator=torch.Generator().manual_seed(0))
    return torch.zeros(examples, dtype=torch.bool).index_fill(0, order[: examples // 5], True)


def _inputs(
    model: nn.Module,
    head: str,
    linear: nn.Linear,
    batches: Iterable[tuple[Any, Tensor]],
    forward: Callable[[Any], Tensor],
) -> tuple[Tensor, Tensor]:
    """What the head sees of each example, and the labels: the model's outputs with nothing in the head's place."""
    parent, _, name = head.rpartition(".")
    place, modes = model.get_submodule(parent), [(module, module.training) for module in model.modules()]
    xs: list[Tensor] = []
    ys: list[Tensor] = []
    model.eval()
    try:
        for batch in batches:
            if not isinstance(batch, Sequence) or len(batch) != 2 or not isinstance(batch[1], Tensor):
                raise InvalidArgumentError("batches must be pairs of inputs and a tensor of labels")
            inputs, labels = batch
            outputs = None if xs else forward(inputs)
            setattr(place, name, nn.Identity())
            try:
                x = forward(inputs)
            except RuntimeError as error:
                raise InvalidArgumentError(f"the model cannot do without {head!r}; {_REMEDY} ({error})") from None
            setattr(place, name, linear)
            if x.shape != (len(labels), linear.in_features):
                raise InvalidArgumentError(
                    f"without the head {head!r} the model returns a tensor of shape {tuple(x.shape)}, not one row of "
                    f"{linear.in_features} for each of {len(labels)} labels; {_REMEDY}"
                )
            if not torch.isfinite(x).all():
                raise InvalidArgumentError(
                    f"inputs of the head {head!r} are not finite; look at the model and its inputs"
                )
            if outputs is not None and not _is_close(linear(x.to(linear.weight)), outputs):
                raise InvalidArgumentError(f"the outputs of {head!r} are not the model's; {_REMEDY}")
            xs.append(x.float())
            ys.append(labels.to(x.device))
    finally:
        setattr(place, name, linear)
        for module, training in modes:
            module.training = training
    if not xs:
        raise InvalidArgumentError("there are no batches to fit the head to; give some")
    return torch.cat(xs), torch.cat(ys)


def _is_close(ours: Tensor, outputs: Tensor) -> bool:
    """As far as 16 bits tell."""
    return torch.allclose(ours.float(), outputs.float(), rtol=1e-2, atol=1e-2)


def _checked_labels(y: Tensor, linear: nn.Linear) -> Tensor:
    classes = linear.out_features
    if y.ndim != 1 or y.is_complex():
        raise InvalidArgumentError(f"labels must be one number for each example, not of shape {tuple(y.shape)}")
    if y.is_floating_point():
        if classes != 1:
            raise InvalidArgumentError(f"floating-point labels need a head of one output, not {classes}")
        if not torch.isfinite(y).all():
            raise InvalidArgumentError("labels must be finite")
    elif not 0 <= int(y.min()) <= int(y.max()) < classes:
        raise InvalidArgumentError(f"labels must be from 0 to {classes - 1}, not from {int(y.min())} to {int(y.max())}")
    return y


def _solve(start: Tensor, z: Tensor, y: Tensor, penalty: float) -> Tensor:
    """The weights from a start nearby; the last column, of the constant, has no penalty."""
    solution = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [solution], max_iter=100, tolerance_grad=1e-5, tolerance_change=1e-7, line_search_fn="strong_wolfe"
    )
    penalties = torch.full_like(start, penalty)
    penalties[:, -1] = 0

    @torch.no_grad()
    def closure() -> float:
        outputs, decay = z @ solution.T, penalties * solution
        solution.grad = _residual(outputs, y).T @ z / len(z) + decay
        return (_losses(outputs, y).mean() + (decay * solution).sum() / 2).item()

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return solution.detach()


def _losses(outputs: Tensor, y: Tensor) -> Tensor:
    if _are_numbers(y):
        return F.mse_loss(outputs[:, 0], y, reduction="none")
    return F.cross_entropy(outputs, y, reduction="none")


def _residual(outputs: Tensor, y: Tensor) -> Tensor:
    """The derivative of each example's loss by its outputs."""
    if _are_numbers(y):
        return 2 * (outputs - y[:, None])
    return outputs.softmax(1) - (y if y.ndim == 2 else F.one_hot(y, outputs.shape[1]))


def _are_numbers(y: Tensor) -> bool:
    return y.is_floating_point() and y.ndim == 1
