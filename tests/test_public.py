"""The public names are these and no others, and those that were renamed still work."""

from types import ModuleType

import pytest
import torch

import forwardtune as ft
from forwardtune import ledger, record
from forwardtune.noise import Term

PUBLIC = {
    "BackendError",
    "Decision",
    "ExperimentError",
    "Field",
    "FittedHead",
    "fit_head",
    "ForwardTuneError",
    "InvalidArgumentError",
    "Ledger",
    "LedgerError",
    "LineRecord",
    "LineSearch",
    "MeZO",
    "NonFiniteLossError",
    "Recorder",
    "RunOptions",
    "S2P",
    "STP",
    "StepRecord",
    "VS2P",
    "WideHead",
    "replay",
    "resume",
    "theory",
    "widen_head",
}


def test_public_names():
    assert set(ft.__all__) == PUBLIC
    assert ft.__version__


@pytest.mark.parametrize("module", [ft, ledger], ids=lambda module: module.__name__)
def test_every_public_name_is_exported_and_every_export_exists(module):
    public = {name for name, value in vars(module).items() if not (name[0] == "_" or isinstance(value, ModuleType))}
    exported = {name for name in module.__all__ if not isinstance(getattr(module, name), ModuleType)}
    assert public == exported
    assert len(module.__all__) == len(set(module.__all__))


def test_a_new_method_is_one_function_and_one_class():
    """The recipe of CONTRIBUTING.md."""

    def coin(memory, *, lr):
        memory["tosses"] = memory.get("tosses", 0) + 1
        here = yield 0.0
        there = yield lr
        return ft.Decision(lr if there < here else 0.0)

    class Coin(ft.LineSearch):
        search = staticmethod(coin)

        def __init__(self, params, lr=1e-2, **run):
            super().__init__(params, {"lr": lr}, **run)

    x = torch.tensor([1.0, -1.0])
    optimizer = Coin([x], distribution="normal")
    for _ in range(300):
        loss = optimizer.step(lambda: x @ x)
    assert loss < 0.2
    assert optimizer.param_groups[0]["memory"] == {"tosses": 300}


def deprecated(old, new):
    return pytest.warns(DeprecationWarning, match=rf"^{old} is deprecated and will be removed .*; use {new}$")


@pytest.mark.parametrize("module", [ft, record], ids=lambda module: module.__name__)
def test_stand_is_decision(module):
    with deprecated(rf"{module.__name__}\.Stand", rf"{module.__name__}\.Decision") as caught:
        assert module.Stand is ft.Decision
    assert caught[0].filename == __file__
    with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute 'Sit'"):
        _ = module.Sit


def test_stand_can_be_imported():
    with deprecated(r"forwardtune\.Stand", r"forwardtune\.Decision") as caught:
        from forwardtune import Stand
    assert Stand is ft.Decision
    assert {warning.filename for warning in caught} == {__file__}


def test_methods_that_were_renamed():
    x, y, z = torch.ones(3), torch.ones(3), torch.ones(3)
    one, two = ft.STP([x], lr=0.1), ft.STP([y], lr=0.1)
    one.step(lambda: x.square().sum())
    step = one.last_step
    with deprecated(r"LineSearch\.relive", r"LineSearch\.fast_forward"):
        two.relive(step)
    assert (two.last_step, two.steps, two.queries) == (step, 1, 3)
    with deprecated(r"StepRecord\.stand", r"StepRecord\.destination"):
        assert step.stand() == step.destination() == {0: (step.t,)}
    with deprecated(r"LineRecord\.is_sound", r"StepRecord\.taken"):
        assert step.lines[0][0].is_sound(1.0)
    with deprecated(r"LineRecord\.is_sound", r"StepRecord\.taken"):
        assert not step.lines[0][0].is_sound(0.01)
    with deprecated(r"Field\.walk", r"Field\.mover\.move"):
        ft.Field([[z]]).walk(0, [Term(0, [0.0], [step.t])])
    torch.testing.assert_close(z, x)
