"""The public names are these and no others."""

import forwardtune as ft

PUBLIC = {
    "BackendError",
    "ExperimentError",
    "Field",
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
    "Decision",
    "StepRecord",
    "VS2P",
    "replay",
    "resume",
    "theory",
}


def test_public_names():
    assert set(ft.__all__) == PUBLIC
    assert all(hasattr(ft, name) for name in PUBLIC)
    assert ft.__version__


def test_a_new_method_is_one_function_and_one_class():
    """The recipe of CONTRIBUTING.md."""
    import torch

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
