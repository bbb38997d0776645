"""Heads fitted from forward passes: against scikit-learn, against closed forms, and what is refused."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from torch import nn

from forwardtune.errors import ExperimentError, InvalidArgumentError
from forwardtune.heads import PENALTIES, fit_head
from tests.helpers.images import base_of, task_of


def problem(classes=3, bias=True, n=300):
    """A network, and inputs whose labels depend on its features."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, classes, bias=bias))
    x = torch.randn(n, 5, generator=generator)
    with torch.no_grad():
        clean = model[1](model[0](x)) @ torch.randn(8, classes, generator=generator)
    noisy = 4 * clean + torch.randn(n, classes, generator=generator)
    return model, x, noisy


def standardized(model, x):
    with torch.no_grad():
        features = model[1](model[0](x))
    return ((features - features.mean(0)) / features.std(0, correction=0)).double().numpy()


def test_classes_are_fitted_as_by_scikit_learn():
    model, x, noisy = problem()
    y = noisy.argmax(1)
    fitted = fit_head(model, model[2], [(x[:100], y[:100]), (x[100:], y[100:])])
    reference = LogisticRegression(C=1 / (fitted.penalty * len(x)), tol=1e-8, max_iter=10_000)
    expected = reference.fit(standardized(model, x), y.numpy()).predict_proba(standardized(model, x))
    np.testing.assert_allclose(model(x).softmax(1).detach().numpy(), expected, atol=1e-3)
    assert fitted.examples == 300
    assert fitted.held_out_loss < 0.5 < F.cross_entropy(torch.zeros(1, 3), torch.tensor([0])).item()


def test_scores_are_fitted_as_by_the_normal_equations():
    model, x, noisy = problem(classes=1)
    y = noisy[:, 0]
    fitted = fit_head(model, "2", [(x, y)])
    z, centered = standardized(model, x), (y - y.mean()).double().numpy()
    w = np.linalg.solve(2 * z.T @ z / len(z) + fitted.penalty * np.eye(8), 2 * z.T @ centered / len(z))
    np.testing.assert_allclose(model(x)[:, 0].detach().numpy(), z @ w + y.mean().item(), atol=2e-3)


def test_the_penalty_is_the_best_on_examples_left_out():
    """Labels that have nothing to do with the inputs want the strongest, clean ones a weak one."""
    model, x, noisy = problem()
    chance = torch.randint(3, (300,), generator=torch.Generator().manual_seed(1))
    assert fit_head(model, "2", [(x, chance)]).penalty == PENALTIES[0]
    assert fit_head(model, "2", [(x, noisy.argmax(1))]).penalty <= 1e-2


def test_a_head_without_a_bias_and_inputs_that_never_vary():
    model, x, noisy = problem(bias=False)
    with torch.no_grad():
        model[0].weight[0] = model[0].bias[0] = 0.0
    loss = fit_head(model, "2", [(x, noisy.argmax(1))]).held_out_loss
    assert loss < 0.7
    assert torch.isfinite(model(x)).all()


def test_a_head_does_not_hang_on_an_input_that_hardly_varies():
    """A dead unit's rounding errors look like any other input once they are standardized; tuning would blow them up."""
    model, x, noisy = problem()
    with torch.no_grad():
        model[0].weight[0] *= 1e-6
        model[0].bias[0] = 0.0
    fit_head(model, "2", [(x, noisy.argmax(1))])
    sizes = model[2].weight.detach().abs().amax(0)
    assert sizes[0] < 100 * sizes[1:].max()  # standardized in full it would be some 100,000 times as large


def test_nothing_but_the_head_changes():
    model, x, noisy = problem()
    model = nn.Sequential(model[0], nn.BatchNorm1d(8), nn.Dropout(), model[2]).train()
    model[1].eval()
    before, state = {n: t.clone() for n, t in model.state_dict().items()}, torch.get_rng_state()
    fit_head(model, "3", [(x, noisy.argmax(1))])
    assert [layer.training for layer in model] == [True, False, True, True]
    assert torch.equal(torch.get_rng_state(), state)
    changed = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])]
    assert changed == ["3.weight", "3.bias"]
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("head", "labels", "message"),
    [
        ("1", torch.zeros(300).long(), "the head '1' is a Tanh; name the Linear that the model ends with"),
        ("0", torch.zeros(300).long(), "the model cannot do without '0'; name the Linear that the model ends with"),
        ("2", torch.full((300,), 3), "labels must be from 0 to 2, not from 3 to 3"),
        ("2", torch.zeros(300), "floating-point labels need a head of one output, not 3"),
        ("3", torch.zeros(300).long(), "the head '3' is no layer of the model; name the Linear"),
        ("", torch.zeros(300).long(), "the head '' is no layer of the model"),
        ("2", torch.zeros(300, 1), "labels must be one number for each example, not of shape"),
        ("2", torch.zeros(4).long(), "4 examples are too few to fit a head; give at least 10"),
    ],
)
def test_what_cannot_be_fitted_is_refused_and_the_model_stays(head, labels, message):
    model, x, _ = problem()
    layers = list(model)
    with pytest.raises(InvalidArgumentError, match=message):
        fit_head(model, head, [(x[: len(labels)], labels)])
    assert list(model) == layers
    with pytest.raises(InvalidArgumentError, match=r"the outputs of '0\.2' are not the model's; name the Linear that"):
        fit_head(nn.Sequential(model, nn.Softmax(1)), "0.2", [(x, torch.zeros(300).long())])
    with pytest.raises(InvalidArgumentError, match="batches must be pairs of inputs and a tensor of labels"):
        fit_head(model, "2", [x])
    with pytest.raises(InvalidArgumentError, match="there are no batches"):
        fit_head(model, "2", [])


def test_labels_of_any_kind_and_inputs_that_are_not_finite():
    model, x, noisy = problem(classes=2)
    y = noisy.argmax(1)
    losses = {fit_head(model, "2", [(x, y.to(kind))]).held_out_loss for kind in (torch.long, torch.int32, torch.bool)}
    assert len(losses) == 1
    one = problem(classes=1)[0]
    assert fit_head(one, "2", [(x, noisy[:, 0].double())]).held_out_loss > 0
    with pytest.raises(InvalidArgumentError, match="inputs of the head '2' are not finite"):
        fit_head(model, "2", [(x[:100], y[:100]), (x[100:] * torch.nan, y[100:])])
    normed = nn.Sequential(model[0], model[1], nn.utils.parametrizations.weight_norm(model[2]))
    with pytest.raises(InvalidArgumentError, match="the head '2' is a ParametrizedLinear; name the Linear"):
        fit_head(normed, "2", [(x, y)])


def test_a_workload_begins_with_a_fitted_head(tmp_path):
    """A small network of random weights: its head alone, fitted, tells most digits apart."""
    new, fitted = task_of(test_examples=0), task_of(test_examples=0, fit=1000)
    assert new.base_id != fitted.base_id
    models = [task.start(base_of(task, tmp_path)) for task in (new, fitted)]
    accuracies = [task.evaluate(model).metrics["accuracy"] for task, model in zip((new, fitted), models, strict=True)]
    assert accuracies[0] < 0.25
    assert accuracies[1] > 0.7
    for name, tensor in models[0].state_dict().items():
        assert torch.equal(tensor, models[1].state_dict()[name]) == (not name.startswith("head."))
    with pytest.raises(ExperimentError, match="fit must be 0 or a number of examples, at least 10, not 3"):
        task_of(fit=3)
