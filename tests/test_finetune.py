"""`forwardtune finetune` and `predict`, as a user types them."""

import csv
import json
import math
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import forwardtune as ft
from forwardtune.cli.main import app
from forwardtune.errors import ExperimentError, LedgerError
from forwardtune.experiments import runner
from forwardtune.experiments.result import Curve
from forwardtune.finetuning.kept import kept
from forwardtune.finetuning.tuned import Tuned
from forwardtune.tasks.task import Scores
from forwardtune.tasks.texts.models import PretrainedModel
from forwardtune.tasks.texts.task import TextTask
from tests.helpers import tiny
from tests.helpers.comparisons import made_up

from transformers import AutoModelForCausalLM  # isort: skip


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny.causal(tmp_path / "model")
    tiny.encoder(tmp_path / "encoder")
    rows = tiny.reviews(60)
    with open("train.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["text", "label"])
        writer.writeheader()
        writer.writerows(rows[:40])
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[40:]))
    return tmp_path


TABLES = "--train train.csv --test test.jsonl"
QUESTION = "--template '{text} It was' --word bad --word good"
LENGTH = "--steps 40 --evaluations 2 --threads 1 --keep last"
USUAL = f"{TABLES} {QUESTION} {LENGTH}"


def run(*command):
    done = CliRunner().invoke(app, [word for part in command for word in shlex.split(part)])
    if done.exception:
        raise done.exception
    return done.stdout


def test_a_model_is_tuned_saved_and_asked(home):
    said = run("finetune --model model --lr 20 --ledger copy/run.ledger", USUAL)
    assert "tunes 6,224 of 6,224 weights" in said
    assert "saved: tuned" in said
    settings = json.loads((home / "tuned" / "forwardtune.json").read_text())
    result = json.loads(next((home / "tuned" / "run" / "runs").glob("*.json")).read_text())
    assert settings["final"] == result["final"]
    assert result["queries"] == 80
    stages = result["base"]["before"]["accuracy"], result["curve"]["accuracy"][0], result["final"]["accuracy"]
    was, fitted, tuned = (f"{100 * accuracy:.1f}" for accuracy in stages)
    assert f"accuracy {was} to {fitted} to {tuned}" in said
    # The base and the ledger give the saved weights, bit for bit.
    base = AutoModelForCausalLM.from_pretrained(home / "model")
    start = {name: p.detach().clone() for name, p in base.named_parameters()}
    for ledger in ("tuned/run.ledger", "copy/run.ledger"):
        base.load_state_dict(start, strict=False)
        ft.replay(base, home / ledger)
        saved = load_file(home / "tuned" / "model.safetensors")
        assert all(torch.equal(saved[name], p) for name, p in base.named_parameters())
    assert not torch.equal(start["model.norm.weight"], saved["model.norm.weight"])
    # The card tells what the result does.
    card = (home / "tuned" / "README.md").read_text()
    assert "| | before | fitted | after |\n| --- | --- | --- | --- |\n" in card
    assert f"| accuracy | {was} | {fitted} | {tuned} |" in card
    assert "80 queries of VS2P" in card
    # Predictions are those that were evaluated, by a readout of both blocks.
    assert load_file(home / "tuned" / "readout.safetensors")["weight"].shape == (2, 2 + 2 * 16)
    run("predict --model tuned --input test.jsonl --out answers.csv")
    with open(home / "answers.csv", newline="") as file:
        answers = list(csv.DictReader(file))
    right = [row["prediction"] == row["label"] for row in answers]
    assert sum(right) / 20 == pytest.approx(result["final"]["accuracy"])
    assert all(0.5 <= float(row["probability"]) <= 1 for row in answers)
    one = json.loads(run(f"predict --model tuned --text '{answers[3]['text']}'"))
    assert one["prediction"] == answers[3]["prediction"]
    assert one["probability"] == pytest.approx(float(answers[3]["probability"]), abs=2e-4)


@pytest.mark.parametrize(
    "more",
    [
        "--model model --adapter lora",
        "--model model --adapter lora --directions auto",
        "--model model --directions per-example --lr 5",
        "--model model --adapter prompt --method mezo",
        "--model model --setup head --adapter lora --method stp",
        "--model encoder",
        "--model encoder --adapter lora --objective accuracy --lr 15 --rho 0.3",
        "--model encoder --adapter lora --objective accuracy",
        "--model encoder --adapter prompt",
        "--model encoder --setup head",
        "--model model --dtype int8 --adapter lora --directions per-example",
        "--model model --dtype int8 --setup head",
        "--model model --dtype int8 --adapter ia3",
        "--model encoder --dtype int8",
    ],
)
def test_every_kind_of_result_answers_as_it_was_evaluated(home, monkeypatch, more):
    run("finetune", more, TABLES, LENGTH, "" if "head" in more else QUESTION, "--quiet")
    monkeypatch.chdir(home / "tuned")
    result = json.loads(next((home / "tuned" / "run" / "runs").glob("*.json")).read_text())
    asked = Tuned(home / "tuned", base=str(home / more.split()[1]) if "--adapter" in more else None)
    rows = tiny.reviews(60)[40:]
    answers = list(asked.answers([(row["text"],) for row in rows]))
    right = [answer.prediction == row["label"] for answer, row in zip(answers, rows, strict=True)]
    assert sum(right) / 20 == pytest.approx(result["final"]["accuracy"])
    assert ("base.safetensors" in {file.name for file in (home / "tuned").iterdir()}) == (
        "--adapter" in more or "head" in more
    )


@pytest.mark.parametrize("best", [0, 1, 2])
def test_the_best_evaluation_is_saved(home, monkeypatch, best):
    """By walking to it along the ledger, which then is the run up to there."""
    evaluate, made = TextTask.evaluate, []

    def evaluated(self, model):
        made.append(evaluate(self, model))
        return replace(made[-1], metrics={**made[-1].metrics, "accuracy": 0.9 if len(made) == best + 1 else 0.5})

    monkeypatch.setattr(TextTask, "evaluate", evaluated)
    said = run("finetune --model model --lr 20 --fit 0", USUAL.replace("--keep last", ""))
    run("finetune --model model --lr 20 --fit 0 --out last --quiet", USUAL)
    settings, card = (
        json.loads((home / "tuned" / "forwardtune.json").read_text()),
        (home / "tuned" / "README.md").read_text(),
    )
    assert settings["final"]["accuracy"] == 0.9
    assert settings["final"]["train_loss"] == made[best].train_loss
    assert ft.ledger.read(home / "tuned" / "run.ledger").end == 20 * best
    assert ("the best evaluation" in card) == (best < 2)
    assert ("saved is the best evaluation, after 40 queries; the last has accuracy 50.0" in said) == (best == 1)
    assert ("no evaluation was better than before tuning" in said) == (best == 0)
    saved = {name: load_file(home / name / "model.safetensors") for name in ("tuned", "last", "model")}
    base = AutoModelForCausalLM.from_pretrained(home / "model")
    ft.replay(base, home / "last" / "run.ledger", until=20 * best)
    assert all(torch.equal(saved["tuned"][name], p) for name, p in base.named_parameters())
    same = [torch.equal(saved["tuned"][name], weight) for name, weight in saved["last"].items()]
    assert all(same) == (best == 2)
    with pytest.raises(ExperimentError, match="tuned was saved with --keep best; choose another --out"):
        run("finetune --model model --lr 20 --fit 0", USUAL)


def test_of_equal_evaluations_the_lowest_loss_is_best():
    scores = [
        Scores(1.0, loss, {"accuracy": right}) for loss, right in ((3, 0.5), (1, 0.7), (0.9, 0.7), (0.1, math.nan))
    ]
    result = made_up(Curve((0, 10, 20, 30), tuple(scores)))
    assert kept(result, "best") == (20, scores[2], False)
    assert kept(result, "last") == (30, scores[3], True)


def test_a_stopped_run_goes_on(home, monkeypatch):
    run("finetune --model model --lr 20 --out whole --quiet", USUAL)
    step, made = runner._LineSearchUnderWay._step, []

    def interrupted(self, *others):
        made.append(1)
        if len(made) == 17:
            raise KeyboardInterrupt
        return step(self, *others)

    monkeypatch.setattr(runner._LineSearchUnderWay, "_step", interrupted)
    done = CliRunner().invoke(app, ["finetune", "--model", "model", "--lr", "20", "--quiet", *shlex.split(USUAL)])
    assert done.exit_code == 130
    assert not (home / "tuned" / "forwardtune.json").exists()
    run("finetune --model model --lr 20 --quiet", USUAL)
    assert len(made) == 17 + 24
    whole, parts = (load_file(home / name / "model.safetensors") for name in ("whole", "tuned"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    before = len(made)
    assert "saved: tuned" in run("finetune --model model --lr 20", USUAL)
    assert len(made) == before


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("--model model", r"name either a task .* or a table"),
        ("--model model --train texts.txt", "texts.txt has texts without labels; add --objective lm"),
        ("--model model --task sst3 --data .", r"task 'sst3' is not known \(did you mean 'sst2'\?\)"),
        ("--model model --task sst2", "sst2 is read from the data folder, and none was given"),
        ("--model nowhere --train train.csv", "no model at nowhere"),
        ("--model model --train none.csv", "there is no file at .*none.csv"),
        ("--model model --train train.csv --text-column body", r"there is no column 'body', only 'text', 'label'"),
        ("--model model --train train.csv --rho 0.1", "--rho goes with an --lr"),
        ("--model model --train train.csv --keep first", "keep 'first' is not known"),
        ("--model model --train train.csv --directions 0", "--directions must be a whole number from 1 to 65535"),
        ("--model model --train train.csv --directions auto --lr 1", "--directions auto goes without an --lr"),
        ("--model model --train train.csv --lr -1", "--lr must be above zero and finite, not -1"),
        ("--model model --train train.csv --lr 1 --rho -1", "--rho must be above zero and finite, not -1"),
        ("--model model --train train.csv --decay linear", "--decay goes with an --lr; without one steps become small"),
        ("--model model --train train.csv --lr 1 --decay liner", "decay 'liner' is not known .did you mean 'linear'"),
        ("--model model --train train.csv --steps 20", "40 queries are too few to find a rate; give --steps 30"),
        ("--model model --train train.csv --queries 40", "40 queries are too few to find a rate; give --queries 60"),
        ("--model model --train train.csv --out train.csv", "train.csv is a file; choose a folder with --out"),
        ("--model model --train train.csv --method adam", "method 'adam' is not known"),
        ("--model model --train train.csv --method stp --rho 0.1", "STP probes at its --lr and has no rho"),
        ("--model model --train train.csv --adapter loar", "adapter 'loar' is not known"),
        ("--model model --train train.csv --batch 100", "a batch of 100 is more than the 36 training examples"),
        ("--model model --train train.csv --out model", "model is not empty"),
        ("--model model --task sst2 --text-column a", "--text-column and --label-column apply only with --train"),
        ("--model model --train train.csv --ledger train.csv", "train.csv already exists; choose another name"),
    ],
)
def test_bad_input_is_told_before_anything_is_done(home, command, complaint):
    done = CliRunner().invoke(app, ["finetune", *shlex.split(command)])
    assert isinstance(done.exception, ExperimentError)
    assert re.search(complaint, str(done.exception)), str(done.exception)
    assert not list((home).glob("tuned/run/runs/*"))


def test_the_ledger_has_one_name_from_the_first_step(home, monkeypatch):
    step, seen = runner._LineSearchUnderWay._step, []

    def watched(self, *others):
        seen.append(run("ledger show tuned/run.ledger") if len(seen) == 20 else "")
        if seen[-1]:
            assert (home / "tuned" / "run.ledger").is_symlink()
            seen.append(run("ledger verify tuned/run.ledger"))
            run("ledger export tuned/run.ledger --out part.safetensors")
        return step(self, *others)

    monkeypatch.setattr(runner._LineSearchUnderWay, "_step", watched)
    run("finetune --model model --lr 20 --quiet", USUAL)
    assert re.search(r"steps +20, under way", seen[20])
    assert "steps 0 to 19 are sound (the run is under way)" in seen[21]
    # Afterwards it is an export that needs nothing else.
    exported = home / "tuned" / "run.ledger"
    assert not exported.is_symlink()
    difference = ft.ledger.diff(home / "part.safetensors", exported)
    assert (difference.ends, difference.a, difference.fields) == ((20, 40), None, {})
    content = exported.read_bytes()
    (home / "whole.safetensors").write_bytes(content)
    # One that is damaged or lost is written again.
    for damaged in (content[:-3] + b"abc", None):
        exported.unlink() if damaged is None else exported.write_bytes(damaged)
        done = CliRunner().invoke(app, shlex.split(f"finetune --model model --lr 20 --quiet {USUAL}"))
        assert done.exit_code == 0
        assert "run.ledger was missing or damaged; it is exported again from" in done.stderr.replace("\n", " ")
        assert not ft.ledger.diff(exported, home / "whole.safetensors")
    assert run("finetune --model model --lr 20 --quiet", USUAL).startswith("test accuracy")


def test_a_ledger_goes_without_its_link(home, monkeypatch):
    def refused(*others):
        raise OSError("no links here")

    monkeypatch.setattr(Path, "symlink_to", refused)
    done = CliRunner().invoke(app, shlex.split(f"finetune --model model --lr 20 --quiet {USUAL}"))
    assert done.exit_code == 0
    assert "cannot be made a link (no links here); until the run ends its ledger is tuned/run/runs/" in done.stderr
    assert ft.ledger.read(home / "tuned" / "run.ledger").end == 40


@pytest.mark.parametrize(
    "more",
    [
        "--model half --lr 20",
        "--model half --adapter lora",
        "--model half --setup head",
        "--model half --dtype bfloat16",
        "--model encoder",
    ],
)
def test_the_command_on_the_card_gives_the_weights_bit_for_bit(home, monkeypatch, more):
    """Also of a base that is in float16 on the disk."""
    half = AutoModelForCausalLM.from_pretrained(home / "model", dtype=torch.float16)
    half.save_pretrained(home / "half")
    tiny.tokenizer().save_pretrained(home / "half")
    assert load_file(home / "half" / "model.safetensors")["model.norm.weight"].dtype == torch.float16
    run("finetune", more, TABLES, LENGTH, "" if "head" in more else QUESTION, "--quiet")
    (home / "tuned" / "run").rename(home / "away")
    card = (home / "tuned" / "README.md").read_text()
    (command,) = re.findall(r"^```\nforwardtune (replay .*)\n```$", card, re.MULTILINE)
    monkeypatch.chdir(home / "tuned")
    assert run(command) == "wrote again\n"
    name = "adapter_model.safetensors" if "--adapter" in more else "model.safetensors"
    saved, again = (load_file(home / "tuned" / part / name) for part in (".", "again"))
    assert saved.keys() == again.keys()
    assert all(torch.equal(saved[key].view(torch.uint8), again[key].view(torch.uint8)) for key in saved)
    moved = ft.ledger.read(home / "tuned" / "run.ledger").header.parameters
    assert {parameter.dtype for parameter in moved} == {"bfloat16" if "bfloat16" in more else "float32"}
    with pytest.raises(ExperimentError, match="again already exists; choose another name for --out"):
        run(command)
    said = f", which was {home / 'half'} when it was tuned" if "--adapter" in more else ""
    with pytest.raises(ExperimentError, match=f"does not hold its base{said}; name one that you trust with --base"):
        run("replay --model . --out without-base")


def test_another_base_is_refused(home):
    run("finetune --model model --lr 20 --quiet", USUAL)
    file = tiny.causal(home / "other") / "model.safetensors"
    save_file({name: 2 * weights for name, weights in load_file(file).items()}, file, {"format": "pt"})
    with pytest.raises(LedgerError, match="these are not the weights that the run started from"):
        run("replay --model tuned --base other --out again")
    assert not (home / "again").exists()


def test_the_model_is_loaded_once(home, monkeypatch):
    """For the base weights, the run and the saved model alike; a run that was killed before it was saved, again."""
    loads, build = [], PretrainedModel.build
    monkeypatch.setattr(PretrainedModel, "build", lambda *a: loads.append(1) or build(*a))
    run("finetune --model model --adapter lora --quiet", USUAL)
    assert len(loads) == 1
    saved = load_file(home / "tuned" / "adapter_model.safetensors")
    for name in ("forwardtune.json", "adapter_model.safetensors"):
        (home / "tuned" / name).unlink()
    run("finetune --model model --adapter lora --quiet", USUAL)
    assert len(loads) == 2
    again = load_file(home / "tuned" / "adapter_model.safetensors")
    assert all(torch.equal(saved[name], again[name]) for name in saved)


def test_the_old_name_of_a_flag(home):
    done = CliRunner().invoke(app, ["finetune", "--model", "model", "--peft", "lora", "--quiet", *shlex.split(USUAL)])
    assert done.exit_code == 0
    assert "--peft is called --adapter now" in done.stderr
    assert (home / "tuned" / "adapter_model.safetensors").exists()


def test_a_folder_belongs_to_one_run(home):
    run("finetune --model model --quiet", USUAL)
    with pytest.raises(ExperimentError, match="tuned holds the result of another run; choose another folder"):
        run("finetune --model model --seed 1 --quiet", USUAL)
    with pytest.raises(ExperimentError, match=r"model holds no tuned model: there is no forwardtune\.json"):
        run("predict --model model --text film")
    with pytest.raises(
        ExperimentError, match="an example of this model is text: give --text once, or several examples"
    ):
        run("predict --model tuned --text film --text plot")
    with pytest.raises(ExperimentError, match="give either texts"):
        run("predict --model tuned")
    with pytest.raises(ExperimentError, match=r"must end in .csv or .jsonl"):
        run("predict --model tuned --text film --out answers.txt")


def test_a_missing_library_is_named():
    code = "import sys; sys.modules['transformers'] = None; from forwardtune.cli.main import main; main()"
    words = ["predict", "--model", "x", "--text", "y"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 1
    assert "install it: pip install 'forwardtune[huggingface]'" in done.stderr
    assert "Traceback" not in done.stderr
