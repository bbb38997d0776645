"""Forward passes in bfloat16 with float32 weights: the same function, about as precise as bfloat16 is."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from forwardtune.tasks.computing import computed, convolution, taps
from tests.helpers.images import base_of, task_of

CPU = torch.device("cpu")


def test_taps_left_out_are_those_that_only_see_padding():
    """Against an image of ones: what a tap sees is the gradient of the output by it."""
    for size, kernel, stride, padding, dilation in itertools.product(
        range(1, 6), (1, 2, 3, 5), (1, 2), (0, 1, 2), (1, 2)
    ):
        if size + 2 * padding < dilation * (kernel - 1) + 1:
            continue
        weight = torch.zeros(1, 1, kernel, requires_grad=True)
        F.conv1d(torch.ones(1, 1, size), weight, None, stride, padding, dilation).sum().backward()
        seen = [tap for tap in range(kernel) if weight.grad[0, 0, tap]]
        first, last, before, after = taps(size, kernel, stride, padding, dilation)
        if seen:
            assert first <= seen[0] <= seen[-1] <= last
        if seen and stride == 1:
            assert (first, last) == (seen[0], seen[-1])
        x, full = torch.randn(1, 1, size).double(), torch.randn(1, 1, kernel).double()
        expected = F.conv1d(x, full, None, stride, padding, dilation)
        padded = F.pad(x, (before, after))
        torch.testing.assert_close(F.conv1d(padded, full[..., first : last + 1], None, stride, 0, dilation), expected)


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize(("stride", "padding", "groups"), [(1, 1, 1), (2, 1, 1), (1, 0, 1), (2, 3, 2)])
def test_a_convolution_is_that_of_the_rounded_numbers(size, stride, padding, groups):
    kernel = 3 if size + 2 * padding >= 3 else 1
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 4, size, size), torch.randn(6, 4 // groups, kernel, kernel), torch.randn(6)
    rounded = [tensor.bfloat16().float() for tensor in (x, weight, bias)]
    expected = F.conv2d(*rounded, stride, padding, 1, groups)
    with torch.autocast("cpu", torch.bfloat16):
        ours = convolution(x, weight, bias.bfloat16(), (stride,) * 2, (padding,) * 2, (1, 1), groups)
    torch.testing.assert_close(ours.float(), expected, atol=0.05, rtol=0.02)


def test_float32_is_left_as_it_is_and_bfloat16_returns_float32():
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 4)),
        torch.randn(5, 3, 8, 8),
    )
    with torch.no_grad():
        exact, short = (computed(name, CPU, lambda: model(x)) for name in ("float32", "bfloat16"))
        assert torch.equal(exact, model(x))
    assert short.dtype == torch.float32
    assert not torch.equal(short, exact)
    torch.testing.assert_close(short, exact, atol=0.02, rtol=0.02)
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_weights_that_move_between_two_passes_are_rounded_anew():
    layer, x = nn.Linear(4, 2), torch.randn(3, 4)
    with torch.no_grad():
        before = computed("bfloat16", CPU, lambda: layer(x))
        layer.weight.add_(1.0)
        after = computed("bfloat16", CPU, lambda: layer(x))
    assert (after - before).abs().min() > 0.0


def test_slopes_along_random_lines_are_those_of_float32(tmp_path):
    """Half the difference of two losses, as far apart as runs probe, on ResNet18 with random weights."""
    slopes = {}
    for name in ("float32", "bfloat16"):
        task = task_of("resnet18", compute=name, mode="eval")
        model = task.start(base_of(task, tmp_path))
        batch, weights = task.batch(torch.arange(32)), list(model.parameters())
        slopes[name] = []
        for seed in range(12):
            generator = torch.Generator().manual_seed(seed)
            lines = [p.detach().square().mean().sqrt() * torch.randn(p.shape, generator=generator) for p in weights]
            losses = []
            with torch.no_grad():
                for t in (0.01, -0.01):
                    start = [p.clone() for p in weights]
                    for p, line in zip(weights, lines, strict=True):
                        p.add_(line, alpha=t)
                    losses.append(task.loss(model, batch).item())
                    for p, old in zip(weights, start, strict=True):
                        p.copy_(old)
            slopes[name].append((losses[0] - losses[1]) / 0.02)
    told = torch.corrcoef(torch.tensor([slopes["float32"], slopes["bfloat16"]]))[0, 1]
    assert told > 0.95
