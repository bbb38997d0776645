"""The evaluations of one step differ in nothing but the weights."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forwardtune as ft


def test_all_evaluations_see_the_same_dropout_masks():
    x = torch.ones(4)
    masks = []

    def closure():
        masks.append(F.dropout(torch.ones(1000), 0.5))
        return x.sum()

    optimizer = ft.STP([x], directions=2)
    for step in range(3):
        optimizer.step(closure)
        first, *others = masks[6 * step : 6 * step + 6]
        assert all(torch.equal(first, mask) for mask in others)
    assert not torch.equal(masks[0], masks[6])


@pytest.mark.parametrize("method", [ft.VS2P, ft.STP])
def test_the_generator_advances_as_if_the_closure_had_run_once(method):
    x = torch.ones(4)

    def closure():
        return x.sum() + torch.rand(17).sum()

    torch.manual_seed(3)
    method([x], directions=3).step(closure)
    after = torch.rand(5)
    torch.manual_seed(3)
    closure()
    assert torch.equal(after, torch.rand(5))


def test_noise_touches_no_generator():
    x = torch.ones(1000)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    ft.VS2P([x], distribution="normal").step(lambda: 0.0)
    assert torch.equal(torch.rand(3), expected)


def convnet():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3))
    model(torch.zeros(2, 1, 8, 8))
    return model


@pytest.mark.parametrize("directions", [1, 2])
def test_batchnorm_statistics_advance_once_a_step(directions):
    """The running statistics after a step are those of a single forward pass at the last probe."""
    model, x = convnet(), torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    twin = copy.deepcopy(model)
    optimizer = ft.VS2P(model.parameters(), rho=1e-3, directions=directions)
    running = []

    def closure():
        running.append([b.clone() for b in model.buffers()])
        return model(x).square().mean()

    for step in range(5):
        at_last_probe = {}

        def closure_and_note():
            loss = closure()
            at_last_probe.update({k: v.clone() for k, v in model.state_dict().items()})  # noqa: B023
            return loss

        optimizer.step(closure_and_note)
        starts = running[-2 * directions :]
        assert all(torch.equal(a, b) for start in starts for a, b in zip(start, starts[0], strict=True))
        twin.load_state_dict({**at_last_probe, **{k: v for k, v in twin.state_dict().items() if _is_buffer(k)}})
        with torch.no_grad():
            twin(x)
        for ours, theirs in zip(model.buffers(), twin.buffers(), strict=True):
            assert torch.equal(ours, theirs)
        assert model[1].num_batches_tracked == step + 2  # one for the pass that shaped the model


def _is_buffer(name):
    return "running" in name or "tracked" in name


def test_batchnorm_in_eval_mode_is_left_alone():
    model, x = convnet().eval(), torch.randn(4, 1, 8, 8)
    before = [b.clone() for b in model.buffers()]
    ft.VS2P(model.parameters()).step(lambda: model(x).square().mean())
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))


class Replacing(nn.Module):
    """Assigns a new tensor to its buffer where others write into it, and lets it enter the loss."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("absent", None)

    def forward(self):
        self.count = self.count + 1
        return self.weight.sum() + self.count


def test_buffers_that_are_replaced_do_not_leak_into_the_next_evaluation():
    model = Replacing()
    optimizer = ft.STP(model.parameters(), lr=0.5)
    optimizer.step(model)
    plus, minus, stay = optimizer.last_step.losses
    assert plus + minus == pytest.approx(2 * stay)
    assert model.count == 1
    optimizer.step(model)
    assert model.count == 2


def test_modules_of_other_threads_are_not_touched():
    import threading

    mine, other = convnet(), convnet()
    x = torch.randn(4, 1, 8, 8)

    def closure():
        thread = threading.Thread(target=lambda: other(x))
        thread.start()
        thread.join()
        return mine(x).square().mean()

    ft.VS2P(mine.parameters()).step(closure)
    assert other[1].num_batches_tracked == 3
    assert mine[1].num_batches_tracked == 2


def test_autocast_around_the_step_sees_the_moved_weights():
    """Autocast keeps casts of weights it has seen; a probe must not be served an old one."""
    layer = nn.Linear(8, 8)
    x = torch.randn(4, 8)
    optimizer = ft.VS2P(layer.parameters(), rho=0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        optimizer.step(lambda: layer(x).square().mean())
    assert optimizer.last_step.gamma != 0


def test_hooks_are_gone_after_the_step():
    from torch.nn.modules import module

    x = torch.ones(3)
    with pytest.raises(ZeroDivisionError):
        ft.VS2P([x]).step(lambda: 1 / 0)
    assert not module._global_forward_pre_hooks
