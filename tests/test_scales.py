"""Relative scale: offsets in units of the weights' own size, in every backend and in every file."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forwardtune as ft
from forwardtune.errors import InvalidArgumentError
from forwardtune.noise import DISTRIBUTIONS, Mover, Slot, Term
from forwardtune.scales import relative_scales, root_mean_square

GENERATOR = torch.Generator().manual_seed(0)


def test_a_scale_is_the_tensors_own_size():
    tensors = [[torch.randn(300, 40, generator=GENERATOR) * size for size in (1e-3, 1.0)], [torch.full((7,), -0.25)]]
    small, one, quarter = relative_scales([*tensors[0], *tensors[1]])
    assert small == pytest.approx(root_mean_square(tensors[0][0]), rel=2**-8)
    assert one == pytest.approx(1.0, rel=0.02)
    assert quarter == 0.25


def test_a_scale_does_not_depend_on_the_order_of_sums():
    """It is rounded to eight bits, so that machines with another number of threads agree."""
    x = torch.randn(10_000, generator=GENERATOR)
    (a,), (b,) = relative_scales([x]), relative_scales([x.flip(0)])
    assert a == b
    assert math.ldexp(math.frexp(a)[0], 8).is_integer()


def test_what_is_zero_takes_the_median_of_the_others_or_the_size_of_a_random_matrix():
    a, b, c, zero = torch.full((4,), 0.5), torch.full((4,), 2.0), torch.full((4,), 8.0), torch.zeros(3)
    assert relative_scales([a, zero, b, c]) == [0.5, 2.0, 2.0, 8.0]
    assert relative_scales([a, torch.zeros(10, 16), torch.zeros(5, 4, 2, 2)]) == [0.5, 0.25, 0.25]
    assert relative_scales([torch.zeros(64)]) == [0.125]
    tiny = torch.full((4,), 1e-30)
    assert relative_scales([tiny, b, c])[0] == pytest.approx(2e-3, rel=2**-8)  # a thousandth of the median


def test_a_strided_or_half_precision_tensor_is_measured_alike():
    x = torch.randn(70, 50, generator=GENERATOR)
    assert root_mean_square(x.t()) == pytest.approx(root_mean_square(x), rel=1e-12)
    assert root_mean_square(x.bfloat16()) == pytest.approx(root_mean_square(x), rel=1e-2)
    assert root_mean_square(torch.zeros(0, 3)) == 0.0


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_scaled_direction_is_the_direction_times_the_scale(distribution):
    """For any backend, and for several groups: `x + t * scale * s`, with s as it is without scales."""
    sizes, groups, scales = (5000, 700, 33), (0, 0, 1), (0.5, 3.0, 0.125)
    moved = {}
    for backend in ("reference", "numba", "triton"):
        tensors = [torch.zeros(n, dtype=torch.float64) for n in sizes]
        slots = [Slot(x, i, g, c) for i, (x, g, c) in enumerate(zip(tensors, groups, scales, strict=True))]
        mover = Mover(slots, 2, seed=3, distribution=distribution, backend=backend)
        mover.move(5, [Term(1, [0.0, 0.0], [0.25, -2.0])])
        mover.chain([(6, [Term(0, [0.0, 0.0], [0.5, 0.5])]), (6, [Term(0, [0.5, 0.5], [0.125, 4.0])])])
        moved[backend] = tensors
    plain = ft.Field([tensors[:2], tensors[2:]], seed=3, distribution=distribution)
    for number, (n, group, scale) in enumerate(zip(sizes, groups, scales, strict=True)):
        first, second = plain.values(5, 1, number, 0, n), plain.values(6, 0, number, 0, n)
        expected = scale * ((0.25, -2.0)[group] * first + (0.125, 4.0)[group] * second)
        assert torch.allclose(moved["reference"][number], expected, rtol=1e-12, atol=1e-12)
        for backend in ("numba", "triton"):
            assert torch.equal(moved[backend][number], moved["reference"][number])


def test_values_are_those_that_move():
    x = torch.full((40,), 2.0, dtype=torch.float64)
    optimizer = ft.MeZO([x], lr=1e-2, scale="relative", distribution="normal")
    before = x.clone()
    optimizer.step(lambda: (x**2).sum())
    direction = optimizer.field.values(0, 0, 0, 0, 40)
    assert torch.allclose(x, before + optimizer.last_step.t * direction, rtol=0, atol=1e-12)
    assert direction.abs().mean() > 1  # twice a normal's


class Net(nn.Module):
    def __init__(self, factor=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 16, bias=False).double(), nn.Linear(16, 3, bias=False).double()
        self.first.weight.data *= factor
        self.second.weight.data /= factor

    def forward(self, x):
        return self.second(self.first(x).relu())


X = torch.randn(64, 6, generator=GENERATOR, dtype=torch.float64)
Y = X[:, :3].argmax(1)


def losses(factor, scale, steps=60, **options):
    model = Net(factor)
    optimizer = ft.VS2P(model.parameters(), scale=scale, **{"lr": 20.0, **options})
    return [float(optimizer.step(lambda: F.cross_entropy(model(X), Y))) for _ in range(steps)]


def test_rescaled_layers_that_compute_the_same_are_tuned_the_same():
    """With a power of two the scales are rounded alike, and nothing changes but the units."""
    assert losses(8.0, "relative") == pytest.approx(losses(1.0, "relative"), rel=1e-9)
    assert losses(8.0, "absolute") != pytest.approx(losses(1.0, "absolute"), rel=1e-2)
    assert losses(8.0, "relative", lr="auto") == pytest.approx(losses(1.0, "relative", lr="auto"), rel=1e-9)


def test_scales_are_measured_at_the_first_step_and_stay():
    model = Net()
    optimizer = ft.VS2P(model.parameters(), scale="relative")
    model.first.weight.data *= 4  # weights that are loaded after the optimizer was made count
    optimizer.step(lambda: F.cross_entropy(model(X), Y))
    scales = optimizer.param_groups[0]["scales"]
    assert scales[0] == pytest.approx(4 * root_mean_square(Net().first.weight), rel=2**-8)
    model.first.weight.data *= 4
    optimizer.step(lambda: F.cross_entropy(model(X), Y))
    assert optimizer.param_groups[0]["scales"] == scales
    extra = torch.full((5,), 3.0, requires_grad=True)
    optimizer.add_param_group({"params": [extra]})
    optimizer.step(lambda: F.cross_entropy(model(X), Y))
    assert optimizer.param_groups[1]["scales"] == (3.0,)
    assert optimizer.param_groups[0]["scales"] == scales


def test_a_state_of_before_there_were_scales_is_an_absolute_run():
    model = Net()
    optimizer = ft.VS2P(model.parameters(), lr=2.0, scale="absolute")
    optimizer.step(lambda: F.cross_entropy(model(X), Y))
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        group["run"] = {name: value for name, value in group["run"].items() if name not in ("scale", "auto")}
    again = ft.VS2P(model.parameters(), scale="relative")
    again.load_state_dict(state)
    assert (again.scale, again.auto) == ("absolute", None)
    again.step(lambda: F.cross_entropy(model(X), Y))
    assert again.slots[0].scale == 1.0


def test_frozen_tensors_do_not_count():
    """So an adapter's zeros take the size of the adapter, also where the whole model's parameters are given."""
    base, a, b = torch.full((9,), 50.0), torch.full((3,), 0.25, requires_grad=True), torch.zeros(3, requires_grad=True)
    optimizer = ft.VS2P([base, a, b], lr="auto")
    optimizer.step(lambda: (a * b).sum().detach())
    assert optimizer.param_groups[0]["scales"] == (1.0, 0.25, 0.25)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_finite(bad):
    x = torch.tensor([1.0, bad])
    with pytest.raises(InvalidArgumentError, match=r"a parameter of shape \(2,\) has weights that are not finite"):
        ft.VS2P([x], lr="auto").step(lambda: 1.0)


def test_an_unknown_scale():
    with pytest.raises(InvalidArgumentError, match="unknown scale 'log'; choose one of relative, absolute"):
        ft.VS2P([torch.zeros(2)], scale="log")
