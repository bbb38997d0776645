"""How well predictions agree with the truth: of classes from counts, which add up over batches; of scores at once."""

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
    """Of class 1 if there are two, else the mean over the classes that occur; 0 where nothing does."""
    scores = 2 * correct / (predicted + actual).clamp(min=1)
    return scores[1] if len(scores) == 2 else scores[predicted + actual > 0].mean()


OF_CLASSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"accuracy": accuracy, "f1": f1}
"""Metrics of the three rows of `class_counts`."""


def pearson(predicted: Tensor, actual: Tensor) -> float:
    return _correlation("pearsonr", predicted, actual)


def spearman(predicted: Tensor, actual: Tensor) -> float:
    return _correlation("spearmanr", predicted, actual)


OF_SCORES: dict[str, Callable[[Tensor, Tensor], float]] = {"pearson": pearson, "spearman": spearman}


def metric(name: str, predicted: Tensor, actual: Tensor, classes: int = 0) -> float:
    """A metric by its name, of numbers of classes or of scores."""
    if name in OF_SCORES:
        return OF_SCORES[name](predicted, actual)
    return float(OF_CLASSES[name](*class_counts(predicted, actual, classes).double()))


def _correlation(name: str, predicted: Tensor, actual: Tensor) -> float:
    """By scipy; with an answer that is always the same it is 0."""
    from scipy import stats

    if len(actual) < 2 or not predicted.std() > 0 or not actual.std() > 0:
        return 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of nearly constant answers
        return float(getattr(stats, name)(actual.numpy(), predicted.numpy()).statistic)
