"""The metrics of GLUE."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from torch import Tensor

from forwardtune.errors import ExperimentError


def metric(name: str, actual: Tensor, predicted: Tensor, classes: int = 2) -> float:
    """`accuracy`, `f1` (of class 1 if there are two, else the mean over those that occur), `pearson` or `spearman`.

    The correlation with an answer that is always the same is 0.
    """
    try:
        from scipy.stats import pearsonr, spearmanr
        from sklearn.metrics import accuracy_score, f1_score
    except ImportError as error:
        raise ExperimentError(f"metrics need scikit-learn ({error}); install it: pip install scikit-learn") from None
    kind = "binary" if classes == 2 else "macro"
    known: dict[str, Callable[..., float]] = {
        "accuracy": accuracy_score,
        "f1": lambda a, p: f1_score(a, p, average=kind, zero_division=0),
        "pearson": lambda a, p: pearsonr(a, p).statistic,
        "spearman": lambda a, p: spearmanr(a, p).statistic,
    }
    if name in ("pearson", "spearman") and not (len(actual) > 1 and predicted.std() > 0 and actual.std() > 0):
        return 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of nearly constant answers
        return float(known[name](actual.numpy(), predicted.numpy()))
