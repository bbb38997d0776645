"""What a user of torch.optim expects, for every method alike."""

import copy
import io
import math
import pickle
import signal
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forwardtune as ft

# One table of optimizers drives all tests: name -> (constructor, evaluations a step)
METHODS = {
    "VS2P": (lambda p, **k: ft.VS2P(p, **{"lr": 1.0, "rho": 1e-2, **k}), 2),
    "MeZO": (lambda p, **k: ft.MeZO(p, **{"lr": 1e-2, **k}), 2),
    "STP": (lambda p, **k: ft.STP(p, **{"lr": 1e-2, **k}), 3),
    "S2P-1": (lambda p, **k: ft.S2P(p, **{"step_size": "stationary", "alpha0": 1.0, "steps": 50, **k}), 2),
    "S2P-2": (lambda p, **k: ft.S2P(p, **{"step_size": "dynamic", "L": 0.5, **k}), 4),
    "S2P-3": (lambda p, **k: ft.S2P(p, **{"step_size": "stationary-relaxed", "L1": 10.0, "steps": 50, **k}), 2),
    "S2P-4": (lambda p, **k: ft.S2P(p, **{"step_size": "dynamic-relaxed", "L0": 0.5, "L1": 0.5, **k}), 4),
}
every_method = pytest.mark.parametrize("method", list(METHODS))


def network(dtype=torch.float32):
    """A small network with dropout and BatchNorm."""
    torch.manual_seed(0)
    layers = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3)
    return nn.Sequential(*layers).to(dtype)


def loss_of(model):
    """The loss of one fixed batch."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 6, generator=generator).to(next(model.parameters()).dtype)
    y = torch.randint(0, 3, (40,), generator=generator)
    return lambda: F.cross_entropy(model(x), y)


def problem(dtype=torch.float32):
    model = network(dtype)
    return model, loss_of(model)


def weights(model):
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


@every_method
def test_evaluations_and_record(method):
    make, evaluations = METHODS[method]
    model, closure = problem()
    optimizer = make(model.parameters())
    calls = []

    def counting():
        assert not torch.is_grad_enabled()
        calls.append(float(closure()))
        return torch.tensor(calls[-1])

    loss = optimizer.step(counting)
    record = optimizer.last_step
    assert len(calls) == evaluations == len(record.offsets) == len(record.losses) == record.queries == optimizer.queries
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
    """x + t*s in one go is where the walk over the probes ends, to within rounding."""
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
    make, evaluations = METHODS[method]
    model, closure = problem(torch.float64)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = make(model.parameters(), seed=4, directions=3)
    optimizer.step(closure)
    record = optimizer.last_step
    assert optimizer.queries == 3 * evaluations
    for number, (old, p) in enumerate(zip(before, model.parameters(), strict=True)):
        lines = [optimizer.field.values(0, j, number, 0, p.numel()).view(p.shape) for j in range(3)]
        moved = sum(record.lines[j][0].t * s for j, s in enumerate(lines)) / 3
        torch.testing.assert_close(p.detach(), old + moved, rtol=0, atol=1e-14)


def walk(model, optimizer, steps):
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
    walk(model, optimizer, range(3))
    pair = [(network(next(model.parameters()).dtype), None) for _ in range(2)]
    pair = [(model, make(model.parameters(), seed=1)) for model, _ in pair]
    for other, fresh in pair:
        other.load_state_dict(weights)
        fresh.load_state_dict(state)
    walk(*pair[1], range(2))
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
    walk(model, one, range(30))
    whole = weights(model)

    model, two = start()
    walk(model, two, range(11))
    rng, last = torch.get_rng_state(), two.last_step
    model, two = how(model, two, make)
    assert two.last_step == (last if how in (pickled, deep_copied) else None)
    torch.set_rng_state(rng)
    walk(model, two, range(11, 30))
    assert torch.equal(weights(model), whole)
    assert two.param_groups[0]["memory"] == one.param_groups[0]["memory"]
    assert two.last_step == one.last_step


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


# --- parameters of all kinds ---


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
        optimizer = ft.VS2P([{"params": params[:2]}, {"params": params[2:]}] if split else params, seed=1)
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
    optimizer = ft.VS2P(model[0].parameters(), seed=2)
    optimizer.step(closure)
    optimizer.add_param_group({"params": model[4].parameters(), "lr": 0.1})
    before = model[4].weight.detach().clone()
    optimizer.step(closure)
    assert not torch.equal(model[4].weight, before)
    assert optimizer.queries == 4
    assert optimizer.field.dimension == sum(p.numel() for m in (model[0], model[4]) for p in m.parameters())


class Odd(nn.Module):
    """Parameters of every dtype and layout, some tied."""

    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.transposed = nn.Parameter(torch.randn(4, 5, generator=g).t())
        self.f64 = nn.Parameter(torch.randn(5, dtype=torch.float64, generator=g))
        self.bf16 = nn.Parameter(torch.randn(5, generator=g).bfloat16())
        self.f16 = nn.Parameter(torch.randn(5, generator=g).half())
        self.frozen = nn.Parameter(torch.randn(5, generator=g), requires_grad=False)
        self.tied = self.frozen
        self.alias = nn.Parameter(self.f64.data)

    def loss(self):
        parts = self.transposed.sum(1), self.f64, self.bf16.double(), self.f16.double(), self.frozen, self.tied
        total = sum(part.double() for part in parts) * self.scalar + self.empty.sum()
        return ((total - 1) ** 2).mean()


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
    ("method", "backend", "steps"), [*((method, "numba", 40) for method in METHODS), ("VS2P", "triton", 3)]
)
def test_backends_walk_in_lockstep(method, backend, steps):
    """The slow, obvious backend and a fast one: the same weights and the same state, bit for bit."""
    make, _ = METHODS[method]
    slow, fast = Odd(), Odd()
    one = make(slow.parameters(), backend="reference", distribution="normal", directions=2)
    two = make(fast.parameters(), backend=backend, distribution="normal", directions=2)
    for _ in range(steps):
        one.step(slow.loss)
        two.step(fast.loss)
        assert one.last_step == two.last_step
        for truth, ours in zip(slow.parameters(), fast.parameters(), strict=True):
            assert torch.equal(truth, ours)


# --- what a closure may do ---


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


@every_method
@pytest.mark.parametrize("at", [1, 2])
def test_an_exception_puts_the_weights_back(method, at):
    make, _ = METHODS[method]
    model, closure = problem(torch.float64)
    optimizer = make(model.parameters(), directions=2)
    optimizer.step(closure)
    first = optimizer.queries
    state, before = copy.deepcopy(optimizer.param_groups[0]["memory"]), weights(model)
    buffers = [b.clone() for b in model.buffers()]
    rng = torch.get_rng_state()
    calls = []

    def failing():
        calls.append(closure())
        if len(calls) == at:
            raise KeyError("mine")
        return calls[-1]

    with pytest.raises(KeyError, match="mine"):
        optimizer.step(failing)
    torch.testing.assert_close(weights(model), before, rtol=0, atol=1e-15)
    assert optimizer.param_groups[0]["memory"] == state
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    assert torch.equal(torch.get_rng_state(), rng)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert optimizer.queries == first + at
    optimizer.step(closure)
    assert optimizer.last_step.step == 2  # the failed step keeps its number: its noise is never used again


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("move", [0, 1, 2])
def test_an_interrupt_during_a_move_waits_for_its_end(monkeypatch, number, move):
    """The signal comes when the kernel has run and the line does not know it yet; the last move is for good."""
    model, closure = problem(torch.float64)
    optimizer = ft.VS2P(model.parameters(), rho=0.1)
    before = weights(model)
    twin, twins_closure = problem(torch.float64)
    torch.manual_seed(7)
    ft.VS2P(twin.parameters(), rho=0.1).step(twins_closure)
    torch.manual_seed(7)
    walk, moves = optimizer.field.mover.move, []

    def interrupted(step, terms):
        walk(step, terms)
        moves.append(terms)
        if len(moves) == move + 1:
            signal.raise_signal(number)

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(optimizer.field.mover, "move", interrupted)
    old = signal.signal(number, stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            optimizer.step(closure)
        assert signal.getsignal(number) is stop
    finally:
        signal.signal(number, old)
    torch.testing.assert_close(weights(model), weights(twin) if move == 2 else before, rtol=0, atol=1e-14)
    assert (optimizer.last_step is not None) == (move == 2)
    assert optimizer.param_groups[0]["run"]["step"] == 1


def test_steps_work_outside_the_main_thread():
    model, closure = problem()
    optimizer = ft.VS2P(model.parameters())
    thread = threading.Thread(target=optimizer.step, args=(closure,))
    thread.start()
    thread.join()
    assert optimizer.queries == 2


@every_method
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite(method, bad):
    make, _ = METHODS[method]
    model, closure = problem(torch.float64)
    optimizer = make(model.parameters(), max_nonfinite=3)
    optimizer.step(closure)
    before, memory = weights(model), optimizer.param_groups[0]["memory"]
    buffers = [b.clone() for b in model.buffers()]

    def sometimes():
        closure()
        return bad

    with pytest.warns(RuntimeWarning, match="not finite"):
        loss = optimizer.step(sometimes)
    optimizer.step(sometimes)  # warnings are errors here: there is no second one
    assert repr(loss) == repr(bad)
    assert not optimizer.last_step.taken
    torch.testing.assert_close(weights(model), before, rtol=0, atol=1e-15)
    assert optimizer.param_groups[0]["memory"] is memory
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step(closure)  # a good one in between starts the count anew
        optimizer.step(sometimes)
        optimizer.step(sometimes)
        with pytest.raises(ft.NonFiniteLossError, match="3 steps in a row"):
            optimizer.step(sometimes)


@pytest.mark.parametrize(
    ("make", "dtype"),
    [(lambda p: ft.S2P(p, step_size="dynamic", L=1e-9), torch.float32), (lambda p: ft.MeZO(p, lr=1e9), torch.float16)],
)
def test_offsets_too_far_to_come_back_from_are_not_walked(make, dtype):
    x = torch.tensor([1.0, -2.0, 3.0], dtype=dtype)
    optimizer = make([x])
    with pytest.warns(RuntimeWarning, match="return exactly") as caught:
        optimizer.step(lambda: x.double().square().sum())
    assert caught[0].filename == __file__
    assert not optimizer.last_step.taken
    torch.testing.assert_close(x, torch.tensor([1.0, -2.0, 3.0], dtype=dtype), rtol=0, atol=2e-3)


def test_vs2p_survives_gigantic_losses():
    x = torch.ones(2)
    optimizer = ft.VS2P([x])
    values = iter([1e200, 0.0, 3e200, 0.0])
    for _ in range(2):
        optimizer.step(lambda: next(values))
        assert optimizer.last_step.taken
    assert optimizer.last_step.sigma == pytest.approx(1e203 / math.sqrt(2))


def test_the_loss_of_integers_and_of_groups():
    x, y = torch.ones(2), torch.ones(2)
    values = iter([3, 4])
    loss = ft.VS2P([x]).step(lambda: torch.tensor(next(values)))
    assert loss == 3.5
    optimizer = ft.STP([{"params": [x], "lr": 0.0}, {"params": [y], "lr": 1.0}])
    assert optimizer.step(lambda: y.sum().square()) == pytest.approx(4.0)


def test_a_step_can_be_read_at_a_glance():
    x = torch.ones(2)
    optimizer = ft.VS2P([x])
    optimizer.step(lambda: 0.25)
    assert str(optimizer.last_step) == "step 0: loss 0.25, gamma 0, sigma 0, t 0, 2 queries"


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "not NoneType"),
        (torch.ones(3), "reduce it"),
        (torch.tensor(1j), "real number, not complex"),
        ("3", "not str"),
    ],
)
def test_what_is_not_a_loss(returned, message):
    x = torch.ones(3)
    with pytest.raises(ft.InvalidArgumentError, match=message):
        ft.VS2P([x]).step(lambda: returned)
    torch.testing.assert_close(x, torch.ones(3))


# --- VS2P's own rules ---


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
    optimizer = ft.VS2P([x], rho=0.5, window=3)
    for gamma in (1.0, 2.0, 4.0, 8.0):
        values = iter([gamma, 0.0])
        optimizer.step(lambda: next(values))  # noqa: B023
    assert optimizer.param_groups[0]["memory"] == {"recent": (2.0, 4.0, 8.0)}
    assert optimizer.last_step.sigma == pytest.approx(math.sqrt(28 / 3))


# --- bad input ---


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: ft.VS2P([]), "empty"),
        (lambda p: ft.VS2P([{"params": []}]), "empty"),
        (lambda p: ft.VS2P(p), "pass a list"),
        (lambda p: ft.VS2P(nn.Linear(2, 2)), "model.parameters"),
        (lambda p: ft.VS2P({p}), "order of the parameters"),
        (lambda p: ft.VS2P([("a", p), p]), "name all"),
        (lambda p: ft.VS2P([{"lr": 1.0}]), "no 'params'"),
        (lambda p: ft.VS2P([torch.ones(0)]), "no elements"),
        (lambda p: ft.VS2P([p], lr="0.1"), "lr must be a number"),
        (lambda p: ft.VS2P([p], rho=None), "rho must be a number"),
        (lambda p: ft.VS2P([1.0]), "only tensors"),
        (lambda p: ft.VS2P([p], lr=-1), "lr must be a number, zero or above"),
        (lambda p: ft.VS2P([p], lr=math.nan), "lr must be a number, zero or above"),
        (lambda p: ft.VS2P([p], rho=0), "rho must be a number above zero"),
        (lambda p: ft.MeZO([p], rho=-1e-3), "rho must be a number above zero"),
        (lambda p: ft.STP([p], lr=math.inf), "lr must be"),
        (lambda p: ft.VS2P([{"params": [p], "rho": -1}]), "rho must be a number above zero"),
        (lambda p: ft.VS2P([p], tau_b=0), "tau_b must be a number above zero"),
        (lambda p: ft.VS2P([p], window=1), "window"),
        (lambda p: ft.VS2P([p], distribution="gauss"), "rademacher, normal, uniform, sphere"),
        (lambda p: ft.VS2P([p], directions=0), "directions must be an integer of at least 1"),
        (lambda p: ft.VS2P([p], seed=-1), "seed must be an integer"),
        (lambda p: ft.VS2P([p], seed=2**64), "seed must be an integer"),
        (lambda p: ft.VS2P([p], backend="magic"), "auto, numba, triton, reference"),
        (lambda p: ft.VS2P([p], max_nonfinite=0), "max_nonfinite"),
        (lambda p: ft.VS2P([{"params": [p], "seed": 3}]), "holds for the whole run"),
        (lambda p: ft.VS2P([torch.ones(3, dtype=torch.int64)]), "leave it out"),
        (lambda p: ft.VS2P([torch.ones(3, dtype=torch.complex64)]), "leave it out"),
        (lambda p: ft.VS2P([torch.ones(3, device="meta")]), "materialise"),
        (lambda p: ft.VS2P(nn.LazyLinear(3).parameters()), "run the model once"),
        (lambda p: ft.S2P([p], step_size="newton"), "stationary, dynamic"),
        (lambda p: ft.S2P([p], step_size=5), "or 1 to 4"),
        (lambda p: ft.S2P([p], step_size=1, alpha0=1.0), "needs steps"),
        (lambda p: ft.S2P([p], step_size="dynamic"), "needs L;"),
        (lambda p: ft.S2P([p], step_size=3, steps=10), "needs L1"),
        (lambda p: ft.S2P([p], step_size=4, L1=1.0), "needs L0"),
        (lambda p: ft.S2P([p], step_size=2, L=-1.0), "L must be a number above zero"),
        (lambda p: ft.S2P([p], step_size=2, L=1.0, L0=1.0), "does not use L0"),
        (lambda p: ft.S2P([p], step_size=1, alpha0=1.0, steps=10.5), "steps must be an integer"),
        (lambda p: ft.S2P([p], step_size=True, alpha0=1.0, steps=10), "unknown step_size"),
        (lambda p: ft.VS2P([torch._neg_view(p)]), "no dense memory"),
        (lambda p: ft.VS2P([p]).step(), "needs a closure"),
        (lambda p: ft.VS2P([p]).step(p.sum()), "needs a closure"),
        (lambda p: ft.VS2P([p]).load_state_dict(None), "not the state_dict"),
        (lambda p: ft.VS2P([p]).load_state_dict(ft.MeZO([p]).state_dict()), "state of a MeZO"),
        (
            lambda p: ft.VS2P([p]).load_state_dict(ft.VS2P([torch.ones(4)]).state_dict()),
            r"groups of \[4\] weights, not \[3\]",
        ),
        (lambda p: ft.VS2P([p]).load_state_dict(torch.optim.SGD([p]).state_dict()), "not the state_dict"),
    ],
)
def test_bad_input_is_refused_with_a_remedy(make, message):
    with pytest.raises(ft.InvalidArgumentError, match=message):
        make(torch.ones(3))


@pytest.mark.parametrize(("setting", "value"), [("lr", -1.0), ("lr", math.nan), ("rho", 0.0), ("window", 0)])
def test_settings_edited_later_are_checked_too(setting, value):
    optimizer = ft.VS2P([torch.ones(3)])
    optimizer.param_groups[0][setting] = value
    with pytest.raises(ft.InvalidArgumentError, match=setting):
        optimizer.step(lambda: 0.0)


@pytest.mark.parametrize("left", [0, 100])
def test_memory_that_was_taken_away_is_noticed(left):
    p = torch.ones(1000)
    optimizer = ft.VS2P([p])
    p.untyped_storage().resize_(left)
    with pytest.raises(ft.InvalidArgumentError, match="no dense memory"):
        optimizer.step(lambda: 0.0)


def test_checkpoints_of_groups_that_grew_or_were_frozen():
    a, b = torch.ones(3), torch.ones(3)
    one = ft.VS2P([a])
    one.step(lambda: a.sum())
    one.add_param_group({"params": [b]})
    two = ft.VS2P([{"params": [a]}, {"params": [b]}])
    two.load_state_dict(one.state_dict())
    assert two.queries == 2

    model, closure = problem()
    three, four = ft.VS2P(model.parameters()), ft.VS2P(model.parameters())
    three.step(closure)
    model[0].requires_grad_(False)
    four.load_state_dict(three.state_dict())
    ft.VS2P(model.parameters()).load_state_dict(three.state_dict())
    assert four.queries == 2


def test_state_is_plain_whatever_kind_of_number_is_passed():
    import numpy as np

    x = torch.ones(3)
    settings = {"lr": np.float64(1.0), "rho": torch.tensor(1e-3), "tau_a": np.float32(3), "window": np.int64(50)}
    optimizer = ft.VS2P([x], **{**settings, "window": 50})
    optimizer.step(lambda: x.sum())
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert {type(gamma) for gamma in loaded["param_groups"][0]["memory"]["recent"]} == {float}


def test_an_alias_that_is_not_frozen_moves():
    w = torch.ones(3)
    frozen, free, other = nn.Parameter(w, requires_grad=False), nn.Parameter(w), nn.Parameter(torch.ones(2))
    optimizer = ft.STP([frozen, free, other], lr=0.1)
    assert optimizer.field.dimension == 5
    optimizer.step(lambda: w.square().sum() + other.square().sum())
    assert optimizer.last_step.t == 0 or not torch.equal(w, torch.ones(3))


def test_a_state_that_is_refused_changes_nothing():
    one, two = ft.S2P([torch.ones(3)], step_size=1, alpha0=1.0, steps=9), ft.S2P([torch.ones(3)], step_size=2, L=1.0)
    before = repr(one)
    with pytest.raises(ft.InvalidArgumentError, match="step_size"):
        one.load_state_dict(two.state_dict())
    assert repr(one) == before


def test_reach_is_where_it_says():
    for dtype, limit in ((torch.float32, 2896.3), (torch.bfloat16, 11.3)):
        x = torch.ones(3, dtype=dtype)
        ft.STP([x], lr=0.99 * limit).step(lambda: 0.0)
        with pytest.warns(RuntimeWarning, match="return exactly"):
            loss = ft.STP([x], lr=1.01 * limit).step(lambda: 0.0)
        assert torch.is_tensor(loss)
        assert loss.isnan()


def test_an_interrupt_during_an_averaged_move_comes_after_the_step(monkeypatch):
    model, closure = problem(torch.float32)
    optimizer = ft.VS2P(model.parameters(), rho=0.01, directions=3)
    twin, twins_closure = problem(torch.float32)
    torch.manual_seed(7)
    ft.VS2P(twin.parameters(), rho=0.01, directions=3).step(twins_closure)
    torch.manual_seed(7)
    walk = optimizer.field.mover.move

    def interrupted(step, terms):
        walk(step, terms)
        if len(terms) == 3 and any(any(term.forth) for term in terms):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(optimizer.field.mover, "move", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    assert torch.equal(weights(model), weights(twin))
    assert optimizer.last_step.taken


def test_unknown_options_are_type_errors():
    with pytest.raises(TypeError, match="momentum"):
        ft.VS2P([torch.ones(3)], momentum=0.9)


def test_another_noise_version_is_refused():
    optimizer = ft.VS2P([torch.ones(3)])
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["run"]["noise"] = 0
    with pytest.raises(ft.InvalidArgumentError, match="noise version"):
        optimizer.load_state_dict(state)


def test_backend_is_chosen_in_the_open(monkeypatch):
    import sys

    assert "backend: numba" in repr(ft.VS2P([torch.ones(3)]))
    assert "backend: reference" in repr(ft.VS2P([torch.ones(3)], backend="reference"))
    monkeypatch.setitem(sys.modules, "forwardtune.noise.backends.cpu_numba", None)
    with pytest.raises(ft.BackendError, match="pip install numba"):
        ft.VS2P([torch.ones(3)], backend="numba")
    with pytest.warns(RuntimeWarning, match="pip install numba"):
        optimizer = ft.VS2P([torch.ones(3)])
    assert "backend: reference" in repr(optimizer)
    assert "backend: triton" in repr(ft.VS2P([torch.ones(3)], backend="triton"))
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ft.BackendError, match="cannot move a parameter on cpu"):
        ft.VS2P([torch.ones(3)], backend="triton")
