"""The command line, as a person or a script sees it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_model

import forwardtune as ft
from forwardtune.ledger.journal import MAGIC, frame
from tests.helpers.runs import Net, recorded, same


def command(*arguments):
    """Runs the command as a process; returns its exit code, output and errors."""
    line = [sys.executable, "-m", "forwardtune", *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, text=True, check=False, env={"COLUMNS": "200", "PATH": ""})
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    _, optimizer, _ = recorded(folder / "run.ledger", steps=20)
    optimizer.recorder.close()
    _, optimizer, _ = recorded(folder / "other.ledger", steps=20, seed=1)
    optimizer.recorder.close()
    save_model(Net(), str(folder / "base.safetensors"))
    return folder


def test_show_tells_what_the_run_was(folder):
    code, out, _ = command("ledger", "show", folder / "run.ledger", "--steps", 3)
    run = ft.ledger.read(folder / "run.ledger")
    assert code == 0
    assert "VS2P (lr 4, rho 0.01, tau_a 3, tau_b 3, window 50, initial_lr 4)" in out
    assert "rademacher, seed 0, 1 direction a step" in out
    assert f"{run.record(0).loss:.6g} in the first step, {run.record(19).loss:.6g} in the last" in out
    assert [line.split()[0] for line in out.splitlines()[-3:]] == ["17", "18", "19"]
    assert f"{run.record(19).t:+.6g}" in out.splitlines()[-1]


def test_verify_exits_with_one_where_a_step_is_damaged(folder, tmp_path):
    assert command("ledger", "verify", folder / "run.ledger")[:2] == (0, "sound: steps 0 to 19 are sound\n")
    data = bytearray((folder / "run.ledger").read_bytes())
    data[-400] ^= 8
    (tmp_path / "bad").write_bytes(data)
    code, out, _ = command("ledger", "verify", tmp_path / "bad")
    end = ft.ledger.read(tmp_path / "bad").end
    assert code == 1
    assert out.startswith("damaged: the record at byte")
    assert f"steps 0 to {end - 1} are sound" in out


def test_replay_makes_the_tuned_weights(folder, tmp_path):
    out = tmp_path / "tuned.safetensors"
    arguments = ("ledger", "replay", "--base", folder / "base.safetensors", folder / "run.ledger", "--out", out)
    code, printed, progress = command(*arguments)
    assert (code, printed) == (0, f"wrote {out}\n")
    assert "100%" in progress
    model = ft.replay(Net(), folder / "run.ledger")
    tuned = load_file(out)
    assert same(tuned, {name: model.state_dict()[name] for name in tuned})
    code, _, error = command(*arguments)
    assert code == 1
    assert error.splitlines()[-1] == f"error: {out} is there already; choose another name or remove it"


def test_export_and_diff(folder, tmp_path):
    code, printed, _ = command("ledger", "export", folder / "run.ledger", "--out", tmp_path / "small")
    size = (tmp_path / "small").stat().st_size
    assert (code, printed) == (0, f"wrote {tmp_path / 'small'}, {size:,} bytes\n")
    assert command("ledger", "diff", folder / "run.ledger", tmp_path / "small")[:2] == (0, "the runs are the same\n")
    code, printed, _ = command("ledger", "diff", folder / "run.ledger", folder / "other.ledger")
    assert code == 1
    assert "seed: 0 and 1" in printed
    assert "the runs part at step" in printed
    code, _, note = command("ledger", "export", folder / "run.ledger", "--out", tmp_path / "part", "--until", 5)
    assert code == 0
    assert "known after step 20 only" in note


def test_a_run_under_way_can_be_looked_at(tmp_path):
    _, optimizer, _ = recorded(tmp_path / "run.ledger", steps=4)
    assert "4, under way" in command("ledger", "show", tmp_path / "run.ledger")[1]
    code, printed, _ = command("ledger", "verify", tmp_path / "run.ledger")
    assert (code, printed) == (0, "sound: steps 0 to 3 are sound (and a run is writing it)\n")
    optimizer.recorder.close()


def test_what_a_stranger_wrote_is_shown_as_text(tmp_path):
    x = {"x": torch.zeros(3)}
    optimizer = ft.STP(x.values(), recorder=ft.Ledger(tmp_path / "run.ledger", x))
    optimizer.step(lambda: 1.0)
    header = json.loads(ft.ledger.read(tmp_path / "run.ledger").header.to_json())
    header["created"] = "[/x]\x1b[2J\ud800"
    header["groups"][0]["settings"]["[/red]"] = 10**400
    payload = b"H\x01" + json.dumps(header).encode()
    (tmp_path / "strange").write_bytes(MAGIC + frame(payload, 0)[0])
    code, printed, _ = command("ledger", "show", tmp_path / "strange")
    assert code == 0
    assert "[/x]?[2J" in printed
    assert "\x1b" not in printed


def test_errors_are_sentences(folder, tmp_path):
    code, _, error = command("ledger", "show", tmp_path / "nothing")
    assert (code, error.strip()) == (1, f"error: there is no ledger at {tmp_path / 'nothing'}")
    (tmp_path / "text").write_text("hello")
    assert command("ledger", "show", tmp_path / "text")[0] == 1
    assert command("ledger", "replay", folder / "run.ledger")[0] == 2
    assert command("ledger", "show", "/proc/self/mem")[0] == 1
    missing = tmp_path / "no" / "out.safetensors"
    code, _, error = command(
        "ledger", "replay", "--base", folder / "base.safetensors", folder / "run.ledger", "--out", missing
    )
    assert (code, error.strip()) == (1, f"error: there is no folder {missing.parent} to write to")
    assert command("--version")[1].strip() == ft.__version__
