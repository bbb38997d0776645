"""A replay gives the weights of the run, bit for bit, and what does not fit is refused."""

from __future__ import annotations

import copy
import math
import sys
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_model
from torch import nn

import forwardtune as ft
from forwardtune.ledger import export, read, replay_file
from forwardtune.noise import Mover, Slot, Term
from forwardtune.noise.distributions import DISTRIBUTIONS
from tests.helpers.runs import METHODS, Net, loss, recorded, same, snapshot, weights


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.ledger"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_a_replay_gives_the_weights_of_the_run_bit_for_bit(path, method, dtype):
    model, _, states = recorded(path, method, dtype)
    assert not same(states[0], states[-1])
    assert same(ft.replay(Net(dtype), path).state_dict(), model.state_dict())


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("directions", [1, 3])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_all_replays_agree(tmp_path, path, distribution, directions, groups, monkeypatch):
    monkeypatch.setattr(sys.modules["forwardtune.ledger.replay"], "SEGMENT", 7)
    monkeypatch.setattr(sys.modules["forwardtune.ledger.stream"], "PORTION", 100)
    model, _, _ = recorded(path, distribution=distribution, directions=directions, groups=groups, steps=20)
    save_model(Net(), str(tmp_path / "base.safetensors"))
    export(path, tmp_path / "small.safetensors")
    threads = torch.get_num_threads()
    for ledger in (path, tmp_path / "small.safetensors"):
        for backend in ("reference", "numba"):
            assert same(ft.replay(Net(), ledger, backend=backend).state_dict(), model.state_dict())
            out = tmp_path / f"{ledger.stem}.{backend}.safetensors"
            replay_file(tmp_path / "base.safetensors", ledger, out, backend=backend)
            tuned = Net()
            missing, unexpected = tuned.load_state_dict(load_file(out), strict=False)
            assert not unexpected
            assert missing in (["first.weight"], ["second.weight"])  # tied, so saved once
            assert same(tuned.state_dict(), model.state_dict())
    try:
        monkeypatch.setattr("forwardtune.noise.backends.cpu_numba.PARALLEL_FROM", 1)
        for count in (2, 3):
            torch.set_num_threads(count)
            assert same(ft.replay(Net(), path).state_dict(), model.state_dict())
    finally:
        torch.set_num_threads(threads)


def test_a_replay_may_end_at_any_step(path):
    _, _, states = recorded(path, steps=30)
    for until in range(31):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if until < 30 else "error", RuntimeWarning)
            model = ft.replay(Net(), path, until=until)
        assert same(weights(model.state_dict()), weights(states[until]))


def test_buffers_are_restored_at_the_end_and_missed_before(path):
    _, _, states = recorded(path)
    assert same(ft.replay(Net(), path).state_dict(), states[-1])
    with pytest.warns(RuntimeWarning, match="known after step 40 only, so here, after step 39"):
        ft.replay(Net(), path, until=39)


def test_steps_that_were_not_taken_or_raised_are_replayed_as_well(path):
    """They are probed and undone, which may leave rounding errors behind."""

    def closure(step, model):
        if step % 7 == 3 and closure.calls % 2:
            closure.calls += 1
            return math.inf
        if step % 11 == 5 and not closure.raised:
            closure.raised = True
            raise RuntimeError("no batch")
        closure.calls += 1
        closure.raised = False
        return loss(model)

    closure.calls, closure.raised = 0, False
    model = Net(torch.bfloat16)
    optimizer = ft.MeZO(model.parameters(), lr=1e-2, rho=0.3, recorder=ft.Ledger(path, model), directions=2)
    raised = 0
    for step in range(60):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                optimizer.step(lambda step=step: closure(step, model))
        except RuntimeError:
            raised += 1
    assert raised > 3
    assert same(ft.replay(Net(torch.bfloat16), path).state_dict(), model.state_dict())
    records = [read(path).record(step) for step in range(60)]
    assert sum(record.raised for record in records) == raised
    assert sum(not record.taken and not record.raised for record in records) > 3
    optimizer.recorder.close()
    again, step = ft.resume(Net(torch.bfloat16), path)
    assert step == 60
    assert again.state_dict() == optimizer.state_dict()
    again.recorder.close()
    export(path, path.with_suffix(".small"))
    assert same(ft.replay(Net(torch.bfloat16), path.with_suffix(".small")).state_dict(), model.state_dict())


def test_frozen_parameters_stay_and_only_those_tuned_are_needed(path):
    model = Net()
    model.first.weight.requires_grad_(False)
    optimizer = ft.VS2P(model.parameters(), lr=1.0, rho=1e-2, recorder=ft.Ledger(path, model))
    for _ in range(10):
        optimizer.step(lambda: loss(model))
    base = Net()
    base.first.weight.data.zero_()
    with pytest.warns(RuntimeWarning, match="that the run did not move differ"):
        ft.replay(base, path)
    assert torch.equal(base.last.weight, model.last.weight)
    assert not base.first.weight.any()
    optimizer.recorder.close()
    base.first.weight.requires_grad_(False)
    with pytest.raises(ft.LedgerError, match="does not move differ"):
        ft.resume(base, path)
    with pytest.raises(ft.LedgerError, match=r"'first.weight' is tuned here and was frozen in the run"):
        ft.resume(Net(), path)


def test_tensors_by_name_need_no_module(path):
    x = torch.randn(50, dtype=torch.float64)
    base = {"x": x.clone()}
    optimizer = ft.VS2P([x], lr=1.0, rho=1e-2, recorder=ft.Ledger(path, {"x": x}))
    for _ in range(20):
        optimizer.step(lambda: (x @ x).item())
    assert torch.equal(ft.replay(base, path)["x"], x)


def test_a_run_may_be_recorded_from_its_middle(path):
    model = Net()
    optimizer = ft.VS2P(model.parameters(), lr=1.0, rho=1e-2)
    for _ in range(5):
        optimizer.step(lambda: loss(model))
    middle, generator = copy.deepcopy(model), torch.get_rng_state()
    later = ft.VS2P(model.parameters(), lr=1.0, rho=1e-2, recorder=ft.Ledger(path, model))
    later.load_state_dict(optimizer.state_dict())
    for _ in range(5):
        later.step(lambda: loss(model))
    assert read(path).header.step == 5
    assert same(ft.replay(copy.deepcopy(middle), path, until=10).state_dict(), model.state_dict())
    later.recorder.close()
    torch.set_rng_state(generator)
    again, step = ft.resume(middle, path)
    assert step == 10
    assert again.state_dict() == later.state_dict()


@pytest.mark.parametrize("fast", ["numba", "triton"])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_chain_equals_its_moves_one_by_one(dtype, distribution, fast):
    """Also for sizes around a word, a block and a tile, strides, groups and scales that differ, zeros, minus zeros."""
    generator = torch.Generator().manual_seed(0)
    sizes = [1, 31, 32, 33, 511, 513, 8191, 8192, 8193, 70000] if fast == "numba" else [33, 8193]
    tensors = [torch.randn(n, generator=generator).to(dtype) for n in sizes]
    tensors += [torch.randn(40, 30, generator=generator).to(dtype).t(), torch.zeros(100).to(dtype)]
    tensors[-1][::2] = -0.0
    copies = [tensor.clone(memory_format=torch.preserve_format) for tensor in tensors]
    moves = []
    for step in range(5 if fast == "numba" else 2):
        a, b = 10.0 ** -(step + 1), -(10.0**-step)
        moves += [
            (step, [Term(0, [0.0, 0.0], [a, b])]),
            (step, [Term(0, [a, b], [-a, b])]),
            (step, [Term(0, [-a, b], [0.0, 0.0]), Term(3, [0.0, 0.0], [a, 0.0])]),
            (step, [Term(3, [a, 0.0], [0.3, 0.1]), Term(0, [0.0, 0.0], [a / 3, 0.0])]),
        ]
    for backend, part in ((fast, tensors), ("reference", copies)):
        slots = [Slot(tensor, number, number % 2, 1 / (1 + number % 5)) for number, tensor in enumerate(part)]
        mover = Mover(slots, 2, seed=5, distribution=distribution, backend=backend)
        if backend == fast:
            mover.chain(moves)
        else:
            for step, terms in moves:
                mover.move(step, terms)
    assert same(dict(enumerate(tensors)), dict(enumerate(copies)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_weights_that_cancel_to_zero_have_the_sign_they_had(path, dtype):
    """A step that stays, goes back or is not taken brings a weight from zero to zero."""
    x = torch.zeros(100, dtype=dtype)
    with torch.no_grad():
        x[::3] = -0.0
    base = {"x": x.clone()}
    optimizer = ft.STP([x], lr=0.25, probes="in-place", recorder=ft.Ledger(path, {"x": x}))
    losses = iter([1.0, 1.0, 0.0] * 5 + [0.0, 1.0, 2.0, 1.0, 0.0, 2.0] * 3 + [math.inf, 1.0, 1.0, 0.0])
    states = [x.clone()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for _ in range(13):
            optimizer.step(lambda: next(losses))
            states.append(x.clone())
    for until, state in enumerate(states):
        tuned = ft.replay({"x": base["x"].clone()}, path, until=until)
        assert same(tuned, {"x": state})


def test_offsets_that_vanish_in_float32_are_replayed(path):
    x = torch.zeros(64)
    with torch.no_grad():
        x[::2] = -0.0
    base = {"x": x.clone()}
    optimizer = ft.STP([x], lr=1e-60, recorder=ft.Ledger(path, {"x": x}))
    for _ in range(5):
        optimizer.step(lambda: 1.0)
    assert same(ft.replay(base, path), {"x": x})


def test_buffers_that_are_views_of_weights_are_left_to_the_line(path):
    def make():
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        model.register_buffer("view", model.weight.data)
        return model

    model = make()
    optimizer = ft.MeZO(model.parameters(), lr=1e-2, rho=0.1, recorder=ft.Ledger(path, model))
    for _ in range(5):
        optimizer.step(lambda: model(torch.ones(6)).square().sum())
    assert same(ft.replay(make(), path).state_dict(), model.state_dict())


def test_a_state_dict_gets_the_buffers_as_well(path):
    model, _, _ = recorded(path)
    assert same(ft.replay(Net().state_dict(), path), model.state_dict())
    parameters = {name: p.detach() for name, p in Net().named_parameters()}
    with pytest.warns(RuntimeWarning, match=r"changed 3 buffers that are missing here, the first being 'norm\."):
        ft.replay(parameters, path)
    assert torch.equal(parameters["last.weight"], model.last.weight)


def test_replay_and_export_warn_of_lost_buffers(path, tmp_path):
    _, optimizer, _ = recorded(path)
    optimizer.recorder.close()
    for file in tmp_path.glob("*.state*"):
        file.unlink()
    with pytest.warns(RuntimeWarning, match="their values are lost, so here, after step 40"):
        ft.replay(Net(), path)
    with pytest.warns(RuntimeWarning, match="their values are lost, so here, after step 40"):
        export(path, tmp_path / "small")
    with pytest.warns(RuntimeWarning, match="their values are lost, so here, after step 40"):
        ft.replay(Net(), tmp_path / "small")


# What does not fit is refused


def test_other_weights_are_refused_by_name(path):
    recorded(path, steps=3)
    other = Net()
    other.norm.weight.data[2] += 1
    before = snapshot(other)
    with pytest.raises(ft.LedgerError, match=r"'norm.weight' is the first of 1 parameters \(of 7\)"):
        ft.replay(other, path)
    assert same(before, snapshot(other))


def test_other_shapes_dtypes_and_names_are_refused(path):
    recorded(path, steps=3)
    with pytest.raises(ft.LedgerError, match=r"'first.weight' is \[6, 6\] of float64, and in the ledger .* float32"):
        ft.replay(Net(torch.float64), path)
    other = Net()
    other.last = nn.Linear(6, 4)
    with pytest.raises(ft.LedgerError, match=r"'last.weight' is \[4, 6\]"):
        ft.replay(other, path)
    del other.last
    with pytest.raises(ft.LedgerError, match=r"the run moves 'last.weight', which is not among"):
        ft.replay(other, path)
    for until in (-1, 4, 1.0):
        with pytest.raises(ft.LedgerError, match="a step from 0 to 3"):
            ft.replay(Net(), path, until=until)


def test_tensors_that_were_tied_must_be_tied(path):
    recorded(path, steps=3)
    other = Net()
    other.second.weight = nn.Parameter(other.first.weight.detach().clone())
    with pytest.raises(ft.LedgerError, match=r"'first.weight' and 'second.weight' are one tensor in the run"):
        ft.replay(other, path)


def test_weights_of_a_later_step_with_an_anchor_are_recognised(path):
    model, optimizer, states = recorded(path, steps=10)
    optimizer.recorder.close()
    assert same(ft.replay(copy.deepcopy(model), path).state_dict(), states[-1])
    with pytest.raises(ft.LedgerError, match=r"the weights after step 10.*load the base weights"):
        ft.replay(model, path, until=5)


def test_weights_changed_by_others_are_noticed_at_the_end(path):
    model, optimizer, _ = recorded(path, steps=3)
    model.last.bias.data += 1
    optimizer.step(lambda: loss(model))
    optimizer.recorder.close()
    with pytest.raises(ft.LedgerError, match="something other than the optimizer changed them"):
        ft.replay(Net(), path)
    with pytest.warns(RuntimeWarning, match="known after step 4 only"):
        ft.replay(Net(), path, until=3)
