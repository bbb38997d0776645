"""`forwardtune doctor`, and tuning in 16 bits, as a user types them."""

import json
import os
import shlex
import stat

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from forwardtune.cli.main import app
from forwardtune.errors import ForwardTuneError
from tests.helpers import tiny


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    tiny.causal(tmp_path / "model")
    return tmp_path


def run(command):
    done = CliRunner().invoke(app, shlex.split(command))
    if done.exception:
        raise done.exception
    return " ".join(done.stdout.split())


def test_what_it_tells(home):
    said = run("doctor model")
    assert "probes: in place" in said
    assert "tunes 6,224 of 6,224 weights" in said
    assert "for 16 examples" in said
    short = run("doctor model --dtype bfloat16 --batch 4")
    assert "probes: layer by layer, since weights have 16 bits" in short
    assert "bfloat16" in short
    assert "for 4 examples" in short
    assert "lora_A" in run("doctor model --adapter lora")
    assert not any(home.glob("model/*.ledger"))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("model --rho 7", "--rho must be above zero and at most 1"),
        ("model --dtype int3", "dtype 'int3' is not known"),
        ("model --adapter ia4", "adapter 'ia4' is not known"),
        ("nowhere", "there is no model at nowhere"),
    ],
)
def test_wrong_uses(home, command, message):
    with pytest.raises(ForwardTuneError, match=message):
        run(f"doctor {command}")


@pytest.mark.parametrize("directions", ["1", "per-example"])
def test_a_run_in_sixteen_bits_is_saved_and_replayed(home, directions):
    rows = tiny.reviews(40)
    (home / "train.csv").write_text("text,label\n" + "".join(f'"{r["text"]}",{r["label"]}\n' for r in rows))
    run(
        "finetune --model model --train train.csv --template '{text} It was' --word bad --word good --steps 20 "
        f"--evaluations 2 --threads 1 --keep last --dtype bfloat16 --lr 20 --directions {directions} --quiet"
    )
    run("replay --model tuned --base model --out again")
    tuned, again = load_file("tuned/model.safetensors"), load_file("again/model.safetensors")
    base = load_file("model/model.safetensors")
    assert tuned.keys() == again.keys()
    for name, tensor in tuned.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, again[name])
    assert any(not torch.equal(tensor, base[name].bfloat16()) for name, tensor in tuned.items())


def test_names_are_broken_at_their_dots(home, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    rows = [line.split() for line in CliRunner().invoke(app, shlex.split("doctor model")).stdout.splitlines()]
    names = [row[0] for row in rows if row and row[-1] == "yes"]
    assert "layers.*.post_attention_layernorm" in names
    monkeypatch.setenv("COLUMNS", "72")
    lines = CliRunner().invoke(app, shlex.split("doctor model")).stdout.splitlines()
    at = next(number for number, line in enumerate(lines) if line.split() == ["post_attention_layernorm"])
    assert lines[at - 1].split()[0] == "layers.*."


@pytest.mark.filterwarnings("default")
def test_a_run_tells_which_lines_examples_had(home, monkeypatch):
    from forwardtune import auto
    from forwardtune.layers import perturbation

    rows = tiny.reviews(40)
    (home / "train.csv").write_text("text,label\n" + "".join(f'"{r["text"]}",{r["label"]}\n' for r in rows))
    command = (
        "finetune --model model --train train.csv --template '{text} It was' --word bad --word good --steps 60 "
        "--evaluations 1 --threads 1 --keep last --directions auto --probes layerwise --fit 0"
    )
    before = os.umask(0o022)
    try:
        said = run(f"{command} --out known")
    finally:
        os.umask(before)
    assert "probes: layer by layer, which leaves every bit of the weights as it was" in said
    result = json.loads(next(home.glob("known/run/runs/*.json")).read_text())
    told = {"own": "examples had lines of their own in the end", "common": "examples shared common lines to the end"}
    assert f"{told[result['lines']]}; their gradients agree by {result['agreement']:.2g} (1: all alike" in said
    assert result["run"]["settings"]["probes"] == "layerwise"
    assert stat.S_IMODE((home / "known" / "model.safetensors").stat().st_mode) == 0o644
    monkeypatch.setattr(perturbation, "rule_of", lambda layer: None)
    monkeypatch.setattr(auto, "WORTH", 0.0)  # lines of their own are tried
    done = CliRunner().invoke(app, shlex.split(f"{command} --out strange"))
    assert done.exit_code == 0, done.exception
    note = " ".join(done.stderr.split())
    assert note.startswith("note: examples cannot have lines of their own in ")
    assert note.endswith("; all examples share common lines")
    assert note.count("note:") == 1
    assert "examples shared common lines to the end" in " ".join(done.stdout.split())
