"""Steps that did damage are undone: when, how far, and that ledgers know."""

import copy
import math
import warnings
from contextlib import suppress

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forwardtune as ft
from forwardtune import auto
from forwardtune.ledger import export, read
from forwardtune.record import Review
from tests.helpers.optimizers import weights


def test_what_counts_as_damage():
    """These losses differ by 1 on average; the trail began at 5."""
    state = {**auto.start(), "losses": (4.0, 5.0, 4.0, 5.0, 4.9, 7.0, 8.9, 9.1, 9.2), "trail": (None,) * 6}
    differences = (1, 1, 1, 0.1, 2.1, 1.9, 0.2, 0.1)
    assert sum(differences) / 8 == pytest.approx(0.925)
    assert auto.is_damage(state, 5.0, 9.0)
    assert auto.is_damage(state, 1.0, math.nan)
    assert not auto.is_damage(state, 5.0, 8.6)  # going on does not make it much worse
    assert not auto.is_damage(state, math.nan, 9.0)
    assert not auto.is_damage({**state, "trail": (None,) * 4}, 5.0, 9.0)  # the last four did not raise it so far
    assert auto.is_damage({**state, "losses": (*state["losses"][2:], math.inf, math.inf)}, 5.0, math.inf)
    assert not auto.is_damage({**state, "losses": (math.inf,) * 9}, 5.0, math.inf)  # nothing to compare with


def test_what_a_retreat_leaves():
    state = {**auto.start(), "surveyed": None, "r": 1.0, "since": 10, "trail": ((3, ((0.1,),)),), "losses": (1.0, 2.0)}
    after = auto.after_review(state, Review(1, 1.0, 9.0, back=True))
    assert after == {**state, "r": 0.25, "since": 0, "trail": (), "losses": (), "reviews": 1}


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    x = torch.randn(60, 6)
    y = x[:, :3].argmax(1)
    return model, lambda: F.cross_entropy(model(x), y)


@pytest.mark.parametrize("method", [ft.VS2P, ft.MeZO])
def test_a_scheduler_gone_mad_is_survived(method, tmp_path):
    """The steps that it made far too long are undone, and the ledger replays, exports and resumes."""
    model, loss = network()
    base = copy.deepcopy(model)
    optimizer = method(model.named_parameters(), lr="auto", recorder=ft.Ledger(tmp_path / "run.ledger", model))
    losses, backs = [], []
    for step in range(120):
        due = auto.is_review_due(optimizer.auto)
        optimizer.param_groups[0]["lr"] = 100.0 if 60 < step <= 70 and not due else 1.0
        losses.append(loss().item())
        optimizer.step(loss)
        if optimizer.last_step.review and optimizer.last_step.review.back:
            backs.append(step)
    optimizer.recorder.close()
    assert max(losses[60:80]) > 3 * losses[60]
    assert backs
    assert all(60 < step < 90 for step in backs)
    assert loss().item() < 1.1 * losses[60]

    assert torch.equal(weights(ft.replay(copy.deepcopy(base), tmp_path / "run.ledger")), weights(model))
    export(tmp_path / "run.ledger", tmp_path / "small.ledger")
    assert torch.equal(weights(ft.replay(copy.deepcopy(base), tmp_path / "small.ledger")), weights(model))
    assert [r.step for r in read(tmp_path / "small.ledger").records() if r.review and r.review.back] == backs
    again = copy.deepcopy(base)
    resumed, step = ft.resume(again, tmp_path / "run.ledger")
    resumed.recorder.close()
    assert (step, resumed.auto) == (optimizer.steps, optimizer.auto)
    assert torch.equal(weights(again), weights(model))


def test_weights_from_which_no_loss_is_finite_are_left():
    """A region where the loss is not finite, entered by one long step, does not end the run."""
    x = torch.full((50,), 1.0, dtype=torch.float64)
    optimizer = ft.VS2P([x], lr="auto")

    def loss():
        return x @ x if x @ x < 100 else torch.tensor(math.nan)

    for step in range(60):
        optimizer.param_groups[0]["lr"] = 1e4 if step == 20 else 1.0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            optimizer.step(loss)
    assert loss().item() < 50
    assert optimizer.nonfinite == 0


def test_a_run_that_begins_with_exceptions():
    """Steps that raised have no loss, and are part of the trail all the same."""
    model, loss = network()
    optimizer = ft.VS2P(model.parameters(), lr="auto")
    while auto.is_surveying(optimizer.auto):
        optimizer.step(loss)
    for step in range(60):
        with suppress(ZeroDivisionError):
            optimizer.step((lambda: 1 / 0) if step % 3 == 0 else loss)
    assert optimizer.auto["reviews"] > 1
