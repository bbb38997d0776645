"""What a step minimizes along lines of examples' own: one loss per example of the batch, in one forward pass.

The mean of these losses is the model's own loss, where examples have as many labels each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forwardtune._compat.transformers import transformers
from forwardtune.errors import InvalidArgumentError
from forwardtune.integrations.huggingface.objectives import Batch, Objective, Own, aligned, check_classes, examples_in

if TYPE_CHECKING:
    from forwardtune.integrations.huggingface.trainer import ForwardTrainer

INSTEAD = (
    "give an objective of your own, a function of the model and a batch that returns them, or leave directions at 1"
)


def choose(objective: str | Own, trainer: ForwardTrainer) -> Objective:
    """As on a common line; what has no value for a single example is refused."""
    if trainer.accelerator.num_processes > 1 or trainer.args.n_gpu > 1:
        raise InvalidArgumentError(
            "with lines of examples' own every forward pass has the whole batch; train in one process on one device, "
            "or leave directions at 1"
        )
    if trainer.args.gradient_accumulation_steps > 1:
        raise InvalidArgumentError(
            "with lines of examples' own every forward pass has the whole batch; leave gradient_accumulation_steps at "
            "1 and raise per_device_train_batch_size"
        )
    if callable(objective):
        return _own(objective)
    if getattr(getattr(trainer.model, "config", None), "is_encoder_decoder", False):
        raise InvalidArgumentError(f"the losses of single examples are not known for an encoder-decoder; {INSTEAD}")
    if objective == "accuracy":
        return _from_logits(_errors)
    if objective != "loss":
        raise InvalidArgumentError(f"a single example has no {objective}; minimize the loss, or leave directions at 1")
    for name, given in (
        ("label_smoothing_factor", trainer.label_smoother is not None),
        ("compute_loss_func", trainer.compute_loss_func is not None),
        ("a compute_loss of your own", type(trainer).compute_loss is not transformers.Trainer.compute_loss),
    ):
        if given:
            raise InvalidArgumentError(
                f"with lines of examples' own there is one loss per example, which {name} does not return; {INSTEAD}"
            )
    return _from_logits(_losses)


def _own(function: Own) -> Objective:
    def objective(trainer: ForwardTrainer, model: nn.Module, batches: Sequence[Batch]) -> Tensor:
        (batch,) = batches
        losses, wanted = function(model, dict(batch)), examples_in(batch)
        if not isinstance(losses, Tensor) or losses.shape != (wanted,):
            got = f"a tensor of shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
            raise InvalidArgumentError(
                f"with lines of their own the objective must return one loss per example, a tensor of shape "
                f"({wanted},), not {got}"
            )
        return losses

    return objective


def _from_logits(values: Callable[[Tensor, Tensor, Any], Tensor]) -> Objective:
    """`values` of logits and labels at the same places."""

    def objective(trainer: ForwardTrainer, model: nn.Module, batches: Sequence[Batch]) -> Tensor:
        (batch,) = batches
        inputs = {name: value for name, value in batch.items() if name not in ("labels", "shift_labels")}
        outputs = model(**inputs)
        logits = outputs.get("logits") if isinstance(outputs, Mapping) else outputs[0]
        if not isinstance(logits, Tensor) or not isinstance(batch.get("labels"), Tensor):
            raise InvalidArgumentError(
                f"the losses of single examples are computed from logits and labels, and {type(model).__name__} and "
                f"its batches, with {', '.join(batch)}, do not have both; {INSTEAD}"
            )
        return values(*aligned(trainer, logits, batch), getattr(trainer.model, "config", None))

    return objective


def _losses(logits: Tensor, labels: Tensor, config: Any) -> Tensor:
    """Cross entropies, of sequences the means over their labels; squared errors of scores."""
    if logits.ndim == 2:
        logits = _precise(logits)
        usual = "regression" if logits.shape[1] == 1 else "multi_label_classification"
        kind = getattr(config, "problem_type", None) or usual
        if kind == "regression" and labels.numel() == logits.numel():
            return (logits - labels.view_as(logits)).square().mean(1)
        if kind == "multi_label_classification" and labels.is_floating_point() and labels.shape == logits.shape:
            return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none").mean(1)
    if labels.is_floating_point() or labels.shape != logits.shape[:-1]:
        raise InvalidArgumentError(
            f"the losses of single examples are not known for {labels.dtype} labels of shape {tuple(labels.shape)} and "
            f"logits of shape {tuple(logits.shape)}; {INSTEAD}"
        )
    return _means(lambda known, at: F.cross_entropy(_precise(known), at, reduction="none"), logits, labels)


def _errors(logits: Tensor, labels: Tensor, config: Any) -> Tensor:
    """1 where an answer is wrong, else 0; of sequences the means over their labels."""
    check_classes(logits, labels)
    return _means(lambda known, at: (known.argmax(-1) != at).float(), logits, labels)


def _means(values: Callable[[Tensor, Tensor], Tensor], logits: Tensor, labels: Tensor) -> Tensor:
    """Over the labels of each example that count; 0 where none does. One example at a time, which takes less memory."""
    rows = []
    for own, at in zip(logits, labels, strict=True):
        own, at = own.view(-1, own.shape[-1]), at.reshape(-1)
        counts = at != -100
        rows.append(values(own[counts], at[counts]).sum() / counts.sum().clamp(min=1))
    return torch.stack(rows)


def _precise(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
