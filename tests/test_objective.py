"""The queries of one step differ in nothing but the weights."""

import contextlib
import copy
import threading
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as torch_module

import forwardtune as ft


def test_all_queries_see_the_same_dropout_masks():
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
    ft.VS2P([x], distribution="normal", lr=1.0).step(lambda: 0.0)
    assert torch.equal(torch.rand(3), expected)


def convnet():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3))
    model(torch.zeros(2, 1, 8, 8))
    return model


@pytest.mark.parametrize("directions", [1, 2])
def test_batchnorm_statistics_advance_once_per_step(directions):
    """The running statistics after a step are those of a single forward pass at the last probe."""
    model, x = convnet(), torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    twin = copy.deepcopy(model)
    optimizer = ft.VS2P(model.parameters(), lr=1.0, rho=1e-3, directions=directions)
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
    ft.VS2P(model.parameters(), lr=1.0).step(lambda: model(x).square().mean())
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


def test_buffers_that_are_replaced_do_not_leak_into_the_next_query():
    model = Replacing()
    optimizer = ft.STP(model.parameters(), lr=0.5)
    optimizer.step(model)
    plus, minus, stay = optimizer.last_step.losses
    assert plus + minus == pytest.approx(2 * stay)
    assert model.count == 1
    optimizer.step(model)
    assert model.count == 2


def test_modules_of_other_threads_are_not_touched():
    mine, other = convnet(), convnet()
    x = torch.randn(4, 1, 8, 8)

    def closure():
        thread = threading.Thread(target=lambda: other(x))
        thread.start()
        thread.join()
        return mine(x).square().mean()

    ft.VS2P(mine.parameters(), lr=1.0).step(closure)
    assert other[1].num_batches_tracked == 3
    assert mine[1].num_batches_tracked == 2


def test_autocast_around_the_step_sees_the_moved_weights():
    """Autocast keeps casts of weights it has seen; a probe must not be served an old one."""
    layer = nn.Linear(8, 8)
    x = torch.randn(4, 8)
    optimizer = ft.VS2P(layer.parameters(), lr=1.0, rho=0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        optimizer.step(lambda: layer(x).square().mean())
    assert optimizer.last_step.gamma != 0


def test_hooks_are_gone_after_the_step():
    x = torch.ones(3)
    with pytest.raises(ZeroDivisionError):
        ft.VS2P([x], lr=1.0).step(lambda: 1 / 0)
    assert not torch_module._global_forward_pre_hooks
    assert not torch_module._global_forward_hooks


def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Using `torch.compile")
@pytest.mark.parametrize(
    "wrap",
    [lambda m: torch.compile(m, backend="eager", fullgraph=True), torch.jit.script, lambda m: m],
    ids=["compiled", "scripted", "plain"],
)
@pytest.mark.parametrize("warm", [False, True])
def test_compiled_models(wrap, warm):
    """Compiled or not, the same trajectory, and statistics that advance once per step."""
    torch._dynamo.reset()
    plain, x = normed(), torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    model = wrap(copy.deepcopy(plain))
    if warm:
        with torch.no_grad():
            plain(x), model(x)
    one, two = ft.STP(plain.parameters(), lr=1e-2, directions=2), ft.STP(model.parameters(), lr=1e-2, directions=2)
    for _ in range(4):
        one.step(lambda: plain(x).square().mean())
        two.step(lambda: model(x).square().mean())
    state = {name.removeprefix("_orig_mod."): value for name, value in model.state_dict().items()}
    for name, ours in plain.state_dict().items():
        torch.testing.assert_close(state[name], ours)
    assert plain[1].num_batches_tracked == 4 + warm


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_a_compiled_model_is_not_compiled_anew_at_every_step():
    torch._dynamo.reset()
    graphs = []
    model = torch.compile(normed(), backend=lambda graph, _: graphs.append(graph) or graph.forward, fullgraph=True)
    x = torch.randn(12, 6)
    optimizer = ft.VS2P(model.parameters(), lr=1.0)
    for _ in range(12):
        optimizer.step(lambda: model(x).square().mean())
    assert len(graphs) <= 2


def test_functional_calls_keep_the_modules_own_buffers():
    model, x = normed(), torch.randn(12, 6)
    own = dict(model.named_buffers())
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    optimizer = ft.VS2P(list(params.values()), lr=1.0)
    for _ in range(3):
        optimizer.step(lambda: torch.func.functional_call(model, {**params, **buffers}, x).square().mean())
    assert all(b is own[name] for name, b in model.named_buffers())
    assert model[1].num_batches_tracked == 0
    assert buffers["1.num_batches_tracked"] == 3


class WithBuffer(nn.Module):
    def __init__(self, buffer, change=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("buffer", buffer)
        self.change = change

    def forward(self):
        if self.change:
            self.change(self)
        return self.weight.sum() + self.buffer.double().mean()


def test_buffers_that_cannot_be_written_are_left_alone():
    with torch.inference_mode():
        inference = WithBuffer(torch.ones(5))
    for model in (WithBuffer(torch.ones(1).expand(5)), inference):
        optimizer, buffer = ft.VS2P([torch.ones(2)], lr=1.0), model.buffer
        optimizer.step(model)
        assert optimizer.last_step.taken
        assert model.buffer is buffer
        assert torch.equal(buffer, torch.ones(5))

    def replace(module):
        module.buffer = module.buffer + 1

    model = WithBuffer(torch.zeros(5), replace)
    optimizer = ft.VS2P(model.parameters(), lr=1.0)
    for _ in range(3):
        optimizer.step(torch.inference_mode()(model))
    assert torch.equal(model.buffer, torch.full((5,), 3.0))


def test_large_buffers_are_copied_only_if_they_change(monkeypatch):
    copied = []
    clone = torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda self: copied.append(self.numel()) or clone(self))
    model = WithBuffer(torch.zeros(200_000))
    optimizer = ft.VS2P(model.parameters(), lr=1.0)
    optimizer.step(model)
    assert 200_000 not in copied

    model = WithBuffer(torch.zeros(200_000), lambda module: module.buffer.add_(1))
    optimizer = ft.VS2P(model.parameters(), lr=1.0)
    optimizer.step(model)  # the change is noticed here
    start = float(model.buffer[0])
    for _ in range(3):
        optimizer.step(model)
    assert 200_000 in copied
    assert float(model.buffer[0]) == start + 3


def test_hooks_are_set_in_every_query():
    """A branch that is first taken in a later query is protected as well."""
    extra, weight = normed(), torch.ones(5)
    x = torch.randn(12, 6)

    def closure():
        seen.append(weight[0] < 1)
        return weight.sum() + (extra(x).square().mean() if seen[-1] else 0.0)

    seen = []
    optimizer = ft.VS2P([weight], lr=1.0, rho=0.1, directions=4, seed=1)
    optimizer.step(closure)
    assert sum(seen) == 4
    assert not seen[0]
    assert seen[-1]
    assert extra[1].num_batches_tracked == 1


@pytest.mark.parametrize("shared", [False, True], ids=["a buffer", "a view of a parameter"])
def test_weights_that_are_buffers_are_left_to_the_line(shared):
    module = nn.Module()
    weight = nn.Parameter(torch.ones(4)) if shared else torch.ones(4)
    module.register_buffer("w", weight.data.view(-1) if shared else weight)
    module.forward = lambda: module.w.square().sum()
    optimizer = ft.STP([weight], lr=1e-2)
    for _ in range(20):
        before = weight.detach().clone()
        optimizer.step(module)
        moved = (weight.detach() - before).abs().max().item()
        assert moved == pytest.approx(abs(optimizer.last_step.t), abs=1e-6)
    assert len(set(optimizer.last_step.losses)) > 1


def test_modules_that_come_later_are_seen():
    """Another model every other step, a part replaced in the middle, and one behind a caught exception."""
    models, x = [normed(), normed()], torch.randn(12, 6)
    weight = torch.ones(3)
    optimizer = ft.VS2P([weight], lr=1.0)
    for step in range(20):
        if step == 10:
            models[0][1] = nn.BatchNorm1d(6)
        optimizer.step(lambda: weight.sum() + models[step % 2](x).square().mean())  # noqa: B023
    assert models[0][1].num_batches_tracked == 5
    assert models[1][1].num_batches_tracked == 10

    class Failing(nn.Module):
        def forward(self):
            raise RuntimeError

    failing = Failing()

    def closure():
        with contextlib.suppress(RuntimeError):
            failing()
        return weight.sum() + models[0](x).square().mean()

    optimizer = ft.VS2P([weight], lr=1.0)
    for _ in range(5):
        optimizer.step(closure)
    assert models[0][1].num_batches_tracked == 10


@pytest.mark.parametrize("steps", [0, 2])
def test_replaced_buffers_are_put_back_when_the_closure_raises(steps):
    model = Replacing()
    optimizer = ft.VS2P(model.parameters(), lr=1.0)
    for _ in range(steps):
        optimizer.step(model)

    def failing():
        model()
        raise KeyError("mine")

    for _ in range(3):
        with pytest.raises(KeyError, match="mine"):
            optimizer.step(failing)
        assert model.count == steps


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_buffers_of_unusual_kinds():
    def drop(module):
        module._buffers.pop("buffer", None)
        module.buffer = torch.zeros(2)

    graded = torch.zeros(3).requires_grad_()
    sparse = WithBuffer(torch.eye(3).to_sparse_csr())
    sparse.forward = lambda: sparse.weight.sum()
    for model in (WithBuffer(graded), WithBuffer(torch.zeros(3), drop), sparse):
        optimizer = ft.VS2P(model.parameters(), lr=1.0)
        for _ in range(2):
            optimizer.step(model)
        assert optimizer.last_step.taken
        assert optimizer.queries == 4


def test_ensembles_by_vmap():
    models = [nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval() for _ in range(3)]
    params, buffers = torch.func.stack_module_state(models)
    x = torch.randn(5, 3)

    def one(p, b):
        return torch.func.functional_call(models[0], (p, b), (x,)).square().mean()

    optimizer = ft.VS2P([p.detach() for p in params.values()], lr=1.0, rho=1e-3)
    expected = sum(model(x).square().mean().item() for model in models) / 3
    loss = optimizer.step(lambda: torch.vmap(one)(params, buffers).mean())
    assert float(loss) == pytest.approx(expected, rel=1e-4)
    assert optimizer.last_step.gamma != 0


def test_a_step_not_taken_uses_up_its_random_numbers():
    x = torch.ones(3)
    torch.manual_seed(0)
    expected = torch.rand(4)[2:]
    torch.manual_seed(0)
    with pytest.warns(RuntimeWarning, match="not finite"):
        ft.VS2P([x], lr=1.0).step(lambda: torch.rand(2).sum() * float("nan"))
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (np.complex128(1 + 2j), "a tensor or a real number, not complex"),
        (np.complex64(1 + 2j), "a tensor or a real number, not complex"),
        (np.complex128(1), "a tensor or a real number, not complex"),
        (np.array(1 + 2j), "a tensor or a real number, not complex"),
        (torch.tensor(1 + 2j), "a tensor or a real number, not complex"),
        (np.ones(2), r"one number, not an array of shape \(2,\); reduce it"),
        (np.ones(0), r"one number, not an array of shape \(0,\); reduce it"),
    ],
)
def test_what_is_no_real_number_is_refused(loss, message):
    x = torch.ones(3)
    with pytest.raises(ft.InvalidArgumentError, match=message):
        ft.VS2P([x], lr=1.0).step(lambda: loss)
    assert torch.equal(x, torch.ones(3))


@pytest.mark.parametrize("loss", [np.float32(0.5), np.array(0.5), np.array([[0.5]]), Fraction(1, 2), Decimal("0.5")])
def test_numbers_of_other_kinds_are_losses(loss):
    assert ft.VS2P([torch.ones(3)], lr=1.0).step(lambda: loss) == 0.5


def test_losses_of_examples_are_real():
    layer = torch.nn.Linear(2, 1)
    with pytest.raises(ft.InvalidArgumentError, match=r"the losses must be real numbers, not torch.complex64"):
        ft.VS2P(layer.parameters(), lr=1.0, directions="per-example").step(lambda: layer(torch.ones(3, 2))[:, 0] * 1j)
