"""What a step does, for every method alike, and VS2P's own rules."""

import math
import threading

import pytest
import torch

import forwardtune as ft
from tests.helpers.optimizers import METHODS, every_method, problem


@every_method
def test_queries_and_record(method):
    make, queries = METHODS[method]
    model, closure = problem()
    optimizer = make(model.parameters())
    calls = []

    def counting():
        assert not torch.is_grad_enabled()
        calls.append(float(closure()))
        return torch.tensor(calls[-1])

    loss = optimizer.step(counting)
    record = optimizer.last_step
    assert len(calls) == queries == len(record.offsets) == len(record.losses) == record.queries == optimizer.queries
    assert list(record.losses) == calls
    assert record.taken
    assert record.step == 0
    nearest = min(map(abs, record.offsets))
    near = [v for t, v in zip(record.offsets, record.losses, strict=True) if abs(t) == nearest]
    assert isinstance(loss, torch.Tensor)
    assert float(loss) == pytest.approx(sum(near) / len(near))
    assert all(p.grad is None for p in model.parameters())


@every_method
@pytest.mark.parametrize("distribution", ["rademacher", "normal", "uniform", "sphere"])
def test_the_loss_falls(method, distribution):
    make, _ = METHODS[method]
    model, closure = problem()
    model.eval()
    with torch.no_grad():
        before = float(closure())
    optimizer = make(model.parameters(), distribution=distribution, directions=2)
    for _ in range(150):
        optimizer.step(closure)
    with torch.no_grad():
        assert float(closure()) < 0.97 * before


@every_method
def test_a_step_moves_to_t(method):
    """x + t*s in one go is where the moves over the probes end, to within rounding."""
    make, _ = METHODS[method]
    model, closure = problem(torch.float64)
    optimizer = make(model.parameters(), seed=4)
    for step in range(5):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step(closure)
        for number, (old, p) in enumerate(zip(before, model.parameters(), strict=True)):
            s = optimizer.field.values(step, 0, number, 0, p.numel()).view(p.shape)
            torch.testing.assert_close(p.detach(), old + optimizer.last_step.t * s, rtol=0, atol=1e-14)


@every_method
def test_directions_are_averaged(method):
    make, queries = METHODS[method]
    model, closure = problem(torch.float64)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = make(model.parameters(), seed=4, directions=3)
    optimizer.step(closure)
    record = optimizer.last_step
    assert optimizer.queries == 3 * queries
    for number, (old, p) in enumerate(zip(before, model.parameters(), strict=True)):
        lines = [optimizer.field.values(0, j, number, 0, p.numel()).view(p.shape) for j in range(3)]
        moved = sum(record.lines[j][0].t * s for j, s in enumerate(lines)) / 3
        torch.testing.assert_close(p.detach(), old + moved, rtol=0, atol=1e-14)


@every_method
def test_torch_schedulers_drive_lr(method):
    """The step is in proportion to lr, for every method."""
    make, _ = METHODS[method]
    taken = []
    for factor in (1.0, 0.5):
        x = torch.tensor([0.3, -0.2], dtype=torch.float64)
        optimizer = make([x], lr=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor)  # noqa: B023
        optimizer.step(lambda: x[0])  # noqa: B023
        scheduler.step()
        taken.append(optimizer.last_step.t)
    assert taken[0] != 0
    assert taken[1] == pytest.approx(0.5 * taken[0])


def test_lr_as_a_tensor():
    x, y = torch.ones(3), torch.ones(3)
    one, two = ft.MeZO([x], lr=0.5), ft.MeZO([y], lr=torch.tensor(0.5))
    one.step(lambda: x.sum())
    two.step(lambda: y.sum())
    assert torch.equal(x, y)


def test_floats_and_plateaus():
    """A closure that returns floats, and an objective with plateaus: no move, no NaN, no complaint."""
    x = torch.tensor([1.0, 2.0])
    for make, _ in METHODS.values():
        optimizer = make([x])
        loss = optimizer.step(lambda: 0.5)
        assert loss == 0.5
        assert isinstance(loss, float)
        assert optimizer.last_step.t == 0
        assert optimizer.last_step.taken
    torch.testing.assert_close(x, torch.tensor([1.0, 2.0]))


def test_the_loss_of_integers_and_of_groups():
    x, y = torch.ones(2), torch.ones(2)
    values = iter([3, 4])
    loss = ft.VS2P([x], lr=1.0).step(lambda: torch.tensor(next(values)))
    assert loss == 3.5
    optimizer = ft.STP([{"params": [x], "lr": 0.0}, {"params": [y], "lr": 1.0}])
    assert optimizer.step(lambda: y.sum().square()) == pytest.approx(4.0)


def test_what_a_run_is_can_be_read_and_not_written():
    x = torch.tensor([1.0, 2.0])
    optimizer = ft.VS2P([x], seed=7, distribution="normal", directions=3, max_nonfinite=9, lr=1.0)
    values = {"method": "VS2P", "seed": 7, "distribution": "normal", "directions": 3}
    counts = {"steps": 0, "queries": 0, "nonfinite": 0, "plateaus": 0}
    assert {name: getattr(optimizer, name) for name in values | counts} == values | counts
    optimizer.step(lambda: x.sum())
    optimizer.step(lambda: 0.5)
    with pytest.warns(RuntimeWarning, match="not finite"):
        optimizer.step(lambda: math.nan)
    optimizer.step(lambda: math.nan)
    counts = {"steps": 4, "queries": 6 + 6 + 1 + 1, "nonfinite": 2, "plateaus": 1}
    assert {name: getattr(optimizer, name) for name in values | counts} == values | counts
    optimizer.step(lambda: x.sum())
    assert (optimizer.steps, optimizer.nonfinite) == (5, 0)
    for name in values | counts:
        with pytest.raises(AttributeError, match="no setter"):
            setattr(optimizer, name, 1)


def test_a_step_can_be_read_at_a_glance():
    x = torch.ones(2)
    optimizer = ft.VS2P([x], lr=1.0)
    optimizer.step(lambda: 0.25)
    assert str(optimizer.last_step) == "step 0: loss 0.25, gamma 0, sigma 0, t 0, 2 queries"


def test_steps_work_outside_the_main_thread():
    model, closure = problem()
    optimizer = ft.VS2P(model.parameters(), lr=1.0)
    thread = threading.Thread(target=optimizer.step, args=(closure,))
    thread.start()
    thread.join()
    assert optimizer.queries == 2


def test_vs2p_survives_gigantic_losses():
    x = torch.ones(2)
    optimizer = ft.VS2P([x], lr=1.0, rho=1e-3)
    values = iter([1e200, 0.0, 3e200, 0.0])
    for _ in range(2):
        optimizer.step(lambda: next(values))
        assert optimizer.last_step.taken
    assert optimizer.last_step.sigma == pytest.approx(1e203 / math.sqrt(2))


def test_vs2p_step_is_bounded_and_does_not_see_the_scale_of_the_loss():
    steps = []
    for factor in (1.0, 1e-6, 1e6):
        model, closure = problem(torch.float64)
        optimizer = ft.VS2P(model.parameters(), lr=2.0, rho=1e-2, distribution="normal")
        taken = []
        for _ in range(40):
            optimizer.step(lambda: factor * closure())  # noqa: B023
            taken.append(optimizer.last_step.t)
        assert max(map(abs, taken)) <= 2.0 * 1e-2
        steps.append(taken)
    assert steps[1] == pytest.approx(steps[0], rel=1e-6)
    assert steps[2] == pytest.approx(steps[0], rel=1e-6)


def test_vs2p_first_step_and_zero_spread():
    x = torch.zeros(1, dtype=torch.float64)
    optimizer = ft.VS2P([x], lr=1.0, rho=0.1)
    signs = iter([1.0, 0.0] * 10)  # every gamma is 5
    optimizer.step(lambda: next(signs))
    assert optimizer.last_step.sigma == optimizer.last_step.gamma == 5.0
    assert optimizer.last_step.t == pytest.approx(-0.1 / 4)  # sigma = |gamma| on the first step
    optimizer.step(lambda: next(signs))
    assert optimizer.last_step.sigma == 0.0
    assert optimizer.last_step.t == pytest.approx(-0.1)  # no spread: the full step, and no more


def test_vs2p_window():
    x = torch.zeros(1, dtype=torch.float64)
    optimizer = ft.VS2P([x], lr=1.0, rho=0.5, window=3)
    for gamma in (1.0, 2.0, 4.0, 8.0):
        values = iter([gamma, 0.0])
        optimizer.step(lambda: next(values))  # noqa: B023
    assert optimizer.param_groups[0]["memory"] == {"recent": (2.0, 4.0, 8.0)}
    assert optimizer.last_step.sigma == pytest.approx(math.sqrt(28 / 3))
