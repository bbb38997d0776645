"""Reading, exporting and comparing ledgers, and replaying from file to file."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file as load_columns
from safetensors.torch import load_file, save_file

import forwardtune as ft
from forwardtune.ledger import diff, export, read, replay_file
from tests.helpers.runs import METHODS, Net, loss, recorded, same

GOLDEN = Path(__file__).with_name("data")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.ledger"


def test_both_kinds_of_file_are_read_alike(path, tmp_path):
    _, optimizer, _ = recorded(path, steps=5)
    live = ft.ledger.read(path)
    assert (live.writing, live.end, live.damage) == (True, 5, None)
    optimizer.recorder.close()
    export(path, tmp_path / "small")
    for run in (ft.ledger.read(path), ft.ledger.read(str(tmp_path / "small"))):
        assert isinstance(run, ft.ledger.RecordedRun)
        assert repr(run) == "<RecordedRun of VS2P, steps 0 to 4>"
        assert (run.header, run.end, run.state_end, run.writing) == (live.header, 5, 5, False)
        assert [anchor.step for anchor in run.anchors] == [5]
        assert [record.path() for record in run.records()] == [live.record(step).path() for step in range(5)]
        assert [record.queries for record in run.records(1, 3)] == [4, 6]
    with pytest.raises(ft.InvalidArgumentError, match="pass the path of a ledger, not a int"):
        ft.ledger.read(3)
    with pytest.raises(ft.LedgerError, match="is a folder, not a ledger"):
        ft.ledger.read(tmp_path)


def test_the_old_name_of_a_recorded_run_warns():
    with pytest.warns(DeprecationWarning, match=r"forwardtune\.ledger\.Run is deprecated .* use .*RecordedRun"):
        assert ft.ledger.Run is ft.ledger.RecordedRun
    with pytest.raises(AttributeError, match="has no attribute 'Walk'"):
        _ = ft.ledger.Walk


def test_ten_thousand_steps_export_to_160_kilobytes(tmp_path, path):
    """With as many tensors as GPT-2 has."""
    tensors = {f"transformer.h.{i}.attn.c_attn.weight": torch.randn(8, 16) for i in range(148)}
    optimizer = ft.VS2P(tensors.values(), lr=1.0, recorder=ft.Ledger(path, tensors))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10_000)
    numbers = iter(np.random.default_rng(0).normal(size=20_000).tolist())
    for _ in range(10_000):
        optimizer.step(lambda: next(numbers))
        scheduler.step()
    export(path, tmp_path / "small.safetensors")
    assert (tmp_path / "small.safetensors").stat().st_size <= 160_000


@pytest.mark.parametrize("method", METHODS)
def test_an_export_takes_at_most_16_bytes_per_step(tmp_path, path, method):
    """And 24 where the distance of probes changes."""
    recorded(path, method, steps=400, groups=False)
    sizes = []
    for until in (200, 400):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            export(path, tmp_path / f"{until}", until=until)
        sizes.append(sum(a.nbytes for n, a in load_columns(tmp_path / f"{until}").items() if "state" not in n))
    assert sizes[1] - sizes[0] <= (24 if "auto" in method else 16) * 200


def test_an_export_is_plain_columns(tmp_path, path):
    _, optimizer, _ = recorded(path, "STP", steps=30)
    export(path, tmp_path / "small.safetensors")
    columns = load_columns(tmp_path / "small.safetensors")
    records = list(read(path).records(0, 30))
    assert columns["probe.0.0.0"].tolist() == [record.offsets[0] for record in records]
    assert columns["probe.0.1.0"].tolist() == [-1]
    factors = columns["t.0.0"]
    assert factors.dtype == np.int8
    assert (factors * columns["probe.0.0.0"]).tolist() == [record.t for record in records]
    assert np.allclose(columns["loss"], [record.loss for record in records])
    with pytest.raises(ft.LedgerError, match="already exists"):
        export(path, tmp_path / "small.safetensors")
    assert optimizer.queries == read(tmp_path / "small.safetensors").record(29).queries


def test_runs_are_compared(tmp_path, path):
    a, b, c = (tmp_path / name for name in "abc")
    recorded(a, steps=20)
    recorded(b, steps=20)
    assert not diff(a, b)
    recorded(c, steps=15)
    assert diff(a, c).ends == (20, 15)
    assert diff(a, c).step is None
    recorded(path, steps=20, closure=lambda step, model: loss(model) * (2 if step == 12 else 1) ** 2 + step // 12)
    difference = diff(a, path)
    assert difference.step == 12
    assert difference.a.path() != difference.b.path()
    other = tmp_path / "d"
    recorded(other, steps=20, seed=1)
    assert diff(a, other).fields == {"seed": (0, 1)}
    export(a, tmp_path / "small")
    assert not diff(a, tmp_path / "small")


def test_a_model_in_several_files_is_replayed_into_several_files(tmp_path, path):
    model, _, _ = recorded(path)
    state = {name: tensor.contiguous() for name, tensor in Net().state_dict().items() if name != "second.weight"}
    (tmp_path / "base").mkdir()
    names = list(state)
    save_file({name: state[name] for name in names[:3]}, tmp_path / "base" / "1.safetensors")
    save_file({name: state[name] for name in names[3:]}, tmp_path / "base" / "2.safetensors")
    (tmp_path / "base" / "model.safetensors.index.json").write_text("{}")
    replay_file(tmp_path / "base", path, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    tuned = load_file(tmp_path / "out" / "1.safetensors") | load_file(tmp_path / "out" / "2.safetensors")
    assert same(tuned, {name: model.state_dict()[name] for name in names})


def test_copies_of_one_tensor_in_a_file_must_agree_and_are_all_replayed(tmp_path, path):
    model, _, _ = recorded(path)
    state = {name: tensor.contiguous().clone() for name, tensor in Net().state_dict().items()}
    save_file(state, tmp_path / "base.safetensors")
    replay_file(tmp_path / "base.safetensors", path, tmp_path / "out.safetensors")
    assert same(load_file(tmp_path / "out.safetensors"), model.state_dict())
    state["second.weight"] += 1
    save_file(state, tmp_path / "other.safetensors")
    with pytest.raises(ft.LedgerError, match=r"first.weight and second.weight are one tensor in the run, and differ"):
        replay_file(tmp_path / "other.safetensors", path, tmp_path / "no.safetensors")
    (tmp_path / "folder").mkdir()
    for name in "ab":
        save_file(state, tmp_path / "folder" / f"{name}.safetensors")
    with pytest.raises(ft.LedgerError, match="is in more than one of the base files"):
        replay_file(tmp_path / "folder", path, tmp_path / "no")


def test_a_failed_file_replay_leaves_nothing_behind(tmp_path, path):
    recorded(path, steps=3)
    state = {name: tensor.contiguous() for name, tensor in Net().state_dict().items() if name != "second.weight"}
    state["last.bias"] += 1
    save_file(state, tmp_path / "base.safetensors")
    with pytest.raises(ft.LedgerError, match=r"'last\.bias' is the first of 1"):
        replay_file(tmp_path / "base.safetensors", path, tmp_path / "out.safetensors")
    del state["last.bias"]
    save_file(state, tmp_path / "base.safetensors")
    with pytest.raises(ft.LedgerError, match=r"'last\.bias', which is not in the base file"):
        replay_file(tmp_path / "base.safetensors", path, tmp_path / "out.safetensors")
    (tmp_path / "base.safetensors").write_bytes(b"no such format")
    with pytest.raises(ft.LedgerError, match="not in safetensors format"):
        replay_file(tmp_path / "base.safetensors", path, tmp_path / "out.safetensors")
    assert not [file.name for file in tmp_path.iterdir() if "out" in file.name]


# Versions


@pytest.mark.parametrize("version", [1, 2, 3])
def test_ledgers_of_every_version_keep_opening(tmp_path, version):
    expected = json.loads((GOLDEN / "golden.json").read_text())[str(version)]
    for name in (f"v{version}.ledger", f"v{version}.safetensors"):
        file = tmp_path / name
        file.write_bytes((GOLDEN / name).read_bytes())
        base = {key: torch.tensor(value) for key, value in expected["base"].items()}
        tuned = ft.replay(base, file)
        assert {key: tensor.tolist() for key, tensor in tuned.items()} == expected["tuned"]
        assert read(file).header.parameters[0].names == ("a",)
    base = {key: torch.tensor(value) for key, value in expected["base"].items()}
    for state in GOLDEN.glob(f"v{version}.ledger.state*"):
        (tmp_path / state.name).write_bytes(state.read_bytes())
    optimizer, step = ft.resume(base, tmp_path / f"v{version}.ledger")
    assert (step, optimizer.queries) == (expected["step"], expected["queries"])
