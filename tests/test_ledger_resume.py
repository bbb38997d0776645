"""A resumed run equals one that was never stopped."""

from __future__ import annotations

import pytest
import torch

import forwardtune as ft
from forwardtune.ledger import export, read
from forwardtune.noise import Mover
from tests.helpers.runs import METHODS, Net, loss, recorded, resumed, same


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.ledger"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_equals_one_that_was_never_stopped(path, method, dtype):
    whole, reference, _ = recorded(path, method, dtype, steps=40, groups=True)
    generator = torch.get_rng_state()
    reference.recorder.close()
    path.unlink()
    _, optimizer, _ = recorded(path, method, dtype, steps=25, groups=True)
    optimizer.recorder.close()
    torch.manual_seed(99)
    model, optimizer, start = resumed(path, 40, dtype)
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
    """It is not part of the run, unless the run continued after it."""
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
    model, _, start = resumed(path, 10)
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


def test_checkpoints_only_make_resuming_faster(path, monkeypatch):
    (path.parent / "run.ledger.5.safetensors").write_text("left by a process that was killed")
    _, optimizer, states = recorded(path, steps=25, checkpoint_every=10)
    optimizer.recorder.close()
    files = sorted(file.name for file in path.parent.glob("*.safetensors"))
    assert files == ["run.ledger.20.safetensors"]
    moved = []
    chain = Mover.chain_terms
    monkeypatch.setattr(Mover, "chain_terms", lambda self, terms: (moved.extend(terms.steps), chain(self, terms)))
    model = Net()
    model.first.weight.data.zero_()  # the base weights are not needed
    again, step = ft.resume(model, path)  # also continues the checkpoints every 10 steps
    assert set(moved) == set(range(20, 25))
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


def test_names_passed_to_the_optimizer_are_restored(path):
    model = Net()
    optimizer = ft.VS2P(model.last.named_parameters(), recorder=ft.Ledger(path, model))
    optimizer.step(lambda: loss(model))
    optimizer.recorder.close()
    again, _ = ft.resume(Net(), path)
    assert again.state_dict() == optimizer.state_dict()
    assert again.param_groups[0]["param_names"] == ["weight", "bias"]


def test_another_method_of_that_name_is_refused(path, monkeypatch):
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


def test_a_custom_method_is_resumed(path):
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
