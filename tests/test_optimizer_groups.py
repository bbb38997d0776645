"""Parameters of all kinds, in groups, and what moves them."""

import sys

import pytest
import torch
from torch import nn

import forwardtune as ft
from tests.helpers.optimizers import METHODS, Odd, every_method, loss_of, problem, weights


def test_groups_have_their_own_lr_and_rho():
    model, closure = problem(torch.float64)
    first, second = list(model[0].parameters()), list(model[4].parameters())
    optimizer = ft.MeZO([{"params": first, "lr": 0.1, "rho": 1e-3}, {"params": second, "rho": 2e-3}], lr=0.5)
    before = [p.detach().clone() for p in (*first, *second)]
    optimizer.step(closure)
    one, two = optimizer.last_step.lines[0]
    assert one.offsets == (1e-3, -1e-3)
    assert two.offsets == (2e-3, -2e-3)
    assert one.losses == two.losses
    assert one.gamma == pytest.approx(2 * two.gamma)
    assert one.t == pytest.approx(-0.1 * one.gamma)
    assert two.t == pytest.approx(-0.5 * two.gamma)
    for number, (old, p) in enumerate(zip(before, (*first, *second), strict=True)):
        s = optimizer.field.values(0, 0, number, 0, p.numel()).view(p.shape)
        t = one.t if number < 2 else two.t
        torch.testing.assert_close(p.detach(), old + t * s, rtol=0, atol=1e-14)


def test_groups_with_the_same_settings_are_one_vector():
    results = []
    for split in (False, True):
        model, closure = problem()
        params = list(model.parameters())
        optimizer = ft.VS2P([{"params": params[:2]}, {"params": params[2:]}] if split else params, seed=1, lr=1.0)
        for _ in range(10):
            optimizer.step(closure)
        results.append(weights(model))
    assert torch.equal(*results)


@every_method
def test_named_parameters(method):
    make, _ = METHODS[method]
    results = []
    for named in (False, True):
        model, closure = problem()
        optimizer = make(model.named_parameters() if named else model.parameters())
        optimizer.step(closure)
        results.append(weights(model))
    assert torch.equal(*results)
    assert optimizer.param_groups[0]["param_names"] == [name for name, _ in model.named_parameters()]
    groups = [{"params": list(model[0].named_parameters())}, {"params": list(model[4].named_parameters())}]
    assert make(groups).param_groups[1]["param_names"] == ["weight", "bias"]


def test_a_group_can_be_added_later():
    model, closure = problem()
    optimizer = ft.VS2P(model[0].parameters(), seed=2, lr=1.0)
    optimizer.step(closure)
    optimizer.add_param_group({"params": model[4].parameters(), "lr": 0.1})
    before = model[4].weight.detach().clone()
    optimizer.step(closure)
    assert not torch.equal(model[4].weight, before)
    assert optimizer.queries == 4
    assert optimizer.field.dimension == sum(p.numel() for m in (model[0], model[4]) for p in m.parameters())


@every_method
@pytest.mark.parametrize("backend", ["numba", "reference"])
def test_odd_parameters(method, backend):
    make, _ = METHODS[method]
    model = Odd()
    optimizer = make(model.parameters(), backend=backend, seed=1, **({"L": 50.0} if method == "S2P-2" else {}))
    assert optimizer.field.dimension == 1 + 20 + 5 * 3
    frozen = model.frozen.clone()
    layout = [(p.shape, p.stride(), p.dtype) for p in model.parameters()]
    first = model.loss().item()
    for _ in range(200):
        optimizer.step(model.loss)
    assert model.loss().item() < first
    assert layout == [(p.shape, p.stride(), p.dtype) for p in model.parameters()]
    assert model.alias.data_ptr() == model.f64.data_ptr()
    assert torch.equal(model.frozen, frozen)


def test_frozen_parameters_stay_unless_all_are_frozen():
    model, closure = problem()
    model[0].requires_grad_(False)
    optimizer = ft.MeZO(model.parameters(), lr=1e-2)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step(closure)
    moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert moved == [p.requires_grad for p in model.parameters()] == [False, False, True, True, True, True]
    # a parameter keeps its noise whatever else is frozen
    s = optimizer.field.values(0, 0, 4, 0, model[4].weight.numel()).view(3, 16)
    torch.testing.assert_close(
        model[4].weight.detach().double(), before[4] + optimizer.last_step.t * s, rtol=0, atol=1e-7
    )
    model.requires_grad_(False)
    optimizer.step(closure)
    assert not torch.equal(model[0].weight, before[0])


def test_an_alias_that_is_not_frozen_moves():
    w = torch.ones(3)
    frozen, free, other = nn.Parameter(w, requires_grad=False), nn.Parameter(w), nn.Parameter(torch.ones(2))
    optimizer = ft.STP([frozen, free, other], lr=0.1)
    assert optimizer.field.dimension == 5
    optimizer.step(lambda: w.square().sum() + other.square().sum())  # five signs do not cancel: one side is better
    t, s = optimizer.last_step.t, optimizer.field.values(0, 0, 0, 0, 3)
    assert abs(t) == 0.1
    torch.testing.assert_close(w.double(), 1 + t * s, rtol=0, atol=1e-6)


def test_groups_that_are_edited_between_steps():
    a, b = torch.ones(4), torch.ones(4)
    optimizer = ft.STP([{"params": [a], "lr": 0.1}, {"params": [b], "lr": 0.2}], directions=2)
    optimizer.step(lambda: a.sum() + b.sum())
    optimizer.param_groups.pop()
    before = b.clone()
    optimizer.step(lambda: a.sum())
    assert torch.equal(b, before)
    optimizer.param_groups[0]["params"] = [b]
    before = a.clone()
    optimizer.step(lambda: b.sum())
    assert torch.equal(a, before)
    assert optimizer.queries == 3 * 2 * 3


@every_method
def test_a_model_converted_between_steps(method):
    make, _ = METHODS[method]
    model, closure = problem()
    optimizer = make(model.parameters(), seed=4)
    optimizer.step(closure)
    model.double()
    double = loss_of(model)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step(double)
    for number, (old, p) in enumerate(zip(before, model.parameters(), strict=True)):
        s = optimizer.field.values(1, 0, number, 0, p.numel()).view(p.shape)
        torch.testing.assert_close(p.detach(), old + optimizer.last_step.t * s, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("method", "backend", "steps", "rounding"),
    [
        *((method, "numba", 40, "nearest") for method in METHODS),
        ("VS2P", "numba", 40, "stochastic"),
        ("VS2P", "triton", 3, "stochastic"),
    ],
)
def test_backends_move_in_lockstep(method, backend, steps, rounding):
    """The slow, obvious backend and a fast one: the same weights and the same records, bit for bit."""
    make, _ = METHODS[method]
    slow, fast = Odd(), Odd()
    same = {"distribution": "normal", "directions": 2, "rounding": rounding}
    one = make(slow.parameters(), backend="reference", **same)
    two = make(fast.parameters(), backend=backend, **same)
    for _ in range(steps):
        one.step(slow.loss)
        two.step(fast.loss)
        assert one.last_step == two.last_step
        for truth, ours in zip(slow.parameters(), fast.parameters(), strict=True):
            assert torch.equal(truth, ours)


def test_backend_is_chosen_in_the_open(monkeypatch):
    assert "backend: numba" in repr(ft.VS2P([torch.ones(3)], lr=1.0))
    assert "backend: reference" in repr(ft.VS2P([torch.ones(3)], backend="reference", lr=1.0))
    monkeypatch.setitem(sys.modules, "forwardtune.noise.backends.cpu_numba", None)
    with pytest.raises(ft.BackendError, match="pip install numba"):
        ft.VS2P([torch.ones(3)], backend="numba", lr=1.0)
    with pytest.warns(RuntimeWarning, match="pip install numba"):
        optimizer = ft.VS2P([torch.ones(3)], lr=1.0)
    assert "backend: reference" in repr(optimizer)
    assert "backend: triton" in repr(ft.VS2P([torch.ones(3)], backend="triton", lr=1.0))
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ft.BackendError, match="cannot move a parameter on cpu"):
        ft.VS2P([torch.ones(3)], backend="triton", lr=1.0)


def test_what_is_printed_of_a_rate_that_is_found():
    x = torch.ones(3)
    optimizer = ft.VS2P([x])
    assert "    lr: auto, surveying\n" in repr(optimizer)
    for _ in range(30):
        optimizer.step(lambda: x @ x)
    said = repr(optimizer)
    assert f"    lr: auto, probes at {optimizer.auto['r']:.4g}\n" in said
    assert "rho" not in said
    assert said.count("lr:") == 1
    optimizer.param_groups[0]["lr"] = 0.5
    assert "    lr: 0.5 times what is found\n" in repr(optimizer)
