"""`lr="auto"`: the survey finds the size of steps, reviews keep it right, and everything else holds as for a number."""

import copy
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import forwardtune as ft
from forwardtune import auto
from forwardtune.errors import InvalidArgumentError
from forwardtune.line import Line
from forwardtune.noise.backends.cpu_numba import CpuNumba
from forwardtune.record import LineRecord, Review, StepRecord
from tests.helpers.optimizers import loss_of, problem, weights

BOTH = pytest.mark.parametrize("method", [ft.VS2P, ft.STP])


def bowl(d=200, curvature=3.0, **options):
    """`c/2 |x|^2` along absolute directions, whose best step is known: `abs(gamma)/(c d)`."""
    x = torch.full((d,), 0.7, dtype=torch.float64)
    optimizer = ft.VS2P([x], lr="auto", scale="absolute", **options)
    return x, optimizer, lambda: curvature / 2 * x @ x


@pytest.mark.parametrize("start", [1e-4, 1e-2, 1.0])
def test_the_survey_finds_half_the_best_step(monkeypatch, start):
    monkeypatch.setattr(auto, "START", start)
    x, optimizer, loss = bowl()
    before, slopes = x.clone(), []
    while auto.is_surveying(optimizer.auto):
        optimizer.step(loss)
        slopes.append(abs(optimizer.last_step.gamma))
    best = sum(slopes[-4:]) / 4 / (3.0 * 200)
    assert optimizer.auto["r"] == pytest.approx(best / 2, rel=1e-6)
    assert torch.allclose(x, before, rtol=0, atol=1e-12)  # a survey does not move
    assert optimizer.queries == 3 * optimizer.steps


def test_a_survey_comes_nearer_where_losses_are_not_finite():
    x = torch.full((50,), 0.5, dtype=torch.float64)
    optimizer = ft.VS2P([x], lr="auto", scale="absolute")

    def loss():
        return torch.tensor(math.inf) if (x - 0.5).abs().max() > 5e-3 else (x * x).sum()

    with pytest.warns(RuntimeWarning, match="Step not taken"):
        optimizer.step(loss)
    assert optimizer.auto["r"] == pytest.approx(1e-3)
    for _ in range(6):  # it does not go out to the wall again
        optimizer.step(loss)
    assert not auto.is_surveying(optimizer.auto)
    assert optimizer.auto["r"] <= 1e-3


def test_a_line_without_curvature_has_no_size_out_of_rounding():
    for seed in range(6):
        x, c = torch.ones(40), torch.randn(40, generator=torch.Generator().manual_seed(seed))
        optimizer = ft.VS2P([x], lr="auto", seed=seed)
        while auto.is_surveying(optimizer.auto):
            optimizer.step(lambda x=x, c=c: x @ c)
        assert optimizer.auto["r"] <= 0.5


def test_a_step_that_is_not_taken_halves_the_size():
    """A barrier from which every run would otherwise bounce to its end."""
    x = torch.ones(20, dtype=torch.float64)
    optimizer = ft.VS2P([x], lr="auto", scale="absolute")
    for _ in range(600):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            optimizer.step(lambda: (x - 0.05 * x.log()).sum())
    assert (x > 0).all()
    assert float(x.sum()) < 6


def test_an_error_rate_does_not_stay_on_its_plateau():
    """Flat steps make the size larger until a difference is seen."""
    x = torch.zeros(30)
    optimizer = ft.VS2P([x], lr="auto", scale="absolute")
    goal = torch.randn(30, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for _ in range(400):
            optimizer.step(lambda: ((x - goal).abs() > 0.5).float().mean())
    assert optimizer.plateaus < 200
    assert ((x - goal).abs() > 0.5).float().mean() < 0.5


def test_a_group_that_is_added_is_not_part_of_a_review_of_steps_before():
    model, loss = problem()
    optimizer = ft.VS2P(list(model.parameters())[:2], lr="auto")
    while len(optimizer.auto["trail"]) < 7:
        optimizer.step(loss)
    optimizer.add_param_group({"params": list(model.parameters())[2:]})
    assert (optimizer.auto["trail"], optimizer.auto["since"]) == ((), 0)
    for _ in range(25):
        optimizer.step(loss)
    assert optimizer.auto["reviews"] >= 2
    frozen = list(model.parameters())[3]
    frozen.requires_grad_(False)
    optimizer.step(loss)
    assert len(optimizer.auto["trail"]) == 1


@pytest.mark.parametrize(
    ("losses", "r"),
    [  # at 0.1, 0.1 and 0; curvatures of either sign, as on a few texts, and the same that agree
        ([(0.438, 0.232, 0.365), (0.496, 0.440, 0.567), (0.520, 0.513, 0.342), (0.347, 0.594, 0.500)], 0.1),
        ([(0.438, 0.232, 0.330), (0.496, 0.440, 0.463), (0.520, 0.513, 0.5115), (0.347, 0.594, 0.4655)], 0.3225),
    ],
)
def test_where_curvatures_disagree_a_run_begins_no_further_out_than_it_surveyed(losses, r):
    state = {**auto.start(), "r": 0.1}
    for step, three in enumerate(losses):
        line = LineRecord((0.1, -0.1, 0.0), three, 0.0)
        state = auto.after_step(state, StepRecord.of(step, [(line,)], queries=3 * step + 3, taken=True))
    assert not auto.is_surveying(state)
    assert state["r"] == pytest.approx(r, rel=0.01)


def test_a_survey_of_a_plateau_ends_where_it_began():
    x = torch.ones(30)
    optimizer = ft.VS2P([x], lr="auto")
    for _ in range(12):
        optimizer.step(lambda: 1.0)
    assert not auto.is_surveying(optimizer.auto)
    assert optimizer.auto["r"] == auto.START
    assert torch.equal(x, torch.ones(30))


def test_a_review_compares_the_start_of_the_trail_with_twice_its_length():
    x, optimizer, loss = bowl()
    while not auto.is_review_due(optimizer.auto):
        optimizer.step(loss)
    trail = optimizer.auto["trail"]
    moved = sum(torch.stack([offsets[0][0] * optimizer.field.values(step, 0, 0, 0, 200) for step, offsets, _ in trail]))
    now = x.clone()
    expected = [1.5 * (p @ p).item() for p in (now - moved, now + moved)]
    optimizer.step(loss)
    review = optimizer.last_step.review
    assert (review.before, review.beyond) == pytest.approx(expected, rel=1e-9)
    assert review.steps == auto.SPAN
    assert optimizer.queries == optimizer.last_step.queries


def test_a_review_is_three_passes_over_the_weights(monkeypatch):
    """Back along ten lines and forth again is one pass, whatever the number of steps."""
    _, optimizer, loss = bowl()
    while not auto.is_review_due(optimizer.auto):
        optimizer.step(loss)
    passes, move = [], CpuNumba.move
    monkeypatch.setattr(CpuNumba, "move", lambda self, moves: (passes.append(len(moves)), move(self, moves)))
    optimizer.step(loss)
    assert passes == [2 * auto.SPAN] * 3 + [1] * 3


def test_on_a_parabola_it_is_nearly_as_good_as_exact_steps():
    """A perfect step along a random line leaves, on average, `1 - 1/d` of the loss."""
    _, optimizer, loss = bowl(d=400)
    first = float(loss())
    for _ in range(800):
        optimizer.step(loss)
    perfect = first * (1 - 1 / 400) ** 800
    assert perfect < float(loss()) < 1.5 * perfect


def test_a_review_by_hand():
    state = {**auto.start(), "surveyed": None, "r": 1.0}
    shorter = auto.after_review(state, Review(10, 1.0, 2.0))
    assert shorter["r"] == pytest.approx(math.exp(-0.3))
    longer = auto.after_review(shorter, Review(10, 2.0, 1.5))  # half the median of 1 and 0.5 is less than one
    assert longer["r"] == pytest.approx(math.exp(-0.3) * math.exp(0.3 / math.sqrt(1.1) * 0.5 / 0.75))
    assert auto.after_review(longer, Review(10, 2.0, math.inf))["r"] < longer["r"]
    assert auto.after_review(longer, Review(10, math.nan, math.nan))["r"] == longer["r"]
    assert auto.after_review(longer, Review(10, 1.0, 1.0))["r"] == longer["r"]
    assert auto.after_review(longer, None) is longer


@BOTH
def test_a_rescaled_loss_changes_nothing(method):
    """Of a power of two not even the rounding."""
    runs = []
    for factor in (1.0, 2.0**-10, 2.0**10):
        model, loss = problem(torch.float64)
        optimizer = method(model.parameters(), lr="auto")
        for _ in range(60):
            optimizer.step(lambda loss=loss, factor=factor: loss() * factor)
        runs.append(weights(model))
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])


@BOTH
def test_reviews_cost_less_than_a_tenth(method):
    model, loss = problem()
    optimizer = method(model.parameters(), lr="auto")
    for _ in range(400):
        optimizer.step(loss)
    plain = 400 * (3 if method is ft.STP else 2)
    assert plain < optimizer.queries < plain / 0.9


@BOTH
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("stop", [1, 27])
def test_a_run_resumed_from_a_state_equals_one_that_was_not_stopped(method, directions, stop):
    model, loss = problem()
    groups = [{"params": list(model.parameters())[:2], "lr": 0.5}, {"params": list(model.parameters())[2:]}]
    optimizer = method(groups, lr="auto", directions=directions)
    for step in range(55):
        if step == stop:
            other = copy.deepcopy(model)
            state = copy.deepcopy(optimizer.state_dict())
            generator = torch.get_rng_state()
        optimizer.step(loss)
    other_groups = [{"params": list(other.parameters())[:2]}, {"params": list(other.parameters())[2:]}]
    again = method(other_groups, lr="auto", directions=directions)
    again.load_state_dict(state)
    torch.set_rng_state(generator)
    for _ in range(stop, 55):
        again.step(loss_of(other))
    assert torch.equal(weights(other), weights(model))
    assert again.auto == optimizer.auto


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_closure_that_raises_during_a_review(failing, tmp_path):
    """The weights come back, the step is counted as raised, and the ledger replays it."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    base = copy.deepcopy(model)
    x, y = torch.randn(30, 6), torch.randint(0, 3, (30,))
    ledger = ft.Ledger(tmp_path / "run.ledger", model)
    optimizer = ft.VS2P(model.named_parameters(), lr="auto", recorder=ledger)
    while not auto.is_review_due(optimizer.auto):
        optimizer.step(lambda: F.cross_entropy(model(x), y))
    before = weights(model)
    calls = iter(range(1, 10))

    def broken():
        if next(calls) == failing:
            raise RuntimeError("the batch is broken")
        return F.cross_entropy(model(x), y)

    with pytest.raises(RuntimeError, match="the batch is broken"):
        optimizer.step(broken)
    assert torch.allclose(weights(model), before, rtol=0, atol=1e-6)
    for _ in range(25):
        optimizer.step(lambda: F.cross_entropy(model(x), y))
    ledger.close()
    replayed = ft.replay(copy.deepcopy(base), tmp_path / "run.ledger")
    assert all(torch.equal(a, b) for a, b in zip(replayed.parameters(), model.parameters(), strict=True))
    again = copy.deepcopy(base)
    resumed, step = ft.resume(again, tmp_path / "run.ledger")
    assert (step, resumed.auto) == (optimizer.steps, optimizer.auto)
    resumed.recorder.close()


def test_an_interrupt_before_a_review_moves_anything(tmp_path, monkeypatch):
    model, loss = problem()
    base = copy.deepcopy(model)
    optimizer = ft.VS2P(model.named_parameters(), lr="auto", recorder=ft.Ledger(tmp_path / "run.ledger", model))
    while not auto.is_review_due(optimizer.auto):
        optimizer.step(loss)

    def interrupted(line, part):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Line, "goto_along", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step(loss)
    for _ in range(15):
        optimizer.step(loss)
    optimizer.recorder.close()
    assert torch.equal(weights(ft.replay(copy.deepcopy(base), tmp_path / "run.ledger")), weights(model))


def test_a_ledger_that_begins_in_the_middle_knows_the_trail(tmp_path):
    model, loss = problem()
    optimizer = ft.VS2P(model.named_parameters(), lr="auto")
    while len(optimizer.auto["trail"]) < 6:
        optimizer.step(loss)
    base = copy.deepcopy(model)
    optimizer.recorder = ft.Ledger(tmp_path / "run.ledger", model)
    for _ in range(30):
        optimizer.step(loss)
    optimizer.recorder.close()
    replayed = ft.replay(copy.deepcopy(base), tmp_path / "run.ledger")
    assert torch.equal(weights(replayed), weights(model))
    ft.ledger.export(tmp_path / "run.ledger", tmp_path / "small.safetensors")
    replayed = ft.replay(copy.deepcopy(base), tmp_path / "small.safetensors")
    assert torch.equal(weights(replayed), weights(model))
    resumed, _ = ft.resume(copy.deepcopy(base), tmp_path / "run.ledger")
    assert resumed.auto == optimizer.auto
    resumed.recorder.close()


def test_an_lr_beside_auto_is_a_factor():
    model, loss = problem()
    optimizer = ft.VS2P(model.parameters(), lr="auto")
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.25)
    while auto.is_surveying(optimizer.auto):
        optimizer.step(loss)
    optimizer.step(loss)
    scheduler.step()
    step, r = optimizer.last_step, optimizer.auto["r"]
    assert abs(step.t) == pytest.approx(0.25 * r / (3 * step.sigma / abs(step.gamma) + 1))
    assert step.offsets == pytest.approx((r, -r))


def test_methods_without_a_size_to_find():
    with pytest.raises(InvalidArgumentError, match="S2P has no lr='auto'; give it a number"):
        ft.S2P([torch.ones(3)], lr="auto", step_size="dynamic", L=1.0)
    with pytest.raises(InvalidArgumentError, match="pass lr='auto' to VS2P; the lr of a group is a number"):
        ft.VS2P([{"params": [torch.ones(3)], "lr": "auto"}], lr=1.0)
    with pytest.raises(InvalidArgumentError, match="leave rho out of the groups"):
        ft.VS2P([{"params": [torch.ones(3)], "rho": 0.1}], lr="auto")
    with pytest.raises(InvalidArgumentError, match="leave rho out, or give an lr"):
        ft.VS2P([torch.ones(3)], lr="auto", rho=0.1)
    with pytest.raises(InvalidArgumentError, match="lr must be a number, zero or above and finite, not 'best'"):
        ft.VS2P([torch.ones(3)], lr="best")


def test_a_network_learns_digits_from_scratch_with_nothing_chosen():
    """The README's quick start: at least three quarters right after 1,000 steps."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    torch.manual_seed(0)
    order = torch.randperm(len(y))
    train, test = order[:1400], order[1400:]
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = ft.VS2P(model.parameters(), lr="auto")
    for _ in range(1000):
        batch = train[torch.randint(len(train), (64,))]
        optimizer.step(lambda batch=batch: F.cross_entropy(model(x[batch]), y[batch]))
    right = (model(x[test]).argmax(1) == y[test]).float().mean()
    assert right >= 0.75
