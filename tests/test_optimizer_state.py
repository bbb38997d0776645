"""Runs that are saved, copied and continued."""

import copy
import io
import math
import pickle

import numpy as np
import pytest
import torch

import forwardtune as ft
from tests.helpers.optimizers import METHODS, every_method, loss_of, network, problem, weights


def train(model, optimizer, steps):
    """Steps with a schedule of rates."""
    closure = loss_of(model)
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = group["first_lr"] * (1 + math.cos(step / 10))
        optimizer.step(closure)


def pickled(model, optimizer, make):
    return pickle.loads(pickle.dumps((model, optimizer)))


def deep_copied(model, optimizer, make):
    return copy.deepcopy((model, optimizer))


def saved(model, optimizer, make):
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    other = network(next(model.parameters()).dtype)
    fresh = make(other.parameters(), seed=1)
    for target, state in zip((other, fresh), torch.load(file, weights_only=True), strict=True):
        target.load_state_dict(state)
    return other, fresh


def snapshot(model, optimizer, make):
    """A state_dict is not touched by steps that follow, and two optimizers that load it do not share it."""
    weights, state = copy.deepcopy(model.state_dict()), optimizer.state_dict()
    train(model, optimizer, range(3))
    pair = [(network(next(model.parameters()).dtype), None) for _ in range(2)]
    pair = [(model, make(model.parameters(), seed=1)) for model, _ in pair]
    for other, fresh in pair:
        other.load_state_dict(weights)
        fresh.load_state_dict(state)
    train(*pair[1], range(2))
    return pair[0]


@pytest.mark.filterwarnings("ignore:.* steps saw the same loss")  # in bfloat16, at S2P's distances
@every_method
@pytest.mark.parametrize("how", [pickled, deep_copied, saved, snapshot])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_continued_run_equals_one_never_stopped(method, how, dtype):
    make, _ = METHODS[method]

    def start():
        model = network(dtype)
        optimizer = make(model.parameters(), seed=9, distribution="normal")
        optimizer.param_groups[0]["first_lr"] = optimizer.param_groups[0]["lr"]
        torch.manual_seed(1)
        return model, optimizer

    model, one = start()
    train(model, one, range(30))
    whole = weights(model)

    model, two = start()
    train(model, two, range(11))
    generator, last = torch.get_rng_state(), two.last_step
    model, two = how(model, two, make)
    assert two.last_step == (last if how in (pickled, deep_copied) else None)
    torch.set_rng_state(generator)
    train(model, two, range(11, 30))
    assert torch.equal(weights(model), whole)
    assert two.param_groups[0]["memory"] == one.param_groups[0]["memory"]
    assert two.last_step == one.last_step


def test_checkpoints_of_groups_that_grew_or_were_frozen():
    a, b = torch.ones(3), torch.ones(3)
    one = ft.VS2P([a], lr=1.0)
    one.step(lambda: a.sum())
    one.add_param_group({"params": [b]})
    two = ft.VS2P([{"params": [a]}, {"params": [b]}], lr=1.0)
    two.load_state_dict(one.state_dict())
    assert two.queries == 2

    model, closure = problem()
    three, four = ft.VS2P(model.parameters(), lr=1.0), ft.VS2P(model.parameters(), lr=1.0)
    three.step(closure)
    model[0].requires_grad_(False)
    four.load_state_dict(three.state_dict())
    ft.VS2P(model.parameters(), lr=1.0).load_state_dict(three.state_dict())
    assert four.queries == 2


def test_state_is_plain_whatever_kind_of_number_is_passed():
    x = torch.ones(3)
    settings = {"lr": np.float64(1.0), "rho": torch.tensor(1e-3), "tau_a": np.float32(3)}
    optimizer = ft.VS2P([x], **settings)
    optimizer.step(lambda: x.sum())
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    group = torch.load(file, weights_only=True)["param_groups"][0]
    assert [type(gamma) for gamma in group["memory"]["recent"]] == [float]
    assert {type(group[name]) for name in settings} == {float}


def test_a_state_that_is_refused_changes_nothing():
    one, two = ft.S2P([torch.ones(3)], step_size=1, alpha0=1.0, steps=9), ft.S2P([torch.ones(3)], step_size=2, L=1.0)
    before = repr(one)
    with pytest.raises(ft.InvalidArgumentError, match="step_size"):
        one.load_state_dict(two.state_dict())
    assert repr(one) == before


def test_another_noise_version_is_refused():
    optimizer = ft.VS2P([torch.ones(3)], lr=1.0)
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["run"]["noise"] = 0
    with pytest.raises(ft.InvalidArgumentError, match="noise version"):
        optimizer.load_state_dict(state)
