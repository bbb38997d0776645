"""A ledger that is cut, changed, locked or has no room: the sound part or a clear error, never wrong weights."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import resource
import signal
import struct
import subprocess
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

import forwardtune as ft
from forwardtune.ledger import export, read
from forwardtune.ledger.export import _checksum
from forwardtune.ledger.fingerprint import combined, digests
from forwardtune.ledger.journal import MAGIC, Journal, frame
from forwardtune.noise import Mover
from tests.helpers.runs import Net, loss, recorded, same, snapshot

STEPS = 30


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A closed run: its files' bytes by name, the weights after each step, and the generator at the end."""
    folder = tmp_path_factory.mktemp("run")
    _, optimizer, states = recorded(folder / "run.ledger", steps=STEPS)
    generator = torch.get_rng_state()
    optimizer.recorder.close()
    export(folder / "run.ledger", folder / "small.safetensors")
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    return files, states, generator


def weights(state):
    return {name: tensor for name, tensor in state.items() if "running" not in name and "num_" not in name}


def check_replay(folder, states, name="run.ledger"):
    """Opens a changed file: its sound prefix has the run's weights; returns where it ends, or None if it is refused."""
    try:
        found = read(folder / name)
    except ft.LedgerError:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        model = ft.replay(Net(), folder / name, until=found.end)
    assert same(weights(model.state_dict()), weights(states[found.end]))
    return found.end


def check_resume(folder, states, generator):
    """A resume of a changed run is refused, or the run is as it was at its step."""
    model = Net()
    try:
        optimizer, step = ft.resume(model, folder / "run.ledger")
    except ft.LedgerError:
        return None
    optimizer.recorder.close()
    assert same(model.state_dict(), states[step])
    assert optimizer.queries == 2 * step
    if step == STEPS:
        assert torch.equal(torch.get_rng_state(), generator)
    return step


def write(folder: Path, files):
    for name, data in files.items():
        (folder / name).write_bytes(data)


def test_a_journal_cut_at_any_byte_is_sound_up_to_there(run, tmp_path):
    files, states, _ = run
    data = files["run.ledger"]
    ends = set()
    for size in range(len(data)):
        if size < len(data) - 1500 and size % 37:
            continue
        (tmp_path / "run.ledger").write_bytes(data[:size])
        end = check_replay(tmp_path, states)
        if end is not None:
            ends.add(end)
            assert read(tmp_path / "run.ledger").damage is None
    assert ends >= set(range(STEPS - 8, STEPS + 1))


def test_a_run_whose_journal_was_cut_in_a_step_goes_on_from_the_step_before(run, tmp_path):
    """As after a crash in the middle of a write: the state of the step before is in the other slot."""
    files, states, _ = run
    resumed = set()
    last = files["run.ledger"].rindex(b"S", 0, -80)  # inside the last records
    for size in range(last - 200, len(files["run.ledger"])):
        write(tmp_path, files | {"run.ledger": files["run.ledger"][:size]})
        step = check_resume(tmp_path, states, run[2])
        resumed.add(step)
    assert resumed >= {STEPS - 1, STEPS}


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_flipped_bits_never_give_wrong_weights(run, tmp_path_factory, data):
    files, states, generator = run
    folder = tmp_path_factory.mktemp("flipped")
    name = data.draw(st.sampled_from(["run.ledger", "run.ledger", "run.ledger.state0", "run.ledger.state1"]))
    changed = bytearray(files[name])
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    write(folder, files | {name: bytes(changed)})
    end = check_replay(folder, states)
    step = check_resume(folder, states, generator)
    if changed != files[name] and name == "run.ledger":
        assert end is None or end < STEPS or read(folder / name).damage  # at least the last record is not sound
        assert step is None
    elif name != "run.ledger":
        assert end == STEPS


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_changed_export_is_refused(run, tmp_path_factory, data):
    files, states, _ = run
    folder = tmp_path_factory.mktemp("changed")
    whole = files["small.safetensors"]
    changed = bytearray(whole[: data.draw(st.integers(0, len(whole)))] if data.draw(st.booleans()) else whole)
    if len(changed) == len(whole):
        changed[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    write(folder, {"small.safetensors": bytes(changed)})
    assert check_replay(folder, states, "small.safetensors") is None or bytes(changed) == whole


def test_damage_in_the_middle_is_told_and_can_be_repaired(run, tmp_path):
    files, states, _ = run
    data = bytearray(files["run.ledger"])
    data[len(data) // 2] ^= 1
    write(tmp_path, files | {"run.ledger": bytes(data)})
    path = tmp_path / "run.ledger"
    found = read(path)
    assert 0 < found.end < STEPS
    assert "is damaged" in found.damage
    with pytest.raises(ft.LedgerError, match=f"its steps up to {found.end} are sound"):
        ft.replay(Net(), path)
    with pytest.raises(ft.LedgerError, match=r"repair=True\) goes on from step"):
        ft.resume(Net(), path)
    assert path.read_bytes() == bytes(data)
    model = Net()
    with pytest.warns(RuntimeWarning, match="it goes on with those of this process"):
        optimizer, step = ft.resume(model, path, repair=True)
    assert step == found.end
    assert same(weights(model.state_dict()), weights(states[step]))
    optimizer.step(lambda: loss(model))
    optimizer.recorder.close()
    assert read(path).end == step + 1
    assert (tmp_path / "run.ledger.damaged").read_bytes() == bytes(data)
    with pytest.warns(RuntimeWarning, match="what it left in them is lost"):
        export(tmp_path / "run.ledger.damaged", tmp_path / "saved", until=found.end)
    assert read(tmp_path / "saved").end == found.end


def test_blocks_that_were_never_written_are_no_damage(run, tmp_path):
    files, states, _ = run
    write(tmp_path, files | {"run.ledger": files["run.ledger"] + bytes(4096)})
    assert read(tmp_path / "run.ledger").damage is None
    assert check_resume(tmp_path, states, run[2]) == STEPS


def test_lost_states_are_told(run, tmp_path):
    files, _, _ = run
    write(tmp_path, {"run.ledger": files["run.ledger"]})
    assert read(tmp_path / "run.ledger").end == STEPS
    with pytest.raises(ft.LedgerError, match=f"the state that it left after step {STEPS} is not in"):
        ft.resume(Net(), tmp_path / "run.ledger")
    model = Net()
    with pytest.warns(RuntimeWarning, match="it goes on with those of this process"):
        _, step = ft.resume(model, tmp_path / "run.ledger", repair=True)
    assert step == STEPS
    assert same(weights(model.state_dict()), weights(run[1][-1]))


# From strangers


def journal(header, *payloads):
    data, crc = MAGIC, 0
    for payload in (b"H\x01" + header, *payloads):
        framed, crc = frame(payload, crc)
        data += framed
    return data


def test_a_stranger_gets_an_error_and_nothing_else(run, tmp_path):
    header = json.loads(files_header(run))
    path = tmp_path / "strange"
    step = struct.pack("<9d", 0, 2, 1, 0, 0, 0, 0, 0, 0)
    cases = [
        b"",
        b"SQLite format 3\0" + bytes(100),
        b"cos\nsystem\n(S'touch /tmp/owned'\ntR.",
        MAGIC,
        MAGIC + bytes(100),
        journal(b"[" * 100_000),
        journal(b"{}"),
        journal(b"null"),
        journal(json.dumps({**header, "noise": 99}).encode()),
        journal(json.dumps({**header, "seed": -1}).encode()),
        journal(json.dumps({**header, "distribution": "../../etc/passwd"}).encode()),
        journal(json.dumps({**header, "directions": 10**9}).encode()),
        journal(json.dumps({**header, "parameters": [{**header["parameters"][0], "shape": [-1]}]}).encode()),
        journal(json.dumps({**header, "parameters": [{**header["parameters"][0], "group": 7}]}).encode()),
        journal(json.dumps({**header, "unknown": 1}).encode()),
        journal(json.dumps(header).encode(), b"S" + step[:-3]),
        journal(json.dumps(header).encode(), b"S" + struct.pack("<3d", 0, 2, 5)),
        journal(json.dumps(header).encode(), b"X"),
        journal(json.dumps(header).encode(), b"A[]"),
        journal(json.dumps(header).encode(), b'A[Infinity, "", 0]'),
        journal(json.dumps({**header, "queries": "many"}).encode()),
        journal(json.dumps({**header, "groups": [{**header["groups"][0], "settings": [1]}]}).encode()),
        journal(json.dumps({**header, "groups": [{**header["groups"][0], "memory": 3}]}).encode()),
        journal(json.dumps({**header, "groups": [{**header["groups"][0], "names": [1]}]}).encode()),
        journal(json.dumps(header).encode(), b"S" + struct.pack("<14d", 0, math.nan, *[1.0] * 6, 0, 1, 1, 0, 1, 1)),
        journal(json.dumps(header).encode(), b"S" + struct.pack("<15d", 0, 2, *[1.0] * 6, 0.5, 1, 1, 0.5, 1, 1, 1)),
        journal(json.dumps(header).encode(), b"S" + struct.pack("<15d", 99, 2, *[1.0] * 6, 0, 1, 1, 0, 1, 1, 1)),
        export_of(header, 10**13, visited=1),
        export_of(header, 10**8, visited=1),
        save({}, {"format": "forwardtune ledger", "schema": "1"}),
        save({}, {"format": "forwardtune ledger", "schema": "99"}),
        save({}),
    ]
    for case in cases:
        path.write_bytes(case)
        with pytest.raises(ft.LedgerError):
            ft.replay(Net(), path)
    with pytest.raises(ft.LedgerError, match="there is no ledger at"):
        ft.replay(Net(), tmp_path / "nowhere")


def export_of(header, steps, **columns):
    """An export that claims to have many steps, in a few bytes."""
    arrays = {f"{name}.0": np.array([value], np.uint16) for name, value in columns.items()}
    metadata = {"format": "forwardtune ledger", "schema": "1", "header": json.dumps(header), "steps": str(steps)}
    metadata |= {"columns": "{}", "anchors": "[]", "state": "[]", "buffers": "0"}
    return save(arrays, metadata | {"crc": str(_checksum(arrays, metadata))})


def files_header(run):
    data = run[0]["run.ledger"]
    size = struct.unpack_from("<I", data, len(MAGIC))[0]
    return data[len(MAGIC) + 12 + 2 : len(MAGIC) + 12 + size]


def test_a_newer_format_is_refused(run, tmp_path):
    path = tmp_path / "newer"
    framed, _ = frame(b"H\x63" + files_header(run), 0)
    path.write_bytes(MAGIC + framed)
    with pytest.raises(ft.LedgerError, match="format 99, newer than 1; install a newer forwardtune"):
        read(path)


def test_an_anchor_outside_the_run_is_ignored(run, tmp_path):
    header = json.loads(files_header(run))
    path = tmp_path / "strange"
    whole = combined(digests(p for p in Net().parameters()))
    path.write_bytes(journal(json.dumps(header).encode(), b"A" + json.dumps([-5, whole, True]).encode()))
    assert read(path).anchors == []
    assert ft.replay(Net(), path)


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


def test_two_processes_never_write_one_ledger_and_a_crash_frees_it(tmp_path):
    path = tmp_path / "run.ledger"
    process = subprocess.Popen([sys.executable, "-c", HOLD, path], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        x = {"x": torch.zeros(3)}
        assert read(path).end == 3  # anyone may look
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


def test_a_ledger_that_is_dropped_is_given_free(tmp_path):
    def drop():
        x = torch.zeros(3)
        ft.STP([x], recorder=ft.Ledger(tmp_path / "run.ledger", {"x": x})).step(lambda: (x * x).sum())

    drop()
    assert ft.resume({"x": torch.zeros(3)}, tmp_path / "run.ledger")[1] == 1


# No room


@pytest.mark.parametrize("steps", [3, 100], ids=["for states", "for the journal"])
def test_without_room_the_step_is_undone_and_the_run_goes_on_when_there_is_some(tmp_path, steps):
    """A limit on the size of files stands for a full disk: the write fails, in part or whole."""
    path = tmp_path / "run.ledger"
    model, optimizer, _ = recorded(path, steps=steps)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    state = snapshot(model)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 40, hard))
        for _ in range(2):
            with pytest.raises(ft.LedgerError, match="nothing recorded is lost; see to the disk"):
                optimizer.step(lambda: loss(model))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    drift = max((snapshot(model)[name] - state[name]).abs().max() for name in weights(state))
    assert drift < 1e-6
    assert read(path).end == steps
    assert read(path).damage is None
    assert ft.replay(Net(), path, until=steps)
    optimizer.step(lambda: loss(model))
    assert read(path).end == steps + 3
    assert same(ft.replay(Net(), path).state_dict(), model.state_dict())


@pytest.mark.parametrize("steps", [3, 4])
def test_a_step_that_could_not_be_written_leaves_the_state_of_the_one_before(tmp_path, steps):
    """Its own state was written first, in the other slot; and so is that of the step after it."""
    path = tmp_path / "run.ledger"
    model, optimizer, states = recorded(path, steps=steps)
    generator, store = torch.get_rng_state(), optimizer.recorder._store
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "_write", _no_room)
            with pytest.raises(ft.LedgerError, match="no room"):
                optimizer.step(partial(loss, model))
        store.disown()
        assert check_resume(tmp_path, states, generator) == steps
        assert torch.equal(torch.get_rng_state(), generator)
        model = Net()
        optimizer, _ = ft.resume(model, path)
        store = optimizer.recorder._store


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
    """Its states, too; and those of a run whose journal was removed are not taken for ours."""
    path = tmp_path / "run.ledger"
    model = Net()
    late = ft.VS2P(model.parameters(), recorder=ft.Ledger(path, model))
    _, optimizer, states = recorded(path, steps=5)
    generator = torch.get_rng_state()
    with pytest.raises(ft.LedgerError, match="is there already"):
        late.step(lambda: loss(model))
    optimizer.recorder.close()
    assert check_resume(tmp_path, states, generator) == 5
    slots = {file.name: file.read_bytes() for file in tmp_path.glob("*.state*")}
    path.unlink()
    _, optimizer, _ = recorded(path, steps=5, seed=1)
    optimizer.recorder.close()
    write(tmp_path, slots)
    with pytest.raises(ft.LedgerError, match="the state that it left after step 5 is not in"):
        ft.resume(Net(), path)


def test_a_checkpoint_that_cannot_be_written_does_not_end_the_run(tmp_path):
    path = tmp_path / "run.ledger"
    (tmp_path / "run.ledger.2.safetensors").mkdir()
    with pytest.warns(RuntimeWarning, match=r"run\.ledger\.2\.safetensors cannot be written .*nothing is lost"):
        model, _, _ = recorded(path, steps=5, checkpoint_every=2)
    assert (tmp_path / "run.ledger.4.safetensors").is_file()
    assert same(ft.replay(Net(), path).state_dict(), model.state_dict())


def test_a_place_that_cannot_be_written_is_told_before_the_run(tmp_path):
    with pytest.raises(ft.LedgerError, match="is not a folder that can be written"):
        ft.Ledger(tmp_path / "no" / "run.ledger", Net())
    model = Net()
    if os.path.isdir("/proc/self"):
        with pytest.raises(ft.LedgerError):
            ft.STP(model.parameters(), recorder=ft.Ledger("/proc/self/run.ledger", model)).step(lambda: loss(model))
    optimizer = ft.STP(model.parameters(), recorder=ft.Ledger(tmp_path / "run.ledger", model))
    (tmp_path / "run.ledger").write_text("mine")
    with pytest.raises(ft.LedgerError, match="is there already"):
        optimizer.step(lambda: loss(model))
    assert (tmp_path / "run.ledger").read_text() == "mine"


@pytest.mark.parametrize("where", ["append", "walk"])
def test_an_interrupt_while_a_step_is_settled_comes_after_it(tmp_path, monkeypatch, where):
    """The step is recorded, taken and counted, whether the run goes on or not."""
    path = tmp_path / "run.ledger"
    model, optimizer, _ = recorded(path, steps=5)
    owner = {"append": Journal, "walk": Mover}[where]
    original, calls = getattr(owner, where), []

    def interrupted(self, *arguments):
        calls.append(where)
        if where == "append" or len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(owner, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step(lambda: loss(model))
    assert read(path).end == optimizer.param_groups[0]["run"]["step"] == 6
    assert same(ft.replay(Net(), path).state_dict(), model.state_dict())
    optimizer.step(lambda: loss(model))
    assert same(ft.replay(Net(), path).state_dict(), model.state_dict())
    optimizer.recorder.close()
    again, step = ft.resume(Net(), path)
    assert step == 7
    assert again.state_dict()["param_groups"][0]["memory"] == optimizer.state_dict()["param_groups"][0]["memory"]


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
    journal = optimizer.recorder._store._file
    assert calls.count(journal) == synced
