"""Sixteen bits: sums that are rounded stochastically, and probes that leave every bit of the weights as it was."""

import copy
import math
import signal
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forwardtune as ft
from forwardtune import auto, optimizer
from forwardtune._compat.torchvision import torchvision
from forwardtune._compat.transformers import transformers
from forwardtune.doctor import examine
from forwardtune.errors import InvalidArgumentError
from forwardtune.layers.layerwise import Layerwise
from forwardtune.ledger import export
from forwardtune.noise import Mover, Slot, Term
from forwardtune.noise.backends import reference
from forwardtune.noise.outer import OuterMover

SHORT = [torch.bfloat16, torch.float16]
BACKENDS = ["numba", "triton", "reference"]


def bits(tensor):
    return tensor.detach().contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def same(one, other):
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(one, other, strict=True))


def moved(x, terms, kind=Mover, backend="numba", **options):
    y = x.clone(memory_format=torch.preserve_format)
    more = {"distribution": "rademacher"} if kind is Mover else {}
    kind([Slot(y, 3, 0, 0.7)], 1, seed=5, backend=backend, stochastic=True, **more, **options).move(4, terms)
    return y


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("x", [1.0, -1.9, 300.0, 3e-5, 0.0, 6e-8])
def test_rounding_is_unbiased(x, dtype):
    """Over a million draws, at parts of a unit from a hundredth on, and among subnormal numbers of float16."""
    n = 1_000_000
    start = torch.full((n,), x).to(dtype)
    exact = start[0].double().item()
    unit = abs(bits(start[:1]).add(1).view(dtype).double().item() - exact)
    for part in (0.01, 0.3, 0.5, 0.99):
        change = torch.full((n,), part * unit)
        total = exact + change[0].double().item()
        draws = reference.rounding_bits(reference.Key(1, 2, "rademacher", True), 0, 0, 0, n, torch.device("cpu"))
        rounded = reference.rounded(start.float() + change, draws, dtype).double()
        assert len(rounded.unique()) == 2
        assert (rounded - total).abs().max() < unit
        assert rounded.mean().item() == pytest.approx(total, abs=5 * unit * math.sqrt(part * (1 - part) / n))


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("distribution", ["rademacher", "normal", "uniform", "sphere"])
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered")  # by numpy, in triton's interpreter
def test_backends_round_alike(dtype, distribution):
    """Large, small, subnormal, infinite and strided weights, several sums in a move."""
    x = torch.randn(20_010, generator=torch.Generator().manual_seed(0)) * torch.logspace(-9, 6, 20_010)
    x[:4] = torch.tensor([math.inf, -math.inf, 0.0, -0.0])
    x = x.to(dtype).view(2, -1).t()
    terms = [Term(2, [0.01], [0.3]), Term(1, [0.0], [1e-4])]
    results = []
    for backend in BACKENDS:
        y = x.clone(memory_format=torch.preserve_format)
        assert not y.is_contiguous()
        Mover([Slot(y, 3, 0, 0.7)], 1, seed=5, distribution=distribution, backend=backend, stochastic=True).move(
            4, terms
        )
        results.append(y)
    assert same(results[:1] * 2, results[1:])
    assert not same(results[:1], [x])


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("shape", [(7,), (30, 50), (70, 3, 3, 3), (3, 1500)])
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered")
def test_sums_of_products_round_alike(shape, dtype):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    terms = [Term(line, [0.1 * line], [0.37 / (line + 1)]) for line in range(9)]
    one, *others = (moved(x, terms, OuterMover, backend) for backend in BACKENDS)
    for other in others:
        assert same([one], [other])


def test_threads_round_alike():
    x = torch.randn(1_000_003).bfloat16()
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(moved(x, [Term(0, [0.0], [1e-3])]))
    finally:
        torch.set_num_threads(threads)
    assert same(results[:1], results[1:])


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("kind", [Mover, OuterMover])
def test_what_is_undone_is_rounded_the_other_way(kind, dtype):
    """So that weights return, but for those that crossed a power of two and a few whose float32 sum was rounded."""
    x = torch.randn(200, 300, generator=torch.Generator().manual_seed(1)).to(dtype)
    there = moved(x, [Term(0, [0.0], [0.01])], kind)
    back = moved(there, [Term(0, [0.01], [0.0])], kind)
    crossed = torch.frexp(x.float()).exponent != torch.frexp(there.float()).exponent
    assert (there != x).float().mean() > 0.5
    assert 0 < crossed.sum() < 0.05 * x.numel()
    assert ((back != x) & ~crossed).sum() < 2e-3 * x.numel()


def test_small_steps_add_up():
    """A thousand steps of a hundredth of a unit: to nearest nothing moves."""
    ended = {}
    for rounding in ("stochastic", "nearest"):
        x = nn.Parameter(torch.ones(4000, dtype=torch.bfloat16))
        optimizer = ft.STP([x], lr=1.0, scale="absolute", rounding=rounding, distribution="rademacher")
        field = optimizer.field
        for step in range(1000):
            field.mover.move(step, [Term(0, [0.0], [7.8125e-5])])
        moves = sum(field.values(step, 0, 0, 0, 4000) for step in range(1000)) * 7.8125e-5
        ended[rounding] = (x.detach().double() - 1, moves)
    away, moves = ended["stochastic"]
    assert (away @ moves / (moves @ moves)).item() == pytest.approx(1.0, abs=0.2)
    assert not ended["nearest"][0].any()


class Positions(nn.Module):
    """Returns its weights."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 8))

    def forward(self, n):
        return self.weight[:n]


class Odd(nn.Module):
    """Parameters that are used by their layers, by functions, by both, by fused layers, by none."""

    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(11, 8), Positions()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        self.gate, self.shifts = nn.Parameter(torch.randn(8)), nn.ParameterList([torch.randn(8)])
        self.unused, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(5)

    def forward(self, tokens):
        h = self.norm(self.words(tokens) + self.positions(5))
        h = self.block(self.attention(h, h, h)[0]) * self.gate + self.shifts[0]
        return F.linear(h, self.words.weight)


@pytest.mark.parametrize(
    ("dtype", "compiled"),
    [*((dtype, False) for dtype in (torch.float32, torch.float64, *SHORT)), (torch.float32, True)],
)
@pytest.mark.filterwarnings("ignore:Using `torch.compile")
@torch.no_grad()
def test_probes_layer_by_layer_are_those_of_weights_that_moved(dtype, compiled):
    torch.manual_seed(0)
    model, tokens = Odd().to(dtype).train(), torch.randint(0, 11, (4, 5))
    call = torch.compile(model, backend="eager") if compiled else model
    method = ft.VS2P(model.named_parameters(), lr=1.0)
    mover, before = method.field.mover, copy.deepcopy(list(model.parameters()))
    layers, moves = Layerwise(mover), [(0, [Term(0, (0.0,), (0.05,))]), (1, [Term(0, (0.0,), (0.02,))])]
    seen = [layers.query(moves, lambda: call(tokens)) for _ in range(3)]
    assert same(model.parameters(), before)
    still = layers.query([], lambda: call(tokens))
    mover.chain(moves)
    expected = model(tokens)
    tolerance = 1e-5 if compiled else 0.0
    for outputs in seen:
        torch.testing.assert_close(outputs, expected, rtol=tolerance, atol=tolerance)
    assert not torch.allclose(still, expected, atol=1e-3)
    names = [name for name, _ in model.named_parameters()]
    held = {names[layers.slots[number].parameter] for number in layers.held}
    assert held >= {"unused.weight", "unused.bias"}
    assert compiled or len(held) == 2


def later(layer, x):
    """A penalty on the weights that begins with the second step."""
    return lambda step: layer(x).square().mean() + (layer.weight.square().sum() if step else 0.0)


def compiled(layer, x):
    query = torch.compile(lambda: layer(x).square().mean(), backend="eager")
    return lambda step: query()


def scripted(layer, x):
    query = torch.jit.script(layer)
    return lambda step: query(x).square().mean()


USES = {
    "a penalty that begins later": (lambda: nn.Linear(8, 4), later),
    "a compiled closure": (lambda: nn.Linear(8, 4), compiled),
    "a scripted layer": (lambda: nn.Linear(8, 4), scripted),
    "vmap": (lambda: nn.Linear(8, 4), lambda layer, x: lambda step: torch.vmap(layer)(x).square().mean()),
    "a fused layer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(),
        lambda layer, x: lambda step: 10 * layer(x).square().sum(),
    ),
    "another dtype": (
        lambda: nn.Linear(8, 8),
        lambda layer, x: lambda step: F.linear(layer(x), layer.weight.type(torch.float64).float()).square().mean(),
    ),
    "inference mode": (
        lambda: nn.Linear(8, 8),
        lambda layer, x: torch.inference_mode()(lambda step: F.linear(layer(x), layer.weight).square().mean()),
    ),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.filterwarnings("ignore")  # torch's own, about scripts and global hooks
def test_weights_are_at_the_probe_however_they_are_used(use):
    """The same losses as in place, at the same count of queries."""
    make, closure_of = USES[use]
    seen = {}
    for probes in ("layerwise", "in-place"):
        torch.manual_seed(0)
        layer, x = make(), torch.randn(3, 5, 8)
        method, closure = ft.VS2P(layer.parameters(), lr=0.0, rho=0.05, probes=probes), closure_of(layer, x)
        losses = []
        for step in range(3):
            method.step(lambda step=step, closure=closure: closure(step))
            losses += method.last_step.losses
        assert method.queries == 6
        seen[probes] = torch.tensor(losses)
    assert seen["in-place"].std() > 1e-4
    torch.testing.assert_close(seen["layerwise"], seen["in-place"], rtol=1e-5, atol=1e-6)


def test_ctrl_c_while_threads_move_the_weights():
    """At twelve instants of a step: none leaves a weight changed, also after all threads have ended."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    alarm = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        layer, x = nn.Linear(4096, 2048).bfloat16(), torch.randn(1, 4096).bfloat16()
        before = copy.deepcopy(list(layer.parameters()))
        method = ft.VS2P(layer.parameters(), lr=0.0)
        started = time.perf_counter()
        method.step(lambda: layer(x).float().square().mean())
        took, interrupted = time.perf_counter() - started, 0
        for instant in range(1, 13):
            try:
                signal.setitimer(signal.ITIMER_REAL, took * instant / 12)
                for _ in range(20):
                    method.step(lambda: layer(x).float().square().mean())
            except KeyboardInterrupt:
                interrupted += 1
            assert same(layer.parameters(), before)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGINT, handler)
        signal.signal(signal.SIGALRM, alarm)
        torch.set_num_threads(threads)
    assert interrupted == 12


def llama(**more):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, tie_word_embeddings=True, **sizes, **more)
    model = transformers.LlamaForCausalLM(config).eval()
    return model, torch.randint(3, 60, (4, 6)), lambda x: model(input_ids=x).logits[:, -1]


def lora():
    peft = pytest.importorskip("peft")
    base, x, _ = llama()
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4)).eval()
    return model, x, lambda x: model(input_ids=x).logits[:, -1]


def resnet():
    model = torchvision().models.resnet18(num_classes=3).train()
    return model, torch.randn(4, 3, 32, 32), lambda x: model(x.to(next(model.parameters()).dtype))


@pytest.mark.parametrize("make", [llama, lora, resnet])
@pytest.mark.parametrize("dtype", [torch.float32, *SHORT])
@pytest.mark.parametrize("directions", [1, "per-example"])
def test_steps_that_do_not_move_leave_every_bit(make, dtype, directions):
    torch.manual_seed(0)
    model, x, call = make()
    model.to(dtype)
    y = torch.zeros(4, dtype=torch.long)

    def closure():
        losses = F.cross_entropy(call(x).float(), y, reduction="none")
        return losses if directions == "per-example" else losses.mean()

    def changed(**options):
        before = copy.deepcopy(list(model.parameters()))
        method = ft.VS2P(model.parameters(), lr=0.0, rho=0.02, directions=directions, **options)
        for _ in range(4):
            method.step(closure)
        pairs = zip(model.parameters(), before, strict=True)
        return sum((bits(p) != bits(q)).sum().item() for p, q in pairs) / sum(p.numel() for p in model.parameters())

    assert changed(probes="layerwise") == 0
    if directions == 1 and make is not lora:
        assert changed(probes="in-place", rounding="nearest") > {2: 1e-3, 4: 0.0}[dtype.itemsize]


def test_the_weights_are_put_back_if_a_layer_or_the_closure_raises():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).bfloat16()
    before, x = copy.deepcopy(list(model.parameters())), torch.randn(5, 4, dtype=torch.bfloat16)
    method = ft.VS2P(model.parameters(), lr=1.0)
    assert method.probes == "layerwise"
    method.param_groups[0]["lr"] = 0.0
    for error in (ZeroDivisionError, KeyboardInterrupt):
        for place in (0, 2):

            def fail(layer, args, output, error=error):
                raise error

            hook = model[place].register_forward_hook(fail)
            with pytest.raises(error):
                method.step(lambda: model(x).float().square().mean())
            hook.remove()
            assert same(model.parameters(), before)
            method.step(lambda: model(x).float().square().mean())
            assert same(model.parameters(), before)


def test_inference_tensors():
    with torch.inference_mode():
        model, x = nn.Linear(4, 2).bfloat16(), torch.randn(3, 4, dtype=torch.bfloat16)
    method = ft.VS2P(model.parameters(), lr=1.0)
    with torch.inference_mode():
        first = method.step(lambda: model(x).float().square().mean())
        for _ in range(50):
            last = method.step(lambda: model(x).float().square().mean())
    assert last < first


@pytest.mark.parametrize("directions", [1, 2, "per-example", "auto"])
@pytest.mark.parametrize("dtype", SHORT)
def test_runs_replay_export_and_resume(directions, dtype, tmp_path, monkeypatch):
    """With reviews, of which every third finds damage, so that the run goes back."""
    reviews = iter(range(1000))
    monkeypatch.setattr(optimizer, "is_damage", lambda *_: next(reviews) % 3 == 1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)
    base = copy.deepcopy(model)
    x = torch.randn(64, 6, dtype=dtype)
    y = x[:, :3].argmax(1)

    def closure():
        losses = F.cross_entropy(model(x).float(), y, reduction="none")
        return losses.mean() if isinstance(directions, int) else losses

    ledger = ft.Ledger(tmp_path / "run.ledger", model)
    method = ft.VS2P(model.named_parameters(), directions=directions, recorder=ledger)
    first = method.step(closure)
    went_back = 0
    for _ in range(70):
        last = method.step(closure)
        went_back += method.last_step.review is not None and method.last_step.review.back
    ledger.close()
    assert went_back >= 1
    assert last < first
    export(tmp_path / "run.ledger", tmp_path / "small.ledger")
    for name in ("run.ledger", "small.ledger"):
        assert same(ft.replay(copy.deepcopy(base), tmp_path / name).parameters(), model.parameters())
    for backend in ("reference", "numba"):
        assert same(
            ft.replay(copy.deepcopy(base), tmp_path / "run.ledger", backend=backend).parameters(), model.parameters()
        )
    again = copy.deepcopy(base)
    resumed, _ = ft.resume(again, tmp_path / "run.ledger")
    assert (resumed.probes, resumed.rounding, resumed.auto) == ("layerwise", "stochastic", method.auto)
    assert same(again.parameters(), model.parameters())
    resumed.recorder.close()


def test_what_is_chosen_by_itself():
    short, long = nn.Linear(3, 2).bfloat16(), nn.Linear(3, 2)
    assert ft.VS2P(short.parameters()).probes == "layerwise"
    assert ft.VS2P([*short.parameters(), *long.parameters()]).probes == "layerwise"
    assert ft.VS2P(long.parameters()).probes == "in-place"
    assert ft.VS2P(short.parameters(), probes="in-place").probes == "in-place"
    older = ft.VS2P(short.parameters(), probes="in-place", rounding="nearest")
    state = older.state_dict()
    for group in state["param_groups"]:
        group["run"] = {name: value for name, value in group["run"].items() if name not in ("probes", "rounding")}
    method = ft.VS2P(short.parameters())
    method.load_state_dict(state)
    assert (method.probes, method.rounding) == ("in-place", "nearest")
    assert not method.field.stochastic
    with pytest.raises(InvalidArgumentError, match="unknown probes 'beside'; choose one of auto, in-place, layerwise"):
        ft.VS2P(short.parameters(), probes="beside")
    with pytest.raises(InvalidArgumentError, match="unknown rounding 'up'"):
        ft.VS2P(short.parameters(), rounding="up")


def test_auto_finds_a_rate_in_sixteen_bits():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).bfloat16()
    x = torch.randn(200, 6, dtype=torch.bfloat16)
    y = x[:, :3].argmax(1)
    method = ft.VS2P(model.parameters())
    losses = [method.step(lambda: F.cross_entropy(model(x).float(), y)).item() for _ in range(300)]
    assert not auto.is_surveying(method.auto)
    assert sum(losses[-20:]) < 0.7 * sum(losses[:20])


def test_the_doctor_tells_what_probes_do():
    """In place some weights stay where they are and some do not return; layers are covered or named."""
    torch.manual_seed(0)
    model = Odd().bfloat16().requires_grad_(True)
    before, tokens = copy.deepcopy(list(model.parameters())), torch.randint(0, 11, (4, 5))
    far, near = (examine(model, rho, lambda: model(tokens)) for rho in (0.3, 1e-4))
    assert same(model.parameters(), before)
    assert (far.probes, examine(Odd()).probes) == ("layerwise", "in-place")
    rows = {row.name: row for row in near.findings}
    assert rows["block.linear1.weight"].still > 0.9
    assert all(row.still < 0.2 for row in far.findings)
    assert any(row.changed > 0.02 for row in far.findings)
    assert rows["words.weight"].no_own_lines == "used outside its layer"
    assert rows["attention.in_proj_weight"].no_own_lines == "MultiheadAttention is not known"
    assert not rows["block.linear1.weight"].no_own_lines
    assert far.weights == sum(2 * p.numel() for p in model.parameters())
    linear = examine(nn.Linear(30, 40))
    assert (linear.copy, linear.line, linear.uncovered) == (4 * (30 * 40 + 40), 4 * (30 + 40 + 40), ())
