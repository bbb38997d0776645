"""A ledger that is cut or changed: its sound part or a clear error, never wrong weights."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import forwardtune as ft
from forwardtune.ledger import export, read
from tests.helpers.runs import Net, check_replay, check_resume, closed_run, loss, same, weights, write

STEPS = 30


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return closed_run(tmp_path_factory.mktemp("run"), STEPS)


def test_a_journal_cut_at_any_byte_is_sound_up_to_there(run, tmp_path):
    data = run.files["run.ledger"]
    ends = set()
    for size in range(len(data)):
        if size < len(data) - 1500 and size % 37:
            continue
        (tmp_path / "run.ledger").write_bytes(data[:size])
        end = check_replay(tmp_path, run)
        if end is not None:
            ends.add(end)
            assert read(tmp_path / "run.ledger").damage is None
    assert ends >= set(range(STEPS - 8, STEPS + 1))


def test_a_run_whose_journal_was_cut_in_a_step_resumes_from_the_step_before(run, tmp_path):
    """As after a crash in the middle of a write: the other state file holds the state of the step before."""
    journal = run.files["run.ledger"]
    last = journal.rindex(b"S", 0, -80)  # inside the last records
    ends = set()
    for size in range(last - 200, len(journal)):
        write(tmp_path, run.files | {"run.ledger": journal[:size]})
        end = read(tmp_path / "run.ledger").end
        assert check_resume(tmp_path, run) == (end if end >= STEPS - 1 else None)
        ends.add(end)
    assert ends >= {STEPS - 2, STEPS - 1, STEPS}


@settings(max_examples=400, deadline=None)
@given(
    name=st.sampled_from(["run.ledger", "run.ledger", "run.ledger.state0", "run.ledger.state1"]),
    flips=st.lists(st.tuples(st.integers(0, 2**32), st.integers(0, 7)), min_size=1, max_size=3),
)
def test_flipped_bits_never_give_wrong_weights(run, tmp_path_factory, name, flips):
    folder = tmp_path_factory.mktemp("flipped")
    changed = bytearray(run.files[name])
    for at, bit in flips:
        changed[at % len(changed)] ^= 1 << bit
    write(folder, run.files | {name: bytes(changed)})
    end, step = check_replay(folder, run), check_resume(folder, run)
    if changed == run.files[name]:  # flipped back
        assert (end, step) == (STEPS, STEPS)
    elif name == "run.ledger":
        assert end is None or read(folder / name).damage
        assert step is None
    else:
        assert (end, step) == (STEPS, None if name == run.latest_state else STEPS)


@settings(max_examples=200, deadline=None)
@given(cut=st.booleans(), at=st.integers(0, 2**32), bit=st.integers(0, 7))
def test_a_changed_export_is_refused(run, tmp_path_factory, cut, at, bit):
    folder = tmp_path_factory.mktemp("changed")
    changed = bytearray(run.files["small.safetensors"])
    at %= len(changed)
    if cut:
        del changed[at:]
    else:
        changed[at] ^= 1 << bit
    write(folder, {"small.safetensors": bytes(changed)})
    assert check_replay(folder, run, "small.safetensors") is None


def test_no_bit_of_a_key_of_an_export_can_change(run, tmp_path):
    """Also of one that a run along common lines does not need."""
    data = run.files["small.safetensors"]
    at = data.index(b'"lines"')
    for byte in range(at + 1, at + 6):
        for bit in range(8):
            changed = bytearray(data)
            changed[byte] ^= 1 << bit
            write(tmp_path, {"small.safetensors": bytes(changed)})
            assert check_replay(tmp_path, run, "small.safetensors") is None


def test_damage_in_the_middle_is_reported_and_can_be_repaired(run, tmp_path):
    data = bytearray(run.files["run.ledger"])
    data[len(data) // 2] ^= 1
    write(tmp_path, run.files | {"run.ledger": bytes(data)})
    path = tmp_path / "run.ledger"
    damaged = read(path)
    assert 0 < damaged.end < STEPS
    assert "is damaged" in damaged.damage
    with pytest.raises(ft.LedgerError, match=f"its steps up to {damaged.end} are sound"):
        ft.replay(Net(), path)
    with pytest.raises(ft.LedgerError, match=r"repair=True\) resumes from step"):
        ft.resume(Net(), path)
    assert path.read_bytes() == bytes(data)
    model = Net()
    with pytest.warns(RuntimeWarning, match="generators and buffers are lost"):
        optimizer, step = ft.resume(model, path, repair=True)
    assert step == damaged.end
    assert same(weights(model.state_dict()), weights(run.states[step]))
    optimizer.step(lambda: loss(model))
    optimizer.recorder.close()
    assert read(path).end == step + 1
    assert (tmp_path / "run.ledger.damaged").read_bytes() == bytes(data)
    with pytest.warns(RuntimeWarning, match="their values are lost"):
        export(tmp_path / "run.ledger.damaged", tmp_path / "saved", until=damaged.end)
    assert read(tmp_path / "saved").end == damaged.end


def test_blocks_that_were_never_written_are_no_damage(run, tmp_path):
    write(tmp_path, run.files | {"run.ledger": run.files["run.ledger"] + bytes(4096)})
    assert read(tmp_path / "run.ledger").damage is None
    assert check_resume(tmp_path, run) == STEPS


def test_lost_states_are_reported(run, tmp_path):
    write(tmp_path, {"run.ledger": run.files["run.ledger"]})
    assert read(tmp_path / "run.ledger").end == STEPS
    with pytest.raises(ft.LedgerError, match=f"the run's state after step {STEPS} is not in"):
        ft.resume(Net(), tmp_path / "run.ledger")
    model = Net()
    with pytest.warns(RuntimeWarning, match="generators and buffers are lost"):
        _, step = ft.resume(model, tmp_path / "run.ledger", repair=True)
    assert step == STEPS
    assert same(weights(model.state_dict()), weights(run.states[-1]))
