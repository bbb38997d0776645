"""Lines of their own: layers whose examples see weights of their own, sums of products, and runs along such lines."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forwardtune as ft
from forwardtune import auto
from forwardtune._compat.torchvision import torchvision
from forwardtune._compat.transformers import transformers
from forwardtune.errors import InvalidArgumentError
from forwardtune.layers import Perturbation
from forwardtune.ledger import export, read
from forwardtune.noise.backends import reference
from forwardtune.noise.outer import OuterMover, as_matrix, factor_sizes, factors
from forwardtune.noise.types import Key, Slot, Term
from forwardtune.record import LineRecord, StepRecord
from tests.helpers.optimizers import weights

SHAPES = [(7,), (30, 50), (70, 3, 3, 3), (5, 4, 3), (40_000, 3), ()]


def test_factors_are_the_noise_of_their_parameter():
    slots = [Slot(torch.zeros(shape), 3 * number, 0) for number, shape in enumerate(SHAPES)]
    key = Key((5 << 40) + 17, 12, "rademacher")
    for slot, own in zip(slots, factors(slots, key.seed, key.step, 6), strict=True):
        n = sum(factor_sizes(slot.tensor.shape))
        for line in range(6):
            expected = reference.values(key, line, slot.parameter, 0, n, torch.device("cpu"))
            assert torch.equal(torch.cat([factor[line] for factor in own]), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_move_is_the_sum_of_outer_products(shape, dtype):
    """On both backends the same bits, and close to a sum in double precision."""
    terms = [Term(line, [0.1 * line, 0.0], [0.37 / (line + 1), 0.5]) for line in range(9)]
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    moved = {}
    for backend in ("numba", "reference"):
        tensor = start.clone()
        OuterMover([Slot(tensor, 2, 0, 0.3)], 2, seed=3, backend=backend).move(5, terms)
        moved[backend] = tensor
    assert torch.equal(moved["numba"], moved["reference"])
    mover = OuterMover([Slot(start, 2, 0, 0.3)], 2, seed=3)
    exact = start.double()
    for term in terms:
        exact += (term.forth[0] - term.back[0]) * mover.values(5, term.direction, 2).view(shape)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 0.05)
    torch.testing.assert_close(moved["numba"].double(), exact, rtol=tolerance, atol=tolerance)


def test_going_back_restores_the_weights():
    tensor = torch.randn(40, 30, dtype=torch.float64)
    before = tensor.clone()
    mover = OuterMover([Slot(tensor, 0, 0, 1.0)], 1, seed=1)
    mover.move(4, [Term(line, [0.0], [0.01 * line]) for line in range(5)])
    assert not torch.equal(tensor, before)
    mover.move(4, [Term(line, [0.01 * line], [0.0]) for line in range(5)])
    torch.testing.assert_close(tensor, before, rtol=1e-15, atol=1e-15)


class Everything(nn.Module):
    """All kinds of layers, an embedding of positions, and tied weights."""

    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(11, 6), nn.Embedding(5, 6)
        self.norm, self.up, self.rms = nn.LayerNorm(6), nn.Linear(6, 8), nn.RMSNorm(8)
        self.conv, self.group = nn.Conv1d(8, 4, 3, padding=1, stride=2), nn.GroupNorm(2, 4)
        self.grouped, self.batch = nn.Conv2d(4, 8, (1, 3), groups=2, padding=(0, 1), dilation=(1, 1)), nn.BatchNorm2d(8)
        self.mixed = nn.Linear(3, 3)
        self.down, self.head = nn.Linear(24, 6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        h = self.words(tokens) + self.positions(torch.arange(5)[None])
        h = self.rms(torch.tanh(self.up(self.norm(h)))).transpose(1, 2)
        h = self.batch(self.grouped(self.group(self.conv(h))[:, :, None]))
        return self.head(self.down(self.mixed(h).flatten(1)))


def everything():
    return Everything().eval(), torch.randint(0, 11, (7, 5)), lambda model, x: model(x)


def resnet():
    return torchvision().models.resnet18(num_classes=3).eval(), torch.randn(3, 3, 32, 32), lambda model, x: model(x)


def small(kind, **config):
    model = getattr(transformers, kind)(getattr(transformers, config.pop("config"))(**config)).eval()
    return model, torch.randint(3, 60, (4, 6)), lambda model, x: model(input_ids=x)[0]


def gpt2():
    return small("GPT2LMHeadModel", config="GPT2Config", vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=16)


def llama():
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return small("LlamaForCausalLM", config="LlamaConfig", vocab_size=64, **sizes)


def bert():
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return small("BertForSequenceClassification", config="BertConfig", vocab_size=64, num_labels=3, **sizes)


def adapted(base, **config):
    """A model with an adapter; made after the cast to float64, since peft's prefixes have the dtype of then."""
    peft = pytest.importorskip("peft")
    model, x, call = base()
    config = peft.get_peft_config({"task_type": "CAUSAL_LM", **config})
    return peft.get_peft_model(model.double(), config).eval(), x, call


def lora():
    return adapted(llama, peft_type="LORA", target_modules=["q_proj", "v_proj"], r=4)


def ia3():
    return adapted(llama, peft_type="IA3", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])


def ia3_gpt2():
    """Linear maps with biases."""
    names = {"target_modules": ["c_attn", "mlp.c_proj"], "feedforward_modules": ["mlp.c_proj"]}
    return adapted(gpt2, peft_type="IA3", fan_in_fan_out=True, **names)


def prompt():
    return adapted(llama, peft_type="PROMPT_TUNING", num_virtual_tokens=3)


def prompt_gpt2():
    return adapted(gpt2, peft_type="PROMPT_TUNING", num_virtual_tokens=3)


def prefix():
    return adapted(llama, peft_type="PREFIX_TUNING", num_virtual_tokens=3)


def prefix_gpt2():
    return adapted(gpt2, peft_type="PREFIX_TUNING", num_virtual_tokens=3, prefix_projection=True)


ADAPTED = [lora, ia3, ia3_gpt2, prompt, prompt_gpt2, prefix, prefix_gpt2]


@pytest.mark.parametrize("make", [everything, resnet, gpt2, llama, bert, *ADAPTED])
@pytest.mark.parametrize("shared", [False, True])
@torch.no_grad()
def test_outputs_are_those_of_perturbed_copies(make, shared):
    torch.manual_seed(0)
    model, x, call = make()
    model = model.double()
    for parameter in model.parameters():
        parameter += 0.05 * torch.randn_like(parameter)
    x = x.double() if x.is_floating_point() else x
    field = ft.VS2P([p for p in model.parameters() if p.requires_grad], lr=1.0, directions="per-example").field
    slots = field.slots
    perturbation = Perturbation(slots, [""] * len(slots), lambda n: factors(slots, 0, 3, n), shared=shared)
    with perturbation.at([0.02]):
        outputs = call(model, x)
    assert not torch.allclose(outputs, call(model, x), atol=1e-4)
    lines = factors(slots, 0, 3, len(x))
    llamas = (llama, lora, ia3, prompt, prefix)
    tolerance = 1e-6 if make in llamas else 1e-10  # Llama's norms compute in float32
    for example in range(len(x)):
        before = [slot.tensor.clone() for slot in slots]
        for slot, own in zip(slots, lines, strict=True):
            rows, columns = as_matrix(own)
            j = 0 if shared else example
            slot.tensor.add_(0.02 * (rows[j][:, None] * columns[j]).double().view(slot.tensor.shape))
        alone = call(model, x[example : example + 1])
        torch.testing.assert_close(outputs[example : example + 1], alone, rtol=0, atol=tolerance)
        for slot, old in zip(slots, before, strict=True):
            slot.tensor.copy_(old)


def problem(dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)
    x = torch.randn(200, 6, dtype=dtype)
    y = x[:, :3].argmax(1)

    def losses(start):
        rows = torch.arange(start * 16, start * 16 + 16) % 200
        return F.cross_entropy(model(x[rows]), y[rows], reduction="none")

    return model, losses, lambda: F.cross_entropy(model(x), y).item()


def test_a_step_is_the_sum_of_every_examples_own():
    """MeZO by hand: each example's slope, times its own direction."""
    model, losses, _ = problem(torch.float64)
    optimizer = ft.MeZO(model.parameters(), lr=0.1, scale="absolute", directions="per-example", seed=5)
    before = [p.detach().clone() for p in model.parameters()]
    directions = [[optimizer.field.values(0, j, n, 0, p.numel()) for n, p in enumerate(before)] for j in range(16)]
    slopes = []
    for own in directions:
        at = []
        for sign in (1, -1):
            for p, old, v in zip(model.parameters(), before, own, strict=True):
                p.data = old + sign * 1e-3 * v.view(p.shape)
            at.append(losses(0).detach()[len(slopes)].item())
        slopes.append((at[0] - at[1]) / 2e-3)
    for p, old in zip(model.parameters(), before, strict=True):
        p.data = old.clone()
    optimizer.step(lambda: losses(0))
    assert optimizer.queries == 2
    for n, (p, old) in enumerate(zip(model.parameters(), before, strict=True)):
        moved = sum(-0.1 * slope * own[n] for slope, own in zip(slopes, directions, strict=True)) / 16**0.5
        torch.testing.assert_close(p.detach(), old + moved.view(p.shape), rtol=0, atol=1e-10)


def test_probes_leave_the_weights_alone():
    model, losses, _ = problem(torch.bfloat16)
    before = weights(model)
    optimizer = ft.VS2P(model.parameters(), lr=1e-30, rho=1e-3, directions="per-example")
    for step in range(20):
        optimizer.step(lambda step=step: losses(step))
    assert torch.equal(weights(model), before)


def check_again(folder, base, model, optimizer):
    """The ledger in a folder replays, exports and resumes to the same bits; the model that was resumed."""
    export(folder / "run.ledger", folder / "small.ledger")
    for name in ("run.ledger", "small.ledger"):
        assert torch.equal(weights(ft.replay(copy.deepcopy(base), folder / name)), weights(model))
    again = copy.deepcopy(base)
    resumed, step = ft.resume(again, folder / "run.ledger")
    assert (step, resumed.auto, resumed.queries) == (optimizer.steps, optimizer.auto, optimizer.queries)
    assert torch.equal(weights(again), weights(model))
    resumed.recorder.close()
    return again


@pytest.mark.parametrize("method", [ft.VS2P, ft.MeZO, ft.STP])
def test_a_run_replays_exports_and_resumes(method, tmp_path):
    model, losses, loss = problem()
    base, first = copy.deepcopy(model), loss()
    ledger = ft.Ledger(tmp_path / "run.ledger", model)
    optimizer = method(model.named_parameters(), lr="auto", directions="per-example", recorder=ledger)
    for step in range(60):
        optimizer.step(lambda step=step: losses(step))
        if step == 40:
            with pytest.raises(ZeroDivisionError):
                optimizer.step(lambda: 1 / 0)
    ledger.close()
    assert loss() < 0.8 * first
    assert optimizer.auto["reviews"] > 2
    assert -0.1 < optimizer.agreement < 1
    again = check_again(tmp_path, base, model, optimizer)
    small = read(tmp_path / "small.ledger")
    assert [record.queries for record in small.records()][39] == read(tmp_path / "run.ledger").record(39).queries
    state = copy.deepcopy(optimizer.state_dict())
    other = method(again.named_parameters(), lr="auto", directions="per-example")
    other.load_state_dict(state)
    assert other.by_example


@pytest.mark.parametrize("method", [ft.VS2P, ft.MeZO, ft.STP])
def test_examples_that_share_a_line_are_a_run_along_common_ones(method, monkeypatch):
    """The same noise and the same decisions, through surveys and reviews, for as long as they share."""
    monkeypatch.setattr(auto, "WORTH", math.inf)

    def ended(directions):
        model, losses, _ = problem(torch.float64)
        optimizer = method(model.parameters(), directions=directions)
        for step in range(80):
            optimizer.step(lambda step=step: losses(step) if optimizer.by_example else losses(step).mean())
        return weights(model), optimizer.queries, optimizer.auto["reviews"]

    (common, *counts), (shared, *same) = ended(1), ended("auto")
    assert counts == same
    assert counts[1] >= 5
    torch.testing.assert_close(shared, common, rtol=0, atol=1e-9)


@pytest.mark.parametrize("method", [ft.VS2P, ft.MeZO, ft.STP])
def test_examples_that_agree_get_lines_of_their_own(method, tmp_path):
    """From the first common line to own ones and to the end the run is recorded, replayed, exported and resumed."""
    model, *_ = problem()
    base, one = copy.deepcopy(model), torch.zeros(16, dtype=torch.long)
    ledger = ft.Ledger(tmp_path / "run.ledger", model)
    optimizer = method(model.named_parameters(), directions="auto", recorder=ledger)
    x = torch.randn(16, 6)
    shared = []
    for step in range(70):
        if step == 12:
            with pytest.raises(ZeroDivisionError):
                optimizer.step(lambda: 1 / 0)
        optimizer.step(lambda: F.cross_entropy(model(x), one, reduction="none"))
        shared.append(optimizer.last_step.shared)
    ledger.close()
    changes = [step for step in range(1, 70) if shared[step] != shared[step - 1]]
    assert shared[0]
    assert not shared[-1]
    assert len(changes) == 1
    assert changes[0] >= auto.SURVEYS + auto.ENOUGH
    assert optimizer.auto["trial"] is None
    assert optimizer.agreement > 0.1
    check_again(tmp_path, base, model, optimizer)


def slopes_in(step, slopes, shared):
    """A step along a line that examples share, or along their own, with these slopes."""
    lines = [(LineRecord((0.1, -0.1), (1 + 0.1 * slope, 1 - 0.1 * slope), 0.01),) for slope in slopes]
    return StepRecord.of(step, lines, queries=2 * step, taken=True, by_example=True, shared=shared)


@pytest.mark.parametrize(
    ("own", "stay"),
    [([1.0, 1.1, 0.9, 1.0], True), ([9.0, -9.0, 9.0, -9.0], False), ([0.0, 0.0, 0.0, 2.0], False)],
)
def test_lines_of_their_own_are_tried_before_they_are_taken(own, stay):
    """Where slopes along own lines are mostly noise of others' lines, or zero, examples share a line for good."""
    state = {**auto.start("auto"), "surveyed": None, "slope": 1.0}
    for step in range(auto.ENOUGH):
        assert state["shared"]
        state = auto.after_step(state, slopes_in(step, [1.0, 1.2, 0.8, 1.0], shared=True))
    assert not state["shared"]
    assert auto.agreement(state) == pytest.approx(0.99, abs=0.02)
    for step in range(auto.ENOUGH):
        assert not state["shared"]
        state = auto.after_step(state, slopes_in(auto.ENOUGH + step, own, shared=False))
    assert state["trial"] is None
    assert state["shared"] != stay
    if not stay:
        assert state["slope"] == pytest.approx(1.0)
    later = auto.after_step(state, slopes_in(99, [1.0] * 4, shared=not stay))
    assert later["shared"] == state["shared"]


def crossed(model, x, y):
    """Losses that change with the lines of other examples as well, as with BatchNorm, if these are not the same."""

    def losses():
        own = F.cross_entropy(model(x), y, reduction="none")
        return own + 20 * (own.roll(1) - own.roll(2))

    return losses


@pytest.mark.parametrize("method", [ft.VS2P, ft.MeZO, ft.STP])
@pytest.mark.parametrize("stop", [5, 26, 60])
def test_a_trial_that_is_rejected_and_a_run_stopped_within(method, stop, tmp_path):
    """Stopped in a survey, in the trial and after it, a run goes on as if it never was, from its ledger or a state."""
    torch.manual_seed(0)
    x, y = torch.randn(1, 6).expand(16, -1), torch.zeros(16, dtype=torch.long)

    def run(model, optimizer, steps):
        shared = []
        for _ in range(steps):
            optimizer.step(crossed(model, x, y))
            shared.append(optimizer.last_step.shared)
        return shared

    base, *_ = problem()
    whole = copy.deepcopy(base)
    reference = method(whole.named_parameters(), directions="auto")
    shared = run(whole, reference, 70)
    assert reference.auto["trial"] is None
    assert shared.count(False) == auto.ENOUGH
    assert shared[-1]
    model = copy.deepcopy(base)
    ledger = ft.Ledger(tmp_path / "run.ledger", model)
    optimizer = method(model.named_parameters(), directions="auto", recorder=ledger)
    run(model, optimizer, stop)
    ledger.close()
    state, stopped = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model)
    again = copy.deepcopy(base)
    resumed, _ = ft.resume(again, tmp_path / "run.ledger")
    run(again, resumed, 70 - stop)
    resumed.recorder.close()
    other = method(stopped.named_parameters(), directions="auto")
    other.load_state_dict(state)
    run(stopped, other, 70 - stop)
    for ended in (again, stopped, ft.replay(copy.deepcopy(base), tmp_path / "run.ledger")):
        assert torch.equal(weights(ended), weights(whole))
    export(tmp_path / "run.ledger", tmp_path / "small.ledger")
    assert torch.equal(weights(ft.replay(copy.deepcopy(base), tmp_path / "small.ledger")), weights(whole))


def test_odd_numbers_on_a_shared_line():
    """Rates of zero, losses that are not finite, and batches that change are met as on any line."""
    model, losses, _ = problem()
    optimizer = ft.STP(model.parameters(), directions="auto")
    while auto.is_surveying(optimizer.auto):
        optimizer.step(lambda: losses(0))
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step(lambda: losses(6))
    assert optimizer.last_step.taken
    asked = optimizer.auto["asked"]
    optimizer.param_groups[0]["lr"] = 1.0
    optimizer.step(lambda: losses(0)[:1])  # one example tells nothing of agreement
    assert optimizer.auto["asked"] == asked
    sizes = iter([16, 15, 16])
    with pytest.raises(InvalidArgumentError, match="returned 16 losses and then 15"):
        optimizer.step(lambda: losses(0)[: next(sizes)])
    bad = torch.tensor([math.inf, -math.inf, *[1.0] * 14])
    with pytest.warns(RuntimeWarning, match=r"losses \(.*inf"):
        loss = optimizer.step(lambda: losses(0) + bad)
    assert not optimizer.last_step.taken
    assert math.isnan(float(loss))


def test_examples_that_do_not_agree_go_on_sharing():
    state = {**auto.start("auto"), "surveyed": None, "slope": 1.0}
    for step in range(5 * auto.ENOUGH):
        state = auto.after_step(state, slopes_in(step, [1.0, -1.0, 1.0, -0.9], shared=True))
        assert state["shared"]
    assert auto.agreement(state) < 0


def test_agreement_is_the_cosine_of_gradients():
    """Slopes of examples along shared lines have the products of their gradients."""
    model, losses, _ = problem(torch.float64)
    optimizer = ft.VS2P(model.parameters(), lr="auto", scale="absolute", directions="per-example")
    sums = torch.zeros(2, dtype=torch.float64)
    gradients = []
    for loss in losses(0):
        model.zero_grad()
        loss.backward(retain_graph=True)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    g = torch.stack(gradients)
    products = g @ g.T
    expected = (products.sum() - products.trace()) / 15 / products.trace()
    for step in range(1500):
        with torch.no_grad():
            own = [optimizer.field.values(step, 0, n, 0, p.numel()) for n, p in enumerate(model.parameters())]
        slopes = g @ torch.cat(own)
        sums += torch.stack([(16 * slopes.mean() ** 2 - slopes.square().mean()) / 15, slopes.square().mean()])
    assert (sums[0] / sums[1]).item() == pytest.approx(expected.item(), rel=0.1)
    surveyed = torch.tensor([0.3, -0.1, 0.2])
    state = auto.start()
    products, squares = auto._agreeing(state, surveyed.tolist())
    assert squares == pytest.approx(surveyed.square().mean().item())
    pairs = sum(surveyed[i] * surveyed[j] for i in range(3) for j in range(3) if i != j) / 6
    assert products == pytest.approx(pairs.item())


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.gate = nn.Linear(4, 3), nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.layer(x) * self.gate


class Tied(nn.Module):
    """Its embedding is also used by a function."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(5, 3)

    def forward(self, x):
        return F.linear(self.words(x), self.words.weight)


def test_what_is_used_outside_its_layer_is_refused():
    model = Tied()
    before = weights(model)
    optimizer = ft.VS2P(model.named_parameters(), directions="per-example")
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match=r"used outside their layers, by a function, as words.weight is"):
            optimizer.step(lambda: model(torch.arange(5)).square().mean(1))
    torch.testing.assert_close(weights(model), before, rtol=1e-6, atol=1e-8)


STRANGE = {
    "functional": (Functional, "gate"),
    "layers": (
        lambda: nn.Sequential(nn.PReLU(), nn.Linear(4, 3), nn.PReLU()),
        "0.weight and 2.weight, since PReLU is not",
    ),
    "many": (
        lambda: nn.Sequential(nn.Linear(4, 4), *map(nn.PReLU, [1] * 6)),
        "1.weight, 2.weight, 3.weight, 4.weight and 2 more",
    ),
    "kinds": (lambda: nn.Sequential(nn.PReLU(), Alone()), "in 0.weight and 1.w, since PReLU and Alone are not among"),
    "rows": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Unflatten(1, (2, 2)), nn.Flatten(0, 1), nn.Linear(2, 3)),
        "10 rows",
    ),
}


def steps(optimizer, closure, count):
    for _ in range(count):
        optimizer.step(closure)


class Alone(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.w


@pytest.mark.parametrize("kind", STRANGE)
def test_what_cannot_have_lines_of_its_own_is_named(kind):
    """Before the first step."""
    make, message = STRANGE[kind]
    x, model = torch.randn(5, 4), make()
    before = weights(model)
    optimizer = ft.VS2P(model.named_parameters(), directions="per-example")
    with pytest.raises(InvalidArgumentError, match=message):
        optimizer.step(lambda: model(x).square().mean(1))
    torch.testing.assert_close(weights(model), before, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", STRANGE)
def test_where_no_lines_of_their_own_are_known_all_share_one(kind, tmp_path):
    make, message = STRANGE[kind]
    torch.manual_seed(0)
    model, x = make(), torch.randn(5, 4)
    again, calls = copy.deepcopy(model), []

    def losses(model=model):
        calls.append(model)
        return model(x).square().mean(1)

    optimizer = ft.VS2P(model.named_parameters(), directions="auto", recorder=ft.Ledger(tmp_path / "run.ledger", model))
    first = losses().mean()
    calls.clear()
    with pytest.warns(RuntimeWarning, match=f"{message}.*; all examples share common lines") as told:
        steps(optimizer, losses, 60)
    assert len(told) == 1  # when lines of their own were to be tried
    assert (optimizer.shares_lines, optimizer.auto["trial"]) == (True, None)
    assert optimizer.queries == len(calls)
    assert losses().mean() < 0.5 * first
    optimizer.recorder.close()
    assert all(record.shared for record in read(tmp_path / "run.ledger").records())
    resumed, step = ft.resume(again, tmp_path / "run.ledger")
    assert step == 60
    assert torch.equal(weights(again), weights(model))
    assert resumed.auto == optimizer.auto
    resumed.step(lambda: losses(again))
    resumed.recorder.close()
    optimizer.recorder = None
    optimizer.step(losses)
    assert torch.equal(weights(again), weights(model))


def test_a_batch_of_one_example_leaves_lines_open():
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), torch.randn(8, 4)
    optimizer = ft.VS2P(model.named_parameters(), directions="auto")
    for size in (8, 1, 8, 1, 8, 8):
        optimizer.step(lambda size=size: model(x[:size]).square().mean(1))
    assert optimizer.shares_lines
    assert optimizer.auto["trial"] is not None


def test_a_layer_that_comes_later_ends_lines_of_their_own():
    """Also where examples have had them for long."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 3), nn.PReLU().requires_grad_(False)), torch.randn(16, 4)
    optimizer = ft.VS2P(model.named_parameters(), directions="auto")
    optimizer._run = {
        **optimizer._run,
        "auto": {**auto.start("auto"), "surveyed": None, "slope": 1.0, "shared": False, "trial": None},
    }
    optimizer.step(lambda: model(x).square().mean(1))
    assert not optimizer.shares_lines
    model[1].requires_grad_(True)
    with pytest.warns(RuntimeWarning, match="since PReLU is not among .*; all examples share common lines"):
        optimizer.step(lambda: model(x).square().mean(1))
    assert optimizer.shares_lines


@pytest.mark.parametrize("directions", ["per-example", "auto"])
@pytest.mark.parametrize(
    ("reduce", "message"),
    [(torch.mean, "one loss per example"), (lambda y: y[:2, 0], "shape \\(2,\\)"), (lambda y: y, "shape \\(5, 3\\)")],
)
def test_other_losses_are_refused(reduce, message, directions):
    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    optimizer = ft.VS2P(model.parameters(), directions=directions)
    with pytest.raises(InvalidArgumentError, match=message):
        optimizer.step(lambda: reduce(model(x)))


def test_wrong_options():
    params = [nn.Parameter(torch.zeros(3))]
    with pytest.raises(InvalidArgumentError, match='directions="auto" needs lr="auto"'):
        ft.VS2P(params, lr=1.0, directions="auto")
    with pytest.raises(InvalidArgumentError, match="per-example"):
        ft.VS2P(params, directions="each")
    with pytest.raises(InvalidArgumentError, match="signs"):
        ft.VS2P(params, directions="per-example", distribution="normal")
    layer = nn.Linear(3, 2)
    optimizer = ft.S2P(layer.parameters(), step_size="dynamic", L=1.0, directions="per-example")
    with pytest.raises(InvalidArgumentError, match="probes where each line"):
        optimizer.step(lambda: layer(torch.randn(4, 3)).square().mean(1))
