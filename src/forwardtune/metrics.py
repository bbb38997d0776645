"""How well a model does: classes by counts, which add up over batches; scores all at once; texts by their perplexity.

How a metric is told, and which way it is better, is known here and nowhere else.
"""

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


LOWER = ("perplexity", "loss")
"""Metrics of which the lowest is the best."""
ARROWS = {"lowest": " \N{DOWNWARDS ARROW}", "highest": " \N{UPWARDS ARROW}"}
"""What ends the names of other people's metrics, by which value is the best. Those without are shares, as accuracy is:
they are told in per cent, and the highest is the best."""


def own_name(name: str, best: str) -> str:
    """What a metric of other people's is called here, given whether its lowest or its highest value is the best.

    >>> own_name("mae", "lowest"), own_name("accuracy", "highest"), own_name("loss", "lowest")
    ('mae ↓', 'accuracy', 'loss')
    """
    known = LOWER if best == "lowest" else {*OF_CLASSES, *OF_SCORES}
    return name if name in known else name + ARROWS[best]


def spoken(name: str) -> str:
    """The name within a sentence."""
    return name.removesuffix(ARROWS["lowest"]).removesuffix(ARROWS["highest"])


def is_lower_better(name: str) -> bool:
    return name in LOWER or name.endswith(ARROWS["lowest"])


def is_share(name: str) -> bool:
    return not is_lower_better(name) and not name.endswith(ARROWS["highest"])


def is_better(name: str, value: float, other: float) -> bool:
    """Whether one value of a metric is better than another."""
    return value < other if is_lower_better(name) else value > other


def scaled(name: str, value: float) -> float:
    """A metric as people say it: a share in per cent."""
    return 100 * value if is_share(name) else value


def shown(name: str, value: float) -> str:
    """Its digits.

    >>> shown("accuracy", 2 / 3), shown("perplexity", 23.456)
    ('66.7', '23.46')
    """
    return f"{100 * value:.1f}" if is_share(name) else f"{value:.4g}"


def unit(name: str) -> str:
    return "%" if is_share(name) else ""


def titled(*names: str, share: str = "%") -> str:
    """The title of a column of metrics, with the unit of those that are shares.

    >>> titled("accuracy", "pearson"), titled("perplexity"), titled("f1", "perplexity")
    ('accuracy or pearson (%)', 'perplexity', 'f1 (%) or perplexity')
    """
    shares = " or ".join(filter(is_share, names))
    return " or ".join([f"{shares} ({share})"] * bool(shares) + [name for name in names if not is_share(name)])


def perplexity(loss: float) -> float:
    """Of a mean loss per token; infinite where it is beyond floats."""
    return torch.tensor(loss, dtype=torch.float64).exp().item()


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
