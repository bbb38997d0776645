"""A full or failing disk: the step is undone, nothing recorded is lost."""

from __future__ import annotations

import resource
from functools import partial

import pytest
import torch

import forwardtune as ft
from forwardtune.ledger import read
from tests.helpers.runs import ClosedRun, Net, check_resume, loss, recorded, same, snapshot, weights, write


@pytest.mark.parametrize("steps", [3, 100], ids=["for states", "for the journal"])
def test_on_a_full_disk_the_step_is_undone_and_the_run_continues_when_there_is_room(tmp_path, steps):
    """A limit on the size of files stands for a full disk: the write fails, in part or whole."""
    path = tmp_path / "run.ledger"
    model, optimizer, _ = recorded(path, steps=steps)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    state = snapshot(model)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 40, hard))
        for _ in range(2):
            with pytest.raises(ft.LedgerError, match="nothing recorded is lost; make room on the disk"):
                optimizer.step(lambda: loss(model))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    drift = max((snapshot(model)[name] - state[name]).abs().max() for name in weights(state))
    assert drift < 1e-6
    assert read(path).end == steps
    assert read(path).damage is None
    assert same(ft.replay(Net(), path, until=steps).state_dict(), state)
    optimizer.step(lambda: loss(model))
    assert read(path).end == steps + 3
    assert same(ft.replay(Net(), path).state_dict(), model.state_dict())


@pytest.mark.parametrize("steps", [3, 4])
def test_a_step_that_could_not_be_written_leaves_the_state_of_the_one_before(tmp_path, steps):
    """Its own state was written first, to the other state file, and so is that of the step after it."""
    path = tmp_path / "run.ledger"
    model, optimizer, states = recorded(path, steps=steps)
    run, journal = ClosedRun({}, states, torch.get_rng_state(), ""), optimizer.recorder._journal
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(journal, "_write", _no_room)
            with pytest.raises(ft.LedgerError, match="no room"):
                optimizer.step(partial(loss, model))
        journal.disown()
        assert check_resume(tmp_path, run) == steps
        assert torch.equal(torch.get_rng_state(), run.generator)
        model = Net()
        optimizer, _ = ft.resume(model, path)
        journal = optimizer.recorder._journal


def _no_room(*arguments):
    raise ft.LedgerError("no room")


def test_a_sync_that_fails_undoes_the_step(tmp_path, monkeypatch):
    path = tmp_path / "run.ledger"
    model, optimizer, _ = recorded(path, steps=3, fsync=1)

    def broken(descriptor):
        raise OSError("Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("forwardtune.ledger.journal.os.fsync", broken)
        with pytest.raises(ft.LedgerError, match="cannot be forced to the disk"):
            optimizer.step(lambda: loss(model))
    assert read(path).end == 3
    optimizer.step(lambda: loss(model))
    assert read(path).end == 5
    assert same(ft.replay(Net(), path).state_dict(), model.state_dict())


def test_another_run_of_that_name_is_left_alone(tmp_path):
    """And so are its states; those of a run whose journal was removed are not taken for ours."""
    path = tmp_path / "run.ledger"
    model = Net()
    late = ft.VS2P(model.parameters(), recorder=ft.Ledger(path, model))
    _, optimizer, states = recorded(path, steps=5)
    run = ClosedRun({}, states, torch.get_rng_state(), "")
    with pytest.raises(ft.LedgerError, match="already exists"):
        late.step(lambda: loss(model))
    optimizer.recorder.close()
    assert check_resume(tmp_path, run) == 5
    states = {file.name: file.read_bytes() for file in tmp_path.glob("*.state*")}
    path.unlink()
    _, optimizer, _ = recorded(path, steps=5, seed=1)
    optimizer.recorder.close()
    write(tmp_path, states)
    with pytest.raises(ft.LedgerError, match="the run's state after step 5 is not in"):
        ft.resume(Net(), path)


@pytest.mark.parametrize(("policy", "synced"), [(1, 12), (5, 2), ("never", 0), ("timed", 3)])
def test_policies_sync_when_they_say(tmp_path, monkeypatch, policy, synced):
    calls, now = [], [0.0]
    monkeypatch.setattr("forwardtune.ledger.journal.time.monotonic", lambda: now[0])
    x = torch.zeros(3)
    optimizer = ft.STP([x], recorder=ft.Ledger(tmp_path / "run.ledger", {"x": x}, fsync=policy))
    optimizer.step(lambda: (x * x).sum())
    monkeypatch.setattr("forwardtune.ledger.journal.os.fsync", calls.append)
    for _ in range(12):
        now[0] += 1.5
        optimizer.step(lambda: (x * x).sum())
    journal = optimizer.recorder._journal._file
    assert calls.count(journal) == synced
