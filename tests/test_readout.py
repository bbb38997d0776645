"""How answers are read off a model: fitted maps against their definitions, and what becomes of them on the way."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from scipy.optimize import minimize

from forwardtune.errors import InvalidArgumentError
from forwardtune.readout import PENALTY, Readout, calibrated, fitted
from forwardtune.tasks.task import before_fit
from tests.helpers.texts import models_and_tables, task_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return models_and_tables(tmp_path_factory.mktemp("models"))


def answers(n=600, classes=3):
    """Logits that are three times too sure and favour the first class, and the labels."""
    generator = torch.Generator().manual_seed(0)
    right = torch.randn(n, classes, generator=generator)
    labels = torch.distributions.Categorical(logits=right)
    torch.manual_seed(1)
    return 3 * right + torch.tensor([2.0] + [0.0] * (classes - 1)), labels.sample()


def test_scale_and_bias_are_the_minimum():
    logits, labels = answers()
    z, y = logits.double().numpy(), labels.numpy()

    def loss(solution):
        scaled = solution[0] * z + solution[1:]
        picked = scaled[np.arange(len(y)), y]
        return np.mean(np.logaddexp.reduce(scaled, axis=1) - picked) + PENALTY / 2 * (solution[0] - 1) ** 2

    best = minimize(loss, [1.0, 0, 0, 0], tol=1e-12).x
    readout = calibrated(logits, labels)
    np.testing.assert_allclose(readout.weight.numpy(), best[0] * np.eye(3), atol=1e-4)
    bias = readout.bias.numpy()
    np.testing.assert_allclose(bias - bias.mean(), best[1:] - best[1:].mean(), atol=1e-3)
    assert 0.2 < best[0] < 0.5
    assert F.cross_entropy(readout(logits), labels) < 0.8 * F.cross_entropy(logits, labels)


def test_probabilities_are_targets_as_labels_are():
    logits, labels = answers()
    hard, soft = calibrated(logits, labels), calibrated(logits, F.one_hot(labels, 3).double())
    for ours, theirs in zip(hard, soft, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_answers_that_are_read_well_stay_as_they_are():
    logits, _ = answers(60)
    right = logits.argmax(1)
    assert calibrated(1000 * logits, right) is None


def test_an_embedding_is_read_by_a_new_matrix_if_that_predicts_better():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 6, generator=generator)
    right = torch.randn(2, 6, generator=generator)
    y = (x @ right.T).argmax(1)
    wrong, known = Readout(-right, torch.zeros(2)), Readout(right, torch.zeros(2))
    loss = {name: F.cross_entropy(fitted(x, y, start)(x), y).item() for name, start in (("w", wrong), ("k", known))}
    assert max(loss.values()) < 0.2
    few = fitted(x[:40], torch.randint(2, (40,), generator=generator), known)  # labels of chance: no matrix helps
    cosine = F.cosine_similarity(few.weight[1] - few.weight[0], right[1] - right[0], dim=0)
    assert cosine > 0.999  # the start, with another scale


def test_few_examples_do_not_make_a_matrix_of_chance():
    """Good answers beside a thousand numbers of noise: twenty examples keep the former."""
    generator = torch.Generator().manual_seed(0)
    kept = 0
    for _ in range(20):
        y = torch.randint(2, (20,), generator=generator)
        right = F.one_hot(y, 2) + 0.5 * torch.randn(20, 2, generator=generator)
        features = torch.cat([right, torch.randn(20, 1000, generator=generator)], 1)
        kept += fitted(features, y, Readout(torch.eye(2), torch.zeros(2))).weight.shape[1] == 2
    assert kept >= 19


def test_what_a_file_may_hold():
    good = {"weight": torch.eye(2), "bias": torch.zeros(2)}
    assert torch.equal(Readout.of(good, (2, 2)).weight, torch.eye(2))
    for bad in ({"weight": torch.eye(2)}, {**good, "bias": torch.zeros(3)}, {**good, "weight": torch.eye(3)}):
        with pytest.raises(InvalidArgumentError, match=r"a weight of shape \(2, 2\) with a bias for each row"):
            Readout.of(bad, (2, 2))
    for bad in ({**good, "bias": torch.tensor([0.0, torch.nan])}, {**good, "weight": torch.eye(2).long()}):
        with pytest.raises(InvalidArgumentError, match="not finite"):
            Readout.of(bad, (2, 2))


@pytest.mark.parametrize(("model", "least"), [("causal", 0.02), ("masked", 0.4), ("encoder", -1e-6)])
def test_every_run_begins_with_the_readout_of_the_base(tmp_path, folder, model, least):
    """It is fitted once, and kept in the base's file with the scores before; that of the encoder stays as it was."""
    task = task_of(folder, model, fit=72)
    plain = task_of(folder, model)
    file = tmp_path / "base.safetensors"
    model_before = plain.make_base(tmp_path / "plain.safetensors")
    before = plain.evaluate(model_before)
    made = task.make_base(file)
    after = task.evaluate(made)
    assert before_fit(file) == before.metrics
    assert before_fit(tmp_path / "plain.safetensors") == {}
    assert before.train_loss - after.train_loss > least
    again = task_of(folder, model, fit=72)
    assert again.evaluate(again.start(file)) == after
    assert {"forwardtune.readout.weight", "forwardtune.readout.bias"} <= load_file(file).keys()
    for p, q in zip(made.parameters(), model_before.parameters(), strict=True):
        assert torch.equal(p, q)  # the model itself is as it was
