"""The commands `compare`, `run`, `report`, `presets` and `reproduction`: as processes where that is the point."""

import json
import subprocess
import sys

import pytest

from forwardtune.cli import main
from tests.helpers.comparisons import DATA, TEXT, needs_data, outcomes

ONE = TEXT.replace("[0, 1]", "[0]").replace("[1, 4]", "[1]")


def forwardtune(*arguments, **options):
    command = [sys.executable, "-m", "forwardtune", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


@pytest.fixture
def spec(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(ONE)
    return file


def test_compare_report_and_compare_again(spec, tmp_path):
    done = forwardtune("compare", spec, "--tensorboard", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second, *rest = done.stdout.splitlines()
    assert first.startswith("digits-cnn: after 60 queries ")
    assert second == "report: results/mine/report.html"
    assert "Test accuracy (%)" in "\n".join(rest)
    store = tmp_path / "results" / "mine"
    assert (store / "report.html").stat().st_size < 300_000
    assert (store / "spec.toml").read_text() == ONE
    assert len(outcomes(store)) == 2
    assert len(list((store / "tensorboard").glob("*/events*"))) == 2
    before = outcomes(store)

    again = forwardtune("compare", spec, "--quiet", "--no-report", cwd=tmp_path)
    assert again.stdout.splitlines() == [first, "results: results/mine"]
    assert outcomes(store) == before

    (store / "report.html").unlink()
    told = forwardtune("report", "results/mine", cwd=tmp_path)
    assert told.stdout.splitlines()[:2] == [first, second]
    assert (store / "report.html").exists()


def test_json_lines(spec, tmp_path):
    done = forwardtune("compare", spec, "--json", "--no-report", "--out", tmp_path / "out")
    assert done.stderr == ""
    events = [json.loads(line) for line in done.stdout.splitlines()]
    kinds = [event["event"] for event in events]
    assert kinds[:2] == ["plan", "base"]
    assert kinds[-1] == "outcome"
    assert kinds.count("start") == kinds.count("done") == 2
    assert kinds.count("look") == 10
    assert events[0] == {"event": "plan", "spec": "mine", "runs": 2, "finished": 0, "queries": 120}
    assert events[-1]["summary"][0].startswith("digits-cnn: after 60 queries")
    results = {event["run"]: event["result"] for event in events if event["event"] == "done"}
    assert {f"{run}.json" for run in results} == outcomes(tmp_path / "out").keys()


def test_a_single_run(spec, tmp_path):
    one = ("run", spec, "--out", tmp_path / "out", "--threads", 1)
    done = forwardtune(*one, "--method", "VS2P", "--lr", 2, "--seed", 5)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("digits-cnn VS2P lr 2 seed 5: finished after 60 queries, training loss ")
    (result,) = outcomes(tmp_path / "out").values()
    assert (result["run"]["lr"], result["run"]["seed"]) == (2.0, 5)
    wrong = forwardtune(*one, "--method", "SVP")
    assert wrong.stderr == "error: method 'SVP' is not known (did you mean 'STP'?); choose one of VS2P, STP\n"


def test_presets():
    done = forwardtune("presets")
    assert done.returncode == 0
    for name in ("digits", "full/mnist-200", "reduced/cifar10-200"):
        assert f"\n{name} " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["compare"], "name either a spec file or a preset"),
        (["compare", "--preset", "digit"], "there is no preset 'digit' (did you mean 'digits'?)"),
        (["compare", "digits"], "for the preset of that name write --preset digits"),
        (["compare", "--preset", "reduced/mnist-200", "--data", "."], "MNIST needs the file train-images-idx3-ubyte"),
        (["compare", "nothing.toml"], "the spec nothing.toml cannot be read"),
        (
            ["compare", "--preset", "reduced/mnist-200", "--data", "nowhere"],
            "the data folder nowhere does not exist",
        ),
        (["compare", "--preset", "reduced/mnist-200"], "name it with --data DIR"),
        (["compare", "--preset", "digits", "--quiet", "--json"], "choose one of --quiet and --json"),
        (["compare", "--preset", "digits", "--device", "abacus"], "the device 'abacus' cannot be used"),
        (["report", "nowhere"], "nowhere holds no results of a comparison"),
        (["reproduction", "nowhere"], "nowhere holds no results of the paper's presets"),
        (["run", "--preset", "digits", "--method", "VS2P", "--lr", "-1"], "--lr must be above zero"),
    ],
)
def test_bad_input_is_one_paragraph(arguments, complaint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FORWARDTUNE_DATA", raising=False)
    monkeypatch.setattr(sys, "argv", ["forwardtune", *arguments])
    with pytest.raises(SystemExit, match=r"^1$"):
        main()
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert complaint in said
    assert said.count("\n") == 1


REDUCED = """
title = "MNIST, some steps"
queries = 12
batch = 16
seeds = [0, 1]
evaluations = 2
train_examples = 50
test_examples = 50

[[workloads]]
data = "mnist"
network = "resnet18"
weights = "weights/resnet18_imagenet_fp16.safetensors"

[[methods]]
method = "VS2P"
lr = [1, 3]

[[methods]]
method = "MeZO"
lr = [1e-5, 3e-5]

[[methods]]
method = "STP"
lr = [3e-4]
"""


@needs_data
def test_real_data_and_weights(tmp_path):
    file = tmp_path / "some.toml"
    file.write_text(REDUCED)
    done = forwardtune("compare", file, "--data", DATA, "--out", tmp_path / "out", "--no-report", "--quiet")
    assert done.returncode == 0, done.stderr
    results = outcomes(tmp_path / "out")
    assert len(results) == 10
    for result in results.values():
        assert result["data"] == {"name": "mnist", "train": 60_000, "test": 10_000, "digest": result["data"]["digest"]}
        assert result["queries"] == 12
