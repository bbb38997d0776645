"""What goes wrong in a step, and input that is refused."""

import copy
import math
import signal
import threading
import warnings

import pytest
import torch
from torch import nn

import forwardtune as ft
from tests.helpers.optimizers import METHODS, every_method, problem, weights


@every_method
@pytest.mark.parametrize("at", [1, 2])
def test_an_exception_puts_the_weights_back(method, at):
    make, _ = METHODS[method]
    model, closure = problem(torch.float64)
    optimizer = make(model.parameters(), directions=2)
    optimizer.step(closure)
    first = optimizer.queries
    memory, before = copy.deepcopy(optimizer.param_groups[0]["memory"]), weights(model)
    buffers = [b.clone() for b in model.buffers()]
    generator = torch.get_rng_state()
    calls = []

    def failing():
        calls.append(closure())
        if len(calls) == at:
            raise KeyError("mine")
        return calls[-1]

    with pytest.raises(KeyError, match="mine"):
        optimizer.step(failing)
    torch.testing.assert_close(weights(model), before, rtol=0, atol=1e-15)
    assert optimizer.param_groups[0]["memory"] == memory
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    assert torch.equal(torch.get_rng_state(), generator)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert optimizer.queries == first + at
    optimizer.step(closure)
    assert optimizer.last_step.step == 2  # the failed step keeps its number: its noise is never used again


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("move", [0, 1, 2])
def test_an_interrupt_during_a_move_waits_for_its_end(monkeypatch, number, move):
    """The signal comes when the kernel has run and the line does not know it yet; the last move is for good."""
    model, closure = problem(torch.float64)
    optimizer = ft.VS2P(model.parameters(), lr=1.0, rho=0.1, scale="absolute")
    before = weights(model)
    twin, twins_closure = problem(torch.float64)
    torch.manual_seed(7)
    ft.VS2P(twin.parameters(), lr=1.0, rho=0.1, scale="absolute").step(twins_closure)
    torch.manual_seed(7)
    do_move, moves = optimizer.field.mover.move, []

    def interrupted(step, terms):
        do_move(step, terms)
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
    assert optimizer.steps == 1


def test_an_interrupt_during_an_averaged_move_comes_after_the_step(monkeypatch):
    model, closure = problem(torch.float32)
    optimizer = ft.VS2P(model.parameters(), lr=1.0, rho=0.01, scale="absolute", directions=3)
    twin, twins_closure = problem(torch.float32)
    torch.manual_seed(7)
    ft.VS2P(twin.parameters(), lr=1.0, rho=0.01, scale="absolute", directions=3).step(twins_closure)
    torch.manual_seed(7)
    do_move = optimizer.field.mover.move

    def interrupted(step, terms):
        do_move(step, terms)
        if len(terms) == 3 and any(any(term.forth) for term in terms):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(optimizer.field.mover, "move", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    assert torch.equal(weights(model), weights(twin))
    assert optimizer.last_step.taken


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
        optimizer.step(closure)  # a good one in between restarts the count
        optimizer.step(sometimes)
        optimizer.step(sometimes)
        with pytest.raises(ft.NonFiniteLossError, match="3 steps in a row"):
            optimizer.step(sometimes)


@pytest.mark.parametrize(
    ("make", "dtype"),
    [(lambda p: ft.S2P(p, step_size="dynamic", L=1e-9), torch.float32), (lambda p: ft.MeZO(p, lr=1e9), torch.float16)],
)
def test_offsets_too_far_to_return_from_are_not_taken(make, dtype):
    x = torch.tensor([1.0, -2.0, 3.0], dtype=dtype)
    optimizer = make([x])
    with pytest.warns(RuntimeWarning, match="return exactly") as caught:
        optimizer.step(lambda: x.double().square().sum())
    assert caught[0].filename == __file__
    assert not optimizer.last_step.taken
    torch.testing.assert_close(x, torch.tensor([1.0, -2.0, 3.0], dtype=dtype), rtol=0, atol=2e-3)


def test_reach_is_where_it_says():
    for dtype, limit in ((torch.float32, 2896.3), (torch.bfloat16, 11.3)):
        x = torch.ones(3, dtype=dtype)
        ft.STP([x], lr=0.99 * limit).step(lambda: 0.0)
        with pytest.warns(RuntimeWarning, match="return exactly"):
            loss = ft.STP([x], lr=1.01 * limit).step(lambda: 0.0)
        assert torch.is_tensor(loss)
        assert loss.isnan()


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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: ft.VS2P([]), "the list of parameters is empty"),
        (lambda p: ft.VS2P([{"params": []}]), "a parameter group is empty"),
        (lambda p: ft.VS2P(p), "pass a list"),
        (lambda p: ft.VS2P(nn.Linear(2, 2)), "model.parameters"),
        (lambda p: ft.VS2P({p}), "order of the parameters"),
        (lambda p: ft.VS2P([("a", p), p]), "name all"),
        (lambda p: ft.VS2P([{"lr": 1.0}]), "no 'params'"),
        (lambda p: ft.VS2P([torch.ones(0)]), "no elements"),
        (lambda p: ft.VS2P([p], lr="0.1"), "lr must be a number"),
        (lambda p: ft.VS2P([p], lr=1.0, rho="near"), "rho must be a number"),
        (lambda p: ft.VS2P([1.0]), "only tensors"),
        (lambda p: ft.VS2P([p], lr=-1), "lr must be a number, zero or above"),
        (lambda p: ft.VS2P([p], lr=math.nan), "lr must be a number, zero or above"),
        (lambda p: ft.VS2P([p], lr=1.0, rho=0), "rho must be a number above zero"),
        (lambda p: ft.MeZO([p], lr=1e-3, rho=-1e-3), "rho must be a number above zero"),
        (lambda p: ft.STP([p], lr=math.inf), "lr must be a number, zero or above and finite"),
        (lambda p: ft.VS2P([{"params": [p], "rho": -1}], lr=1.0), "rho must be a number above zero"),
        (lambda p: ft.VS2P([p], tau_b=0), "tau_b must be a number above zero"),
        (lambda p: ft.VS2P([p], window=1), "window must be an integer of at least 2, not 1"),
        (lambda p: ft.VS2P([p], distribution="gauss"), "rademacher, normal, uniform, sphere"),
        (lambda p: ft.VS2P([p], directions=0), "directions must be an integer of at least 1"),
        (lambda p: ft.VS2P([p], seed=-1), "seed must be an integer"),
        (lambda p: ft.VS2P([p], seed=2**64), "seed must be an integer"),
        (lambda p: ft.VS2P([p], backend="magic"), "auto, numba, triton, reference"),
        (lambda p: ft.VS2P([p], max_nonfinite=0), "max_nonfinite must be an integer of at least 1"),
        (lambda p: ft.VS2P([{"params": [p], "seed": 3}]), "applies to the whole run"),
        (lambda p: ft.VS2P([torch.ones(3, dtype=torch.int64)]), "leave it out"),
        (lambda p: ft.VS2P([torch.ones(3, dtype=torch.complex64)]), "leave it out"),
        (lambda p: ft.VS2P([torch.ones(3, device="meta")]), "materialise"),
        (lambda p: ft.VS2P(nn.LazyLinear(3).parameters()), "run the model once"),
        (lambda p: ft.S2P([p]), "S2P needs a step_size, its rule, and what that needs: .*'dynamic' with L"),
        (lambda p: ft.VS2P([p], rho=0.1), "lr='auto' finds the distance of probes too; leave rho out, or give an lr"),
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
    with pytest.raises(ft.InvalidArgumentError, match=f"^{setting} must be "):
        optimizer.step(lambda: 0.0)


@pytest.mark.parametrize("left", [0, 100])
def test_memory_that_was_taken_away_is_noticed(left):
    p = torch.ones(1000)
    optimizer = ft.VS2P([p])
    p.untyped_storage().resize_(left)
    with pytest.raises(ft.InvalidArgumentError, match="no dense memory"):
        optimizer.step(lambda: 0.0)


def test_unknown_options_are_type_errors():
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'momentum'; it takes lr, rho, tau_a"):
        ft.VS2P([torch.ones(3)], momentum=0.9)


def test_a_step_inside_a_step_is_refused_and_the_outer_one_undone():
    model, closure = problem(torch.float64)
    optimizer = ft.VS2P(model.parameters(), lr=1.0)
    optimizer.step(closure)
    before = weights(model)
    with pytest.raises(ft.InvalidArgumentError, match="a step of this VS2P is under way"):
        optimizer.step(lambda: optimizer.step(closure))
    torch.testing.assert_close(weights(model), before, rtol=0, atol=1e-15)
    assert (optimizer.steps, optimizer.queries) == (2, 3)
    copy.deepcopy(optimizer).step(closure)
    optimizer.step(closure)
    assert (optimizer.steps, optimizer.queries) == (3, 5)


def test_two_threads_cannot_step_one_optimizer_at_once():
    x, inside, leave = torch.ones(3), threading.Event(), threading.Event()
    optimizer = ft.VS2P([x], lr=1.0)

    def slow():
        inside.set()
        assert leave.wait(10)
        return x @ x

    thread = threading.Thread(target=optimizer.step, args=(slow,))
    thread.start()
    assert inside.wait(10)
    with pytest.raises(ft.InvalidArgumentError, match="nor from two threads at once"):
        optimizer.step(lambda: x @ x)
    leave.set()
    thread.join()
    assert (optimizer.steps, optimizer.queries) == (1, 2)
