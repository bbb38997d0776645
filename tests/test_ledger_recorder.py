"""What a ledger records, what it refuses to record, and one writer at a time."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time

import pytest
import torch

import forwardtune as ft
from forwardtune.ledger import read
from forwardtune.ledger.journal import Journal
from forwardtune.noise import Mover
from tests.helpers.runs import Net, loss, recorded, same, weights


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.ledger"


def test_what_the_ledger_cannot_describe_is_refused_and_nothing_is_lost(path, tmp_path):
    model, optimizer, states = recorded(path, steps=3)
    with pytest.raises(ft.LedgerError, match=r"already exists; resume it by ft\.resume"):
        ft.Ledger(path, model)
    with pytest.raises(ft.InvalidArgumentError, match="parameter 0 of group 0 is not a parameter of the model"):
        ft.MeZO(Net().parameters(), recorder=ft.Ledger(tmp_path / "b", model)).step(lambda: 0.0)
    other = ft.MeZO(model.parameters(), recorder=optimizer.recorder)
    with pytest.raises(ft.LedgerError, match="records another optimizer"):
        other.step(lambda: loss(model))
    early = copy.deepcopy(optimizer.state_dict())
    optimizer.step(lambda: loss(model))
    optimizer.load_state_dict(early)
    with pytest.raises(ft.LedgerError, match=r"up to step 4, and the optimizer makes step 3"):
        optimizer.step(lambda: loss(model))
    assert read(path).end == 4
    with pytest.warns(RuntimeWarning, match="known after step 4 only"):
        assert same(weights(ft.replay(Net(), path, until=3).state_dict()), weights(states[3]))


def test_a_closed_ledger_is_closed(path):
    model, optimizer, _ = recorded(path, steps=3)
    optimizer.recorder.close()
    with pytest.raises(ft.LedgerError, match=r"is closed; resume it by ft\.resume"):
        optimizer.step(lambda: loss(model))


def test_freezing_a_parameter_in_the_middle_is_refused(path):
    model, optimizer, _ = recorded(path, steps=3)
    model.last.bias.requires_grad_(False)
    with pytest.raises(ft.LedgerError, match=r"at step 3 parameters were added, frozen"):
        optimizer.step(lambda: loss(model))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"fsync": 0}, "fsync must be an integer of at least 1"),
        ({"fsync": "always"}, "fsync must be 'timed', 'never' or a number of steps"),
        ({"checkpoint_every": 0}, "checkpoint_every must be an integer of at least 1"),
    ],
)
def test_bad_settings_are_refused(path, settings, complaint):
    with pytest.raises(ft.InvalidArgumentError, match=complaint):
        ft.Ledger(path, Net(), **settings)


def test_a_model_without_names_is_refused(path):
    with pytest.raises(ft.InvalidArgumentError, match="a dict of its tensors by name, not list"):
        ft.Ledger(path, [torch.zeros(2)])


def test_a_copy_of_the_optimizer_records_nothing(path):
    _, optimizer, _ = recorded(path, steps=3)
    assert copy.deepcopy(optimizer).recorder is None
    assert pickle.loads(pickle.dumps(optimizer)).recorder is None


def test_a_rate_that_is_a_tensor_is_refused(path):
    model = Net()
    optimizer = ft.VS2P(model.parameters(), lr=torch.tensor(1.0), recorder=ft.Ledger(path, model))
    with pytest.raises(ft.InvalidArgumentError, match="lr of group 0 is a tensor"):
        optimizer.step(lambda: loss(model))


@pytest.mark.parametrize("recorder", ["run.ledger", ft.Ledger, 3])
def test_something_else_than_a_recorder_is_refused_at_once(recorder):
    with pytest.raises(ft.InvalidArgumentError, match="recorder must be a Recorder"):
        ft.STP(Net().parameters(), recorder=recorder)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(ft.LedgerError, match="is not a folder you can write to"):
        ft.Ledger(tmp_path / "no" / "run.ledger", Net())
    model = Net()
    if os.path.isdir("/proc/self"):
        with pytest.raises(ft.LedgerError, match=r"/proc/.*/run\.ledger cannot be created"):
            ft.STP(model.parameters(), recorder=ft.Ledger("/proc/self/run.ledger", model)).step(lambda: loss(model))
    optimizer = ft.STP(model.parameters(), recorder=ft.Ledger(tmp_path / "run.ledger", model))
    (tmp_path / "run.ledger").write_text("mine")
    with pytest.raises(ft.LedgerError, match="already exists"):
        optimizer.step(lambda: loss(model))
    assert (tmp_path / "run.ledger").read_text() == "mine"


def test_a_checkpoint_that_cannot_be_written_does_not_end_the_run(tmp_path):
    path = tmp_path / "run.ledger"
    (tmp_path / "run.ledger.2.safetensors").mkdir()
    with pytest.warns(RuntimeWarning, match=r"run\.ledger\.2\.safetensors cannot be written .*nothing is lost"):
        model, _, _ = recorded(path, steps=5, checkpoint_every=2)
    assert (tmp_path / "run.ledger.4.safetensors").is_file()
    assert same(ft.replay(Net(), path).state_dict(), model.state_dict())


@pytest.mark.parametrize("method", ["append", "move"])
def test_an_interrupt_while_a_step_is_settled_comes_after_it(tmp_path, monkeypatch, method):
    """The step is recorded, taken and counted, whether or not the run continues."""
    path = tmp_path / "run.ledger"
    model, optimizer, _ = recorded(path, steps=5)
    owner = {"append": Journal, "move": Mover}[method]
    original, calls = getattr(owner, method), []

    def interrupted(self, *arguments):
        calls.append(method)
        if method == "append" or len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step(lambda: loss(model))
    assert read(path).end == optimizer.steps == 6
    assert same(ft.replay(Net(), path).state_dict(), model.state_dict())
    optimizer.step(lambda: loss(model))
    assert same(ft.replay(Net(), path).state_dict(), model.state_dict())
    optimizer.recorder.close()
    again, step = ft.resume(Net(), path)
    assert step == 7
    assert again.state_dict()["param_groups"][0]["memory"] == optimizer.state_dict()["param_groups"][0]["memory"]


# One writer


HOLD = """
import sys, time, torch, forwardtune as ft
x = torch.zeros(3)
optimizer = ft.STP([x], recorder=ft.Ledger(sys.argv[1], {"x": x}))
for _ in range(3):
    optimizer.step(lambda: (x * x).sum())
print("ready", flush=True)
time.sleep(60)
"""


def test_two_processes_never_write_one_ledger_and_a_crash_releases_it(tmp_path):
    path = tmp_path / "run.ledger"
    process = subprocess.Popen([sys.executable, "-c", HOLD, path], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        x = {"x": torch.zeros(3)}
        assert read(path).end == 3  # anyone may read it
        with pytest.raises(ft.LedgerError, match="is being written by another run"):
            ft.resume(x, path)
        assert torch.equal(x["x"], torch.zeros(3))
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    optimizer, step = ft.resume(x, path)
    assert step == 3
    with pytest.raises(ft.LedgerError, match="is being written by another run"):
        ft.resume({"x": torch.zeros(3)}, path)
    optimizer.recorder.close()
    ft.resume({"x": torch.zeros(3)}, path)


def _in_child(optimizer, x, results):
    try:
        optimizer.step(lambda: (x * x).sum())
        results.put("written")
    except ft.LedgerError as error:
        results.put(str(error))


def test_a_forked_child_writes_nothing_and_holds_no_lock(tmp_path):
    x = torch.zeros(3)
    optimizer = ft.STP([x], recorder=ft.Ledger(tmp_path / "run.ledger", {"x": x}))
    optimizer.step(lambda: (x * x).sum())
    before = (tmp_path / "run.ledger").read_bytes()
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=_in_child, args=(optimizer, x, results))
    child.start()
    assert "forked" in results.get()
    child.join()
    assert (tmp_path / "run.ledger").read_bytes() == before
    lingering = context.Process(target=time.sleep, args=(60,))
    lingering.start()
    try:
        optimizer.step(lambda: (x * x).sum())
        optimizer.recorder.close()
        assert ft.resume({"x": torch.zeros(3)}, tmp_path / "run.ledger")[1] == 2
    finally:
        lingering.kill()
        lingering.join()


def test_a_ledger_that_is_dropped_releases_its_file(tmp_path):
    def drop():
        x = torch.zeros(3)
        ft.STP([x], recorder=ft.Ledger(tmp_path / "run.ledger", {"x": x})).step(lambda: (x * x).sum())

    drop()
    assert ft.resume({"x": torch.zeros(3)}, tmp_path / "run.ledger")[1] == 1
