"""How answers are read off what a model computes: a linear map, fitted to labelled examples without tuning the model.

A pretrained model that is asked in its own terms favours some answers whatever it is asked, and is surer or less sure
than it is right. Tuning that starts from there spends its steps on that, and they wreck what the model knows, although
one number for each answer and one for all of them set it right:

    min  mean_i cross entropy(scale z_i + bias, y_i) + PENALTY/2 (scale - 1)^2,    z: the logits

An embedding, and what the blocks of the model compute, is read by a whole matrix, fitted as a new head would be, if
examples are enough for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from forwardtune.errors import InvalidArgumentError
from forwardtune.heads import fit_linear, is_left_out

PENALTY = 1e-3
"""Keeps the scale finite where the model is right about every example."""


class Readout(NamedTuple):
    """One row of the weight, and one bias, for each answer."""

    weight: Tensor
    bias: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        return features @ self.weight.to(features).T + self.bias.to(features)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Readout:
        """From a file's tensors, which must have this shape and be finite."""
        weight, bias = tensors.get("weight"), tensors.get("bias")
        if weight is None or bias is None or weight.shape != shape or bias.shape != shape[:1]:
            raise InvalidArgumentError(f"it does not hold a weight of shape {shape} with a bias for each row")
        if not all(tensor.is_floating_point() and torch.isfinite(tensor).all() for tensor in (weight, bias)):
            raise InvalidArgumentError("it holds numbers that are not finite")
        return cls(weight.float(), bias.float())


def calibrated(logits: Tensor, targets: Tensor) -> Readout | None:
    """The scale and bias that are best for these examples, or None if they are no better for a fifth that is left out.

    targets: labels, or the probability of each answer.

    >>> z = torch.randn(1000, 2, generator=torch.Generator().manual_seed(0))
    >>> y = (z[:, 1] - z[:, 0] > 1).long()  # an answer that is given too often
    >>> calibrated(z, y)(torch.tensor([[0.0, 0.9], [0.0, 1.1]])).argmax(1).tolist()
    [0, 1]
    """
    z, out = logits.double(), is_left_out(len(logits)).to(logits.device)
    y = targets.double() if targets.is_floating_point() else targets
    if not F.cross_entropy(_affine(z[~out], y[~out])(z[out]), y[out]) < F.cross_entropy(z[out], y[out]):
        return None
    return _affine(z, y)


def _affine(z: Tensor, y: Tensor) -> Readout:
    with torch.enable_grad():
        solution = torch.tensor([1.0] + [0.0] * z.shape[1]).to(z).requires_grad_()
        optimizer = torch.optim.LBFGS([solution], max_iter=100, tolerance_change=1e-12, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(solution[0] * z + solution[1:], y) + PENALTY / 2 * (solution[0] - 1).square()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)  # type: ignore[no-untyped-call]
    scale, bias = solution.detach()[0], solution.detach()[1:]
    return Readout((scale * torch.eye(len(bias)).to(scale)).float().cpu(), bias.float().cpu())


def fitted(features: Tensor, targets: Tensor, start: Readout) -> Readout:
    """A new matrix if it predicts a fifth of the examples, left out, better than the start, calibrated, does: by more
    than the standard error. Else that.

    The start may read only the first of the features.
    """
    out = is_left_out(len(features)).to(features.device)
    made = fit_linear(features, targets, len(start.bias))
    own = features[:, : start.weight.shape[1]]
    known = _calibrated(start, own[~out], targets[~out])
    better = F.cross_entropy(known(own[out]), targets[out], reduction="none") - made.held_out
    if better.mean() > better.std() / len(better) ** 0.5:
        return Readout(made.weight.cpu(), made.bias.cpu())
    return _calibrated(start, own, targets)


def _calibrated(start: Readout, embeddings: Tensor, targets: Tensor) -> Readout:
    affine = calibrated(start(embeddings), targets)
    return start if affine is None else Readout(affine.weight @ start.weight, affine(start.bias))
