"""How well predictions agree with the truth: classes by counts, which add up over batches; scores all at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor


def class_counts(predicted: Tensor, actual: Tensor, classes: int) -> Tensor:
    """How many examples of each class were predicted correctly, were predicted, and exist: three rows."""
    return torch.stack([x.bincount(minlength=classes) for x in (actual[actual == predicted], predicted, actual)])


def accuracy(correct: Tensor, predicted: Tensor, actual: Tensor) -> Tensor:
    return correct.sum() / actual.sum()


def f1(correct: Tensor, predicted: Tensor, actual: Tensor) -> Tensor:
    """Of class 1 if there are two, else the mean over the classes that occur or are predicted.

    A class that is neither, if it is class 1 of two, has an F1 of 0.
    """
    scores = 2 * correct / (predicted + actual).clamp(min=1)
    return scores[1] if len(scores) == 2 else scores[predicted + actual > 0].mean()


OF_CLASSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"accuracy": accuracy, "f1": f1}
"""Metrics of the three rows of `class_counts`."""


def one_minus(name: str, logits: Tensor, actual: Tensor) -> Tensor:
    """One minus a metric of classes: an objective without a gradient."""
    return 1 - OF_CLASSES[name](*class_counts(logits.argmax(1), actual, logits.shape[1]))


def pearson(predicted: Tensor, actual: Tensor) -> float:
    return _correlation("pearsonr", predicted, actual)


def spearman(predicted: Tensor, actual: Tensor) -> float:
    return _correlation("spearmanr", predicted, actual)


OF_SCORES: dict[str, Callable[[Tensor, Tensor], float]] = {"pearson": pearson, "spearman": spearman}
"""Metrics of predicted and actual scores."""


def metric(name: str, predicted: Tensor, actual: Tensor, classes: int = 0) -> float:
    """A metric by name, of class indices or of scores.

    >>> metric("accuracy", torch.tensor([0, 1, 1]), torch.tensor([0, 1, 0]), classes=2)
    0.6666666666666666
    """
    if name in OF_SCORES:
        return OF_SCORES[name](predicted, actual)
    return float(OF_CLASSES[name](*class_counts(predicted, actual, classes).double()))


def _correlation(name: str, predicted: Tensor, actual: Tensor) -> float:
    """By scipy; 0 if all answers are the same."""
    from scipy import stats

    if len(actual) < 2 or not predicted.std() > 0 or not actual.std() > 0:
        return 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about nearly constant answers
        return float(getattr(stats, name)(actual.numpy(), predicted.numpy()).statistic)
