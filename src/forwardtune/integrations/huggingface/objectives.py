"""What a step minimizes, over all micro-batches of all processes.

A micro-batch's mean is weighted by its number of labels, so the objective does not depend on how the batch was split.
Accuracy and F1 are maximized; they are computed once, from counts that are summed over everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from forwardtune.errors import InvalidArgumentError
from forwardtune.metrics import OF_CLASSES, class_counts

if TYPE_CHECKING:
    from forwardtune.integrations.huggingface.trainer import ForwardTrainer

Batch = Mapping[str, Any]
Own = Callable[[nn.Module, Batch], Any]
Objective = Callable[["ForwardTrainer", nn.Module, Sequence[Batch]], Tensor]


def choose(objective: str | Own) -> Objective:
    """An objective by name, or the user's own function of the model and a batch."""
    named = {"loss": loss} | {name: one_minus(metric) for name, metric in OF_CLASSES.items()}
    if callable(objective):
        return own(objective)
    if objective not in named:
        raise InvalidArgumentError(
            f"objective {objective!r} is not known; choose one of {', '.join(named)}, or give a function of the model "
            "and a batch that returns the number to minimize"
        )
    return named[objective]


def loss(trainer: ForwardTrainer, model: nn.Module, batches: Sequence[Batch]) -> Tensor:
    """Trainer's own loss, whatever computes it."""
    return _mean(
        trainer, [(trainer.compute_loss(model, dict(batch)), _labels(trainer, batch).numel()) for batch in batches]
    )


def own(function: Own) -> Objective:
    """The mean of the user's function over the examples."""

    def objective(trainer: ForwardTrainer, model: nn.Module, batches: Sequence[Batch]) -> Tensor:
        return _mean(trainer, [(function(model, dict(batch)), examples_in(batch)) for batch in batches])

    return objective


def one_minus(metric: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Objective:
    """A metric of classes, to be maximized."""

    def objective(trainer: ForwardTrainer, model: nn.Module, batches: Sequence[Batch]) -> Tensor:
        total = torch.stack([_counts(trainer, model, batch) for batch in batches]).sum(0)
        return 1 - metric(*trainer.accelerator.reduce(total, "sum").double())

    return objective


def _counts(trainer: ForwardTrainer, model: nn.Module, batch: Batch) -> Tensor:
    _, outputs = trainer.compute_loss(model, dict(batch), return_outputs=True)
    logits, labels = aligned(trainer, outputs["logits"] if isinstance(outputs, Mapping) else outputs[1], batch)
    check_classes(logits, labels)
    known = labels != -100
    return class_counts(logits[known].argmax(-1), labels[known], logits.shape[-1])


def aligned(trainer: ForwardTrainer, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits and labels, with the same row or token at the same place."""
    labels: Tensor = batch["shift_labels"] if "shift_labels" in batch else batch["labels"]
    if logits.ndim == 3 and labels.ndim == 2:  # adapters may put tokens in front
        logits = logits[:, -labels.shape[1] :]
    if _shifts(trainer, batch):
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    return logits, labels


def check_classes(logits: Tensor, labels: Tensor) -> None:
    """Refuses labels that are not classes of these logits."""
    if labels.is_floating_point() or labels.shape != logits.shape[:-1]:
        raise InvalidArgumentError(
            f"accuracy and F1 are metrics of classes: labels must be integers, one for each row of logits, not "
            f"{labels.dtype} of shape {tuple(labels.shape)} for logits of shape {tuple(logits.shape)}"
        )
    known = labels != -100
    if known.any() and int(labels[known].max()) >= logits.shape[-1]:
        raise InvalidArgumentError(
            f"the label {int(labels[known].max())} is out of range for a model with {logits.shape[-1]} classes; "
            "correct the data, or load the model with num_labels"
        )


def _shifts(trainer: ForwardTrainer, batch: Batch) -> bool:
    """Whether the model predicts each label from the tokens before it."""
    return bool(getattr(trainer, "_loss_shifts_labels", False)) and "shift_labels" not in batch


def _labels(trainer: ForwardTrainer, batch: Batch) -> Tensor:
    """Those that count, or one per example if there are none."""
    labels: Tensor | None = batch.get("shift_labels", batch.get("labels"))
    if not isinstance(labels, Tensor):
        return torch.empty(examples_in(batch))
    labels = labels[..., 1:] if _shifts(trainer, batch) else labels
    assert isinstance(labels, Tensor)
    return labels[labels != -100]


def examples_in(batch: Batch) -> int:
    """The size of a batch."""
    return next((len(value) for value in batch.values() if isinstance(value, Tensor) and value.ndim), 1)


def _mean(trainer: ForwardTrainer, weighted: Sequence[tuple[Any, int]]) -> Tensor:
    """The weighted mean of some values, over all processes."""
    device = trainer.accelerator.device
    dtype = torch.float32 if device.type == "mps" else torch.float64
    totals = torch.zeros(2, dtype=dtype, device=device)
    for value, weight in weighted:
        if not weight:  # no label counts, and the mean of no labels is not a number
            continue
        value = torch.as_tensor(
            value, dtype=dtype, device=device
        ).mean()  # several values, if several GPUs shared a batch
        totals += torch.stack([value * weight, torch.tensor(weight, dtype=dtype, device=device)])
    total: Tensor = trainer.accelerator.reduce(totals, "sum")
    return total[0] / total[1]
