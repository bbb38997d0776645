"""The command `forwardtune ledger`, as a person or a script sees it."""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file, save_model
from typer.testing import CliRunner

import forwardtune as ft
from forwardtune.cli.main import app, main
from forwardtune.files import create_file, replace_file
from forwardtune.ledger.journal import MAGIC, frame
from tests.helpers.runs import Net, recorded, same


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs the command in this process; returns its exit code, output and errors."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["forwardtune", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code or 0, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    _, optimizer, _ = recorded(folder / "run.ledger", steps=20)
    optimizer.recorder.close()
    _, optimizer, _ = recorded(folder / "other.ledger", steps=20, seed=1)
    optimizer.recorder.close()
    save_model(Net(), str(folder / "base.safetensors"))
    return folder


def test_show_tells_what_the_run_was(command, folder):
    code, out, _ = command("ledger", "show", folder / "run.ledger", "--steps", 3)
    run = ft.ledger.read(folder / "run.ledger")
    assert code == 0
    assert "VS2P (lr 4, rho 0.01, tau_a 3, tau_b 3, window 50, initial_lr 4)" in out
    assert "rademacher, seed 0, 1 direction per step, relative scale" in out
    assert f"{run.record(0).loss:.6g} in the first step, {run.record(19).loss:.6g} in the last" in out
    assert [line.split()[0] for line in out.splitlines()[-3:]] == ["17", "18", "19"]
    assert f"{run.record(19).t:+.6g}" in out.splitlines()[-1]


def test_verify_exits_with_one_where_a_step_is_damaged(command, folder, tmp_path):
    assert command("ledger", "verify", folder / "run.ledger")[:2] == (0, "sound: steps 0 to 19 are sound\n")
    data = bytearray((folder / "run.ledger").read_bytes())
    data[-400] ^= 8
    (tmp_path / "bad").write_bytes(data)
    code, out, _ = command("ledger", "verify", tmp_path / "bad")
    end = ft.ledger.read(tmp_path / "bad").end
    assert code == 1
    assert out.startswith("damaged: the record at byte")
    assert f"steps 0 to {end - 1} are sound" in out


def test_replay_makes_the_tuned_weights(command, folder, tmp_path):
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
    assert error.splitlines()[-1] == f"error: {out} already exists; choose another name or remove it"


def test_export_and_diff(command, folder, tmp_path):
    code, printed, _ = command("ledger", "export", folder / "run.ledger", "--out", tmp_path / "small")
    size = (tmp_path / "small").stat().st_size
    assert (code, printed) == (0, f"wrote {tmp_path / 'small'}, {size:,} bytes\n")
    assert command("ledger", "diff", folder / "run.ledger", tmp_path / "small")[:2] == (0, "the runs are the same\n")
    code, printed, _ = command("ledger", "diff", folder / "run.ledger", folder / "other.ledger")
    assert code == 1
    assert "seed: 0 and 1" in printed
    assert "the runs diverge at step" in printed
    code, _, note = command("ledger", "export", folder / "run.ledger", "--out", tmp_path / "part", "--until", 5)
    assert code == 0
    assert "known after step 20 only" in note
    code, printed, _ = command("ledger", "diff", folder / "run.ledger", tmp_path / "part")
    assert (code, printed) == (1, "one run is the beginning of the other: they end at step 20 and step 5\n")


def test_a_run_under_way_can_be_shown_and_verified(command, tmp_path):
    _, optimizer, _ = recorded(tmp_path / "run.ledger", steps=4)
    assert "4, under way" in command("ledger", "show", tmp_path / "run.ledger")[1]
    code, printed, _ = command("ledger", "verify", tmp_path / "run.ledger")
    assert (code, printed) == (0, "sound: steps 0 to 3 are sound (the run is under way)\n")
    optimizer.recorder.close()


def test_text_from_strangers_is_shown_without_markup(command, tmp_path):
    x = {"x": torch.zeros(3)}
    optimizer = ft.STP(x.values(), recorder=ft.Ledger(tmp_path / "run.ledger", x))
    optimizer.step(lambda: 1.0)
    header = json.loads(ft.ledger.read(tmp_path / "run.ledger").header.to_json())
    header["created"] = "[/x]\x1b[2J\ud800"
    header["groups"][0]["settings"]["[/red]"] = 10**300
    payload = b"H\x01" + json.dumps(header).encode()
    (tmp_path / "strange").write_bytes(MAGIC + frame(payload, 0)[0])
    code, printed, _ = command("ledger", "show", tmp_path / "strange")
    assert code == 0
    assert "[/x]?[2J" in printed
    assert "\x1b" not in printed


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("nothing", "there is no ledger at {path}"),
        ("", "{path} is a folder, not a ledger"),
        ("base.safetensors", "{path} is not a ledger"),
        ("/proc/self/mem", "/proc/self/mem cannot be read"),
    ],
)
def test_what_is_not_a_ledger_is_an_error_in_a_sentence(command, folder, path, reason):
    code, printed, error = command("ledger", "show", folder / path)
    assert (code, printed) == (1, "")
    expected = reason.format(path=folder / path).replace("/proc/self", str(Path("/proc/self").resolve()))
    assert error.startswith(f"error: {expected}")
    assert error.count("\n") == 1


def test_bad_arguments_are_errors_in_a_sentence(command, folder, tmp_path):
    code, _, error = command("ledger", "replay", folder / "run.ledger")
    assert code == 2
    assert "Missing option '--base'" in error
    replay = ("ledger", "replay", "--base", folder / "base.safetensors", folder / "run.ledger")
    missing = tmp_path / "no" / "out.safetensors"
    code, _, error = command(*replay, "--out", missing)
    assert (code, error.strip()) == (1, f"error: there is no folder {missing.parent} to write to")
    code, _, error = command(*replay, "--out", tmp_path / "out", "--until", 21)
    assert (code, error.strip()) == (1, "error: until must be a step from 0 to 20, not 21")
    code, _, error = command(*replay, "--out", tmp_path / "out", "--backend", "abacus")
    assert code == 1
    assert "abacus" in error
    assert not list(tmp_path.iterdir())


def test_the_advice_for_a_damaged_ledger_works_on_the_command_line(command, folder, tmp_path):
    data = bytearray((folder / "run.ledger").read_bytes())
    data[-400] ^= 8
    (tmp_path / "bad").write_bytes(data)
    code, _, error = command("ledger", "export", tmp_path / "bad")
    end = ft.ledger.read(tmp_path / "bad").end
    assert code == 1
    assert error.strip().endswith(f"ask for those with until={end} (--until {end} on the command line)")
    code, _, note = command("ledger", "export", tmp_path / "bad", "--until", end)
    assert code == 0
    assert "their values are lost" in note
    assert ft.ledger.read(tmp_path / "bad.safetensors").end == end


def test_the_process_has_the_exit_code_and_no_traceback(tmp_path):
    def process(*arguments):
        line = [sys.executable, "-m", "forwardtune", *map(str, arguments)]
        return subprocess.run(line, capture_output=True, text=True, check=False, env={"COLUMNS": "200", "PATH": ""})

    done = process("ledger", "show", tmp_path / "nothing")
    assert (done.returncode, done.stderr) == (1, f"error: there is no ledger at {tmp_path / 'nothing'}\n")
    assert process("--version").stdout.strip() == ft.__version__


def every_command(group, *names):
    yield names
    for name, part in getattr(group, "commands", {}).items():
        yield from every_command(part, *names, name)


@pytest.mark.parametrize("names", list(every_command(typer.main.get_command(app))), ids=" ".join)
def test_help_is_whole_in_eighty_columns(names, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    said = CliRunner().invoke(app, [*names, "--help"]).stdout
    assert "--help" in said
    assert max(map(len, said.splitlines())) <= 80
    assert "..." not in said.split("\n", 1)[1]
    assert not re.search(r"^ +-\S* <(str|int|float|path|list)|\[\[|…", said, re.MULTILINE)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--lr -1", "--lr must be above zero"),
        ("--minutes 0", "--minutes must be above zero"),
        ("--directions many", "--directions must be a whole number"),
        ("--method adam", "method 'adam' is not known"),
        ("--rho 1", "--rho goes with an --lr"),
        ("--scale big", "unknown scale 'big'"),
        ("--probes aside", "unknown probes 'aside'; choose one of auto, in-place, layerwise"),
        ("--rounding up", "unknown rounding 'up'"),
        ("--adapter loar", "adapter 'loar' is not known"),
        ("", "there is no model at nowhere:"),
    ],
)
def test_wrong_flags_are_told_before_anything_slow_is_imported(flags, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.csv").touch()
    slow = ["_compat.transformers", "finetuning.tune"] + ["tasks", "experiments.spec"] * (flags.split(" ")[0] in QUICK)
    for name in slow:
        monkeypatch.setitem(sys.modules, f"forwardtune.{name}", None)  # importing it is an error
    done = CliRunner().invoke(app, shlex.split(f"finetune --model nowhere --train train.csv {flags}"))
    assert isinstance(done.exception, ft.ExperimentError | ft.InvalidArgumentError), done.exception
    assert str(done.exception).startswith(message)


QUICK = ("--lr", "--minutes", "--directions", "--method", "--rho")
"""Flags that are checked even before torch is imported."""


def test_weights_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        replace_file(tmp_path / "a", lambda new: save_file({"x": torch.ones(3)}, new))
        create_file(tmp_path / "b", lambda new: save_file({"x": torch.ones(3)}, new))
    finally:
        os.umask(before)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in "ab"] == [0o640, 0o640]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
