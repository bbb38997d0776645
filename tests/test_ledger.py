"""Recording, replaying, resuming, exporting and comparing runs."""

from __future__ import annotations

import copy
import json
import math
import pickle
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file, save_model
from torch import nn

import forwardtune as ft
from forwardtune.ledger import diff, export, read, replay_file
from forwardtune.noise import Slot, Term, Mover
from forwardtune.noise.distributions import DISTRIBUTIONS
from tests.helpers.runs import METHODS, Net, gone_on, loss, recorded, same, snapshot

GOLDEN = Path(__file__).with_name("data")


def weights(state):
    return {name: tensor for name, tensor in state.items() if not name.startswith("norm.r") and "num" not in name}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.ledger"


# Replay


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_a_replay_gives_the_weights_of_the_run_bit_for_bit(path, method, dtype):
    model, _, states = recorded(path, method, dtype)
    assert not same(states[0], states[-1])
    assert same(ft.replay(Net(dtype), path).state_dict(), model.state_dict())


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("directions", [1, 3])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_all_ways_to_replay_agree(tmp_path, path, distribution, directions, groups, monkeypatch):
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
            missing, unexpected = tuned.load_state_dict(_load(out), strict=False)
            assert not unexpected
            assert set(missing) <= {"second.weight", "first.weight"}
            assert same(tuned.state_dict(), model.state_dict())
    try:
        monkeypatch.setattr("forwardtune.noise.backends.cpu_numba.PARALLEL_FROM", 1)
        for count in (2, 3):
            torch.set_num_threads(count)
            assert same(ft.replay(Net(), path).state_dict(), model.state_dict())
    finally:
        torch.set_num_threads(threads)


def _load(file):
    from safetensors.torch import load_file as load

    return load(file)


def test_a_replay_may_end_at_any_moment(path):
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
    """They are probed and undone, which may leave a rounding behind."""

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
    optimizer = ft.VS2P(model.parameters(), rho=1e-2, recorder=ft.Ledger(path, model))
    for _ in range(10):
        optimizer.step(lambda: loss(model))
    base = Net()
    base.first.weight.data.zero_()
    with pytest.warns(RuntimeWarning, match="that the run did not move are others"):
        ft.replay(base, path)
    assert torch.equal(base.last.weight, model.last.weight)
    assert not base.first.weight.any()
    optimizer.recorder.close()
    base.first.weight.requires_grad_(False)
    with pytest.raises(ft.LedgerError, match="does not move are others"):
        ft.resume(base, path)
    with pytest.raises(ft.LedgerError, match=r"'first.weight' is tuned here and was frozen in the run"):
        ft.resume(Net(), path)


def test_tensors_by_name_need_no_module(path):
    x = torch.randn(50, dtype=torch.float64)
    base = {"x": x.clone()}
    optimizer = ft.VS2P([x], rho=1e-2, recorder=ft.Ledger(path, {"x": x}))
    for _ in range(20):
        optimizer.step(lambda: (x @ x).item())
    assert torch.equal(ft.replay(base, path)["x"], x)


def test_a_run_may_be_recorded_from_its_middle(path):
    model = Net()
    optimizer = ft.VS2P(model.parameters(), rho=1e-2)
    for _ in range(5):
        optimizer.step(lambda: loss(model))
    middle, generator = copy.deepcopy(model), torch.get_rng_state()
    later = ft.VS2P(model.parameters(), rho=1e-2, recorder=ft.Ledger(path, model))
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


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_chain_is_its_walks_one_after_the_other(dtype, distribution):
    """Also for sizes around a word, a block and a tile, strides, groups that differ, zeros and minus zeros."""
    generator = torch.Generator().manual_seed(0)
    sizes = [1, 31, 32, 33, 511, 513, 8191, 8192, 8193, 70000]
    tensors = [torch.randn(n, generator=generator).to(dtype) for n in sizes]
    tensors += [torch.randn(40, 30, generator=generator).to(dtype).t(), torch.zeros(100).to(dtype)]
    tensors[-1][::2] = -0.0
    copies = [tensor.clone(memory_format=torch.preserve_format) for tensor in tensors]
    walks = []
    for step in range(5):
        a, b = 10.0 ** -(step + 1), -(10.0**-step)
        walks += [
            (step, [Term(0, [0.0, 0.0], [a, b])]),
            (step, [Term(0, [a, b], [-a, b])]),
            (step, [Term(0, [-a, b], [0.0, 0.0]), Term(3, [0.0, 0.0], [a, 0.0])]),
            (step, [Term(3, [a, 0.0], [0.3, 0.1]), Term(0, [0.0, 0.0], [a / 3, 0.0])]),
        ]
    for backend, part in (("numba", tensors), ("reference", copies)):
        slots = [Slot(tensor, number, number % 2) for number, tensor in enumerate(part)]
        mover = Mover(slots, 2, seed=5, distribution=distribution, backend=backend)
        if backend == "numba":
            mover.chain(walks)
        else:
            for step, terms in walks:
                mover.move(step, terms)
    assert same(dict(enumerate(tensors)), dict(enumerate(copies)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_weights_that_cancel_to_zero_have_the_sign_they_had(path, dtype):
    """A step that stays, goes back or is not taken brings a weight from zero to zero."""
    x = torch.zeros(100, dtype=dtype)
    with torch.no_grad():
        x[::3] = -0.0
    base = {"x": x.clone()}
    optimizer = ft.STP([x], lr=0.25, recorder=ft.Ledger(path, {"x": x}))
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


def test_a_buffer_of_two_modules_is_resumed(path):
    def make():
        model = Net()
        model.other = model.norm
        return model

    model = make()
    optimizer = ft.MeZO(model.parameters(), recorder=ft.Ledger(path, model))
    optimizer.step(lambda: loss(model))
    optimizer.recorder.close()
    again = make()
    ft.resume(again, path)
    assert same(again.state_dict(), model.state_dict())


def test_a_state_dict_gets_the_buffers_as_well(path):
    model, _, _ = recorded(path)
    assert same(ft.replay(Net().state_dict(), path), model.state_dict())
    parameters = {name: p.detach() for name, p in Net().named_parameters()}
    with pytest.warns(RuntimeWarning, match=r"changed 3 buffers that are not here, the first being 'norm\."):
        ft.replay(parameters, path)
    assert torch.equal(parameters["last.weight"], model.last.weight)


def test_lost_buffers_are_told_by_replay_and_export(path, tmp_path):
    _, optimizer, _ = recorded(path)
    optimizer.recorder.close()
    for slot in tmp_path.glob("*.state*"):
        slot.unlink()
    with pytest.warns(RuntimeWarning, match="what it left in them is lost, so here, after step 40"):
        ft.replay(Net(), path)
    with pytest.warns(RuntimeWarning, match="what it left in them is lost, so here, after step 40"):
        export(path, tmp_path / "small")
    with pytest.warns(RuntimeWarning, match="what it left in them is lost, so here, after step 40"):
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


def test_tensors_that_were_one_must_be_one(path):
    recorded(path, steps=3)
    other = Net()
    other.second.weight = nn.Parameter(other.first.weight.detach().clone())
    with pytest.raises(ft.LedgerError, match=r"'first.weight' and 'second.weight' are one tensor in the run"):
        ft.replay(other, path)


def test_a_closed_ledger_is_closed(path):
    model, optimizer, _ = recorded(path, steps=3)
    optimizer.recorder.close()
    with pytest.raises(ft.LedgerError, match=r"is closed; go on with it by ft\.resume"):
        optimizer.step(lambda: loss(model))


def test_a_model_that_stands_at_a_known_later_step_goes_on_from_there(path):
    model, optimizer, states = recorded(path, steps=10)
    optimizer.recorder.close()
    assert same(ft.replay(copy.deepcopy(model), path).state_dict(), states[-1])
    with pytest.raises(ft.LedgerError, match=r"those after step 10.*load the base weights"):
        ft.replay(model, path, until=5)


def test_weights_changed_by_others_are_noticed_at_the_end(path):
    model, optimizer, _ = recorded(path, steps=3)
    model.last.bias.data += 1
    optimizer.step(lambda: loss(model))
    optimizer.recorder.close()
    with pytest.raises(ft.LedgerError, match="something other than the optimizer changed them"):
        ft.replay(Net(), path)
    with pytest.warns(RuntimeWarning):
        ft.replay(Net(), path, until=3)


def test_what_the_ledger_cannot_describe_is_refused_and_nothing_is_lost(path, tmp_path):
    model, optimizer, states = recorded(path, steps=3)
    with pytest.raises(ft.LedgerError, match=r"is there already; go on with it by ft\.resume"):
        ft.Ledger(path, model)
    with pytest.raises(ft.InvalidArgumentError, match="parameter 0 of group 0 is not a parameter of the model"):
        ft.MeZO(Net().parameters(), recorder=ft.Ledger(tmp_path / "b", model)).step(lambda: 0.0)
    other = ft.MeZO(model.parameters(), recorder=optimizer.recorder)
    with pytest.raises(ft.LedgerError, match="records another optimizer"):
        other.step(lambda: loss(model))
    early = copy.deepcopy(optimizer.state_dict())
    optimizer.step(lambda: loss(model))
    optimizer.load_state_dict(early)
    with pytest.raises(ft.LedgerError, match=r"up to step 4, and the optimizer makes step 3"):
        optimizer.step(lambda: loss(model))
    assert read(path).end == 4
    assert len(states) == 4


def test_freezing_a_parameter_in_the_middle_is_refused(path):
    model, optimizer, _ = recorded(path, steps=3)
    model.last.bias.requires_grad_(False)
    with pytest.raises(ft.LedgerError, match=r"at step 3 parameters were added, frozen"):
        optimizer.step(lambda: loss(model))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"fsync": 0}, "fsync must be an integer of at least 1"),
        ({"fsync": "always"}, "fsync must be 'timed', 'never' or every how many steps"),
        ({"checkpoint_every": 0}, "checkpoint_every must be"),
    ],
)
def test_bad_settings_are_refused(path, settings, complaint):
    with pytest.raises(ft.InvalidArgumentError, match=complaint):
        ft.Ledger(path, Net(), **settings)


def test_a_model_without_names_is_refused(path):
    with pytest.raises(ft.InvalidArgumentError, match="a dict of its tensors by name, not list"):
        ft.Ledger(path, [torch.zeros(2)])


def test_a_copy_of_the_optimizer_records_nothing(path):
    _, optimizer, _ = recorded(path, steps=3)
    assert copy.deepcopy(optimizer).recorder is None
    assert pickle.loads(pickle.dumps(optimizer)).recorder is None


# Resume


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(path, method, dtype):
    whole, reference, _ = recorded(path, method, dtype, steps=40, groups=True)
    generator = torch.get_rng_state()
    reference.recorder.close()
    path.unlink()
    _, optimizer, _ = recorded(path, method, dtype, steps=25, groups=True)
    optimizer.recorder.close()
    torch.manual_seed(99)
    model, optimizer, start = gone_on(path, 40, dtype)
    assert start == 25
    assert same(model.state_dict(), whole.state_dict())
    assert optimizer.state_dict() == reference.state_dict()
    assert optimizer.last_step == reference.last_step
    assert torch.equal(torch.get_rng_state(), generator)
    assert same(ft.replay(Net(dtype), path).state_dict(), whole.state_dict())


def test_a_run_that_never_took_a_step_can_be_resumed(path):
    model = Net()
    optimizer = ft.VS2P(model.parameters(), lr=3.0, recorder=ft.Ledger(path, model))

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(interrupted)
    optimizer.recorder.close()
    again, step = ft.resume(Net(), path)
    assert step == 0
    assert again.param_groups[0]["lr"] == 3.0


def test_a_step_that_was_interrupted_is_repeated(path):
    """As if it had never been, unless the run went on after it."""
    whole, reference, _ = recorded(path, steps=10)
    reference.recorder.close()
    path.unlink()
    model, optimizer, _ = recorded(path, steps=6)
    calls = iter([1, 0])

    def interrupted():
        if not next(calls):
            raise KeyboardInterrupt
        return loss(model)

    with pytest.raises(KeyboardInterrupt), optimizer.recorder:
        optimizer.step(interrupted)
    model, _, start = gone_on(path, 10)
    assert start == 6
    assert same(model.state_dict(), whole.state_dict())


def test_settings_changed_by_hand_are_resumed(path):
    model = Net()
    optimizer = ft.VS2P(model.parameters(), recorder=ft.Ledger(path, model))
    for rho in (1e-2, 2e-2, 3e-2):
        optimizer.param_groups[0]["rho"] = rho
        optimizer.param_groups[0]["note"] = f"rho is {rho}"
        optimizer.step(lambda: loss(model))
    optimizer.recorder.close()
    again, _ = ft.resume(Net(), path)
    assert again.state_dict() == optimizer.state_dict()
    assert again.param_groups[0]["note"] == "rho is 0.03"
    assert isinstance(again.param_groups[0]["window"], int)


def test_checkpoints_only_shorten_a_resume(path, monkeypatch):
    (path.parent / "run.ledger.5.safetensors").write_text("left by a process that was killed")
    _, optimizer, states = recorded(path, steps=25, checkpoint_every=10)
    optimizer.recorder.close()
    files = sorted(file.name for file in path.parent.glob("*.safetensors"))
    assert files == ["run.ledger.20.safetensors"]
    walked = []
    chain = Mover.chain
    monkeypatch.setattr(Mover, "chain", lambda self, walks: (walked.extend(walks), chain(self, walks)))
    model = Net()
    model.first.weight.data.zero_()  # the base weights are not needed
    again, step = ft.resume(model, path)  # goes on with checkpoints every 10 steps
    assert {number for number, _ in walked} == set(range(20, 25))
    assert step == 25
    assert same(model.state_dict(), states[-1])
    for _ in range(6):
        again.step(lambda: loss(model))
    again.recorder.close()
    assert [file.name for file in path.parent.glob("*.safetensors")] == ["run.ledger.30.safetensors"]
    file = path.parent / "run.ledger.30.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    other = Net()
    with pytest.warns(RuntimeWarning, match="its weights are not those of the run"):
        ft.resume(other, path)[0].recorder.close()
    assert same(other.state_dict(), model.state_dict())
    file.unlink()
    other = Net()
    with pytest.warns(RuntimeWarning, match="replaying from the base weights"):
        ft.resume(other, path)[0].recorder.close()
    assert same(other.state_dict(), model.state_dict())


def test_a_checkpoint_waits_for_a_step_that_raised(path):
    """The random numbers drawn before it are not part of the run yet."""

    def run(fail):
        torch.manual_seed(5)
        model = Net()
        optimizer = ft.VS2P(model.parameters(), recorder=ft.Ledger(path, model, checkpoint_every=4))
        for step in range(8):
            noise = torch.randn(())  # between steps
            try:
                optimizer.step(lambda step=step, noise=noise: 1 / 0 if step == fail else loss(model) * noise)
            except ZeroDivisionError:
                assert step == fail
        optimizer.recorder.close()
        return model

    model = run(fail=3)
    assert (path.parent / "run.ledger.5.safetensors").is_file()
    again = Net()
    again.last.bias.data.zero_()
    assert ft.resume(again, path)[1] == 8
    assert same(again.state_dict(), model.state_dict())


def test_names_given_to_the_optimizer_come_back(path):
    model = Net()
    optimizer = ft.VS2P(model.last.named_parameters(), recorder=ft.Ledger(path, model))
    optimizer.step(lambda: loss(model))
    optimizer.recorder.close()
    again, _ = ft.resume(Net(), path)
    assert again.state_dict() == optimizer.state_dict()
    assert again.param_groups[0]["param_names"] == ["weight", "bias"]


def test_a_rate_that_is_a_tensor_is_refused(path):
    model = Net()
    optimizer = ft.VS2P(model.parameters(), lr=torch.tensor(1.0), recorder=ft.Ledger(path, model))
    with pytest.raises(ft.InvalidArgumentError, match="lr of group 0 is a tensor"):
        optimizer.step(lambda: loss(model))


@pytest.mark.parametrize("recorder", ["run.ledger", ft.Ledger, 3])
def test_a_recorder_that_is_none_is_refused_at_once(recorder):
    with pytest.raises(ft.InvalidArgumentError, match="recorder must be a Recorder"):
        ft.STP(Net().parameters(), recorder=recorder)


def test_another_method_of_that_name_cannot_go_on(path, monkeypatch):
    _, optimizer, _ = recorded(path, steps=5)
    optimizer.recorder.close()
    monkeypatch.setattr(ft.VS2P, "search", staticmethod(_longer))
    with pytest.raises(ft.LedgerError, match="can be replayed but not resumed: step 0 was made by another VS2P"):
        ft.resume(Net(), path)
    monkeypatch.undo()
    header = read(path).header
    assert header.method == "VS2P"
    model = Net()
    model.last.bias.requires_grad_(False)
    with pytest.raises(ft.LedgerError, match=r"the run moves 'last.bias', which is frozen here"):
        ft.resume(model, path)
    ft.resume(Net(), path)[0].recorder.close()


def _longer(memory, *, lr, rho, tau_a, tau_b, window):
    gamma = ((yield +rho) - (yield -rho)) / (2 * rho)
    return ft.Decision(-2 * lr * gamma)


def test_a_method_of_ones_own_is_found_by_its_name(path):
    class Greedy(ft.LineSearch):
        @staticmethod
        def search(memory, *, lr):
            plus = yield +lr
            minus = yield -lr
            memory["seen"] = (*memory.get("seen", ()), (plus, minus))[-2:]
            return ft.Decision(lr if plus < minus else -lr)

        def __init__(self, params, lr=1e-2, **run):
            super().__init__(params, {"lr": lr}, **run)

    model = Net()
    optimizer = Greedy(model.parameters(), recorder=ft.Ledger(path, model))
    for _ in range(5):
        optimizer.step(lambda: loss(model))
    optimizer.recorder.close()
    again, _ = ft.resume(Net(), path)
    assert type(again) is Greedy
    assert again.state_dict() == optimizer.state_dict()


def test_an_exported_ledger_is_not_resumed(path, tmp_path):
    recorded(path, steps=3)
    export(path, tmp_path / "small.safetensors")
    with pytest.raises(ft.LedgerError, match="is an exported ledger"):
        ft.resume(Net(), tmp_path / "small.safetensors")


# Export, compare


def test_ten_thousand_steps_export_to_160_kilobytes(tmp_path, path):
    """With as many tensors as GPT-2 has."""
    tensors = {f"transformer.h.{i}.attn.c_attn.weight": torch.randn(8, 16) for i in range(148)}
    optimizer = ft.VS2P(tensors.values(), recorder=ft.Ledger(path, tensors))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10_000)
    numbers = iter(np.random.default_rng(0).normal(size=20_000).tolist())
    for _ in range(10_000):
        optimizer.step(lambda: next(numbers))
        scheduler.step()
    export(path, tmp_path / "small.safetensors")
    assert (tmp_path / "small.safetensors").stat().st_size <= 160_000


@pytest.mark.parametrize("method", METHODS)
def test_an_export_takes_at_most_16_bytes_a_step(tmp_path, path, method):
    recorded(path, method, steps=400, groups=False)
    sizes = []
    for until in (200, 400):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            export(path, tmp_path / f"{until}", until=until)
        sizes.append(sum(a.nbytes for n, a in load_file(tmp_path / f"{until}").items() if "state" not in n))
    assert sizes[1] - sizes[0] <= 16 * 200


def test_an_export_is_plain_columns(tmp_path, path):
    _, optimizer, _ = recorded(path, "STP", steps=30)
    export(path, tmp_path / "small.safetensors")
    columns = load_file(tmp_path / "small.safetensors")
    records = list(read(path).records(0, 30))
    assert columns["probe.0.0.0"].tolist() == [record.offsets[0] for record in records]
    assert columns["probe.0.1.0"].tolist() == [-1]
    assert set(columns["t.0.0"].tolist()) <= {-1, 0, 1}
    assert np.allclose(columns["loss"], [record.loss for record in records])
    with pytest.raises(ft.LedgerError, match="is there already"):
        export(path, tmp_path / "small.safetensors")
    assert optimizer.queries == read(tmp_path / "small.safetensors").record(29).queries


def test_runs_are_compared(tmp_path, path):
    a, b, c = (tmp_path / name for name in "abc")
    recorded(a, steps=20)
    recorded(b, steps=20)
    assert not diff(a, b)
    recorded(c, steps=15)
    assert diff(a, c).ends == (20, 15)
    assert diff(a, c).step is None
    recorded(path, steps=20, closure=lambda step, model: loss(model) * (2 if step == 12 else 1) ** 2 + step // 12)
    found = diff(a, path)
    assert found.step == 12
    assert found.a.path() != found.b.path()
    other = tmp_path / "d"
    recorded(other, steps=20, seed=1)
    assert diff(a, other).fields == {"seed": (0, 1)}
    export(a, tmp_path / "small")
    assert not diff(a, tmp_path / "small")


def test_a_model_in_several_files_is_replayed_into_several_files(tmp_path, path):
    model, _, _ = recorded(path)
    state = {name: tensor.contiguous() for name, tensor in Net().state_dict().items() if name != "second.weight"}
    (tmp_path / "base").mkdir()
    names = list(state)
    save_file({name: state[name] for name in names[:3]}, tmp_path / "base" / "1.safetensors")
    save_file({name: state[name] for name in names[3:]}, tmp_path / "base" / "2.safetensors")
    (tmp_path / "base" / "model.safetensors.index.json").write_text("{}")
    replay_file(tmp_path / "base", path, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    tuned = _load(tmp_path / "out" / "1.safetensors") | _load(tmp_path / "out" / "2.safetensors")
    assert same(tuned, {name: model.state_dict()[name] for name in names})


def test_copies_of_one_tensor_in_a_file_must_agree_and_are_all_replayed(tmp_path, path):
    model, _, _ = recorded(path)
    state = {name: tensor.contiguous().clone() for name, tensor in Net().state_dict().items()}
    save_file(state, tmp_path / "base.safetensors")
    replay_file(tmp_path / "base.safetensors", path, tmp_path / "out.safetensors")
    assert same(_load(tmp_path / "out.safetensors"), model.state_dict())
    state["second.weight"] += 1
    save_file(state, tmp_path / "other.safetensors")
    with pytest.raises(ft.LedgerError, match=r"first.weight and second.weight are one tensor in the run, and differ"):
        replay_file(tmp_path / "other.safetensors", path, tmp_path / "no.safetensors")
    (tmp_path / "folder").mkdir()
    for name in "ab":
        save_file(state, tmp_path / "folder" / f"{name}.safetensors")
    with pytest.raises(ft.LedgerError, match="is in more than one of the base files"):
        replay_file(tmp_path / "folder", path, tmp_path / "no")


def test_a_failed_file_replay_leaves_nothing_behind(tmp_path, path):
    recorded(path, steps=3)
    state = {name: tensor.contiguous() for name, tensor in Net().state_dict().items() if name != "second.weight"}
    state["last.bias"] += 1
    save_file(state, tmp_path / "base.safetensors")
    with pytest.raises(ft.LedgerError, match=r"'last\.bias' is the first of 1"):
        replay_file(tmp_path / "base.safetensors", path, tmp_path / "out.safetensors")
    del state["last.bias"]
    save_file(state, tmp_path / "base.safetensors")
    with pytest.raises(ft.LedgerError, match=r"'last\.bias', which is not in the base file"):
        replay_file(tmp_path / "base.safetensors", path, tmp_path / "out.safetensors")
    (tmp_path / "base.safetensors").write_bytes(b"no such format")
    with pytest.raises(ft.LedgerError, match="not in safetensors format"):
        replay_file(tmp_path / "base.safetensors", path, tmp_path / "out.safetensors")
    assert not [file.name for file in tmp_path.iterdir() if "out" in file.name]


# Versions


@pytest.mark.parametrize("version", [1])
def test_ledgers_of_every_version_keep_opening(tmp_path, version):
    expected = json.loads((GOLDEN / "golden.json").read_text())[str(version)]
    for name in (f"v{version}.ledger", f"v{version}.safetensors"):
        file = tmp_path / name
        file.write_bytes((GOLDEN / name).read_bytes())
        base = {key: torch.tensor(value) for key, value in expected["base"].items()}
        tuned = ft.replay(base, file)
        assert {key: tensor.tolist() for key, tensor in tuned.items()} == expected["tuned"]
        assert read(file).header.parameters[0].names == ("a",)
    base = {key: torch.tensor(value) for key, value in expected["base"].items()}
    for slot in GOLDEN.glob(f"v{version}.ledger.state*"):
        (tmp_path / slot.name).write_bytes(slot.read_bytes())
    optimizer, step = ft.resume(base, tmp_path / f"v{version}.ledger")
    assert (step, optimizer.queries) == (expected["step"], expected["queries"])
