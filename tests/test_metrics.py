"""Metrics against their definitions, and against scikit-learn and scipy."""

import math

import pytest
import torch
from scipy import stats
from sklearn.metrics import accuracy_score, f1_score

from forwardtune.metrics import class_counts, metric


def test_classes():
    actual, predicted = torch.tensor([1, 1, 1, 0, 0]), torch.tensor([1, 0, 1, 1, 0])
    assert metric("accuracy", predicted, actual, classes=2) == pytest.approx(0.6)
    assert metric("f1", predicted, actual, classes=2) == pytest.approx(2 / 3)
    assert metric("f1", predicted, actual, classes=3) == pytest.approx((2 / 3 + 1 / 2) / 2)  # of classes that occur
    three = torch.tensor([0, 2, 2]), torch.tensor([0, 1, 2])
    assert metric("f1", *three, classes=3) == pytest.approx((1 + 0 + 2 / 3) / 3)
    assert metric("f1", torch.tensor([0, 0]), torch.tensor([0, 0]), classes=2) == 0.0


@pytest.mark.parametrize("classes", [2, 5])
def test_classes_against_scikit_learn(classes):
    generator = torch.Generator().manual_seed(0)
    predicted, actual = (torch.randint(classes, (200,), generator=generator) for _ in range(2))
    average = "binary" if classes == 2 else "macro"
    assert metric("accuracy", predicted, actual, classes) == pytest.approx(accuracy_score(actual, predicted))
    assert metric("f1", predicted, actual, classes) == pytest.approx(f1_score(actual, predicted, average=average))


def test_counts_add_up_over_batches():
    predicted, actual = torch.tensor([0, 2, 2, 1]), torch.tensor([0, 1, 2, 1])
    whole = class_counts(predicted, actual, 4)
    assert whole.tolist() == [[1, 1, 1, 0], [1, 1, 2, 0], [1, 2, 1, 0]]
    assert torch.equal(whole, class_counts(predicted[:3], actual[:3], 4) + class_counts(predicted[3:], actual[3:], 4))


def test_scores():
    x, y = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 1.0, 6.0])
    assert metric("pearson", x, y) == pytest.approx(4 / math.sqrt(2 * 14))
    assert metric("spearman", x, y) == pytest.approx(0.5)
    x, y = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    assert metric("pearson", x, y) == pytest.approx(stats.pearsonr(x, y).statistic)
    assert metric("spearman", x, y) == pytest.approx(stats.spearmanr(x, y).statistic)


@pytest.mark.parametrize("name", ["pearson", "spearman"])
def test_the_correlation_with_a_constant_is_zero(name):
    x = torch.tensor([1.0, 2.0, 3.0])
    assert metric(name, x, torch.ones(3)) == 0.0
    assert metric(name, torch.ones(3), x) == 0.0
    assert metric(name, x[:1], x[:1]) == 0.0
