"""Adapters from anyone: what their folder says of models and code is not read, nothing is executed, nobody is asked."""

import json
import os
import pickle
import shlex
import socket

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from forwardtune.cli.main import app
from forwardtune.errors import ExperimentError
from tests.helpers import tiny
from tests.helpers.texts import write_jsonl

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def run(command):
    done = CliRunner().invoke(app, shlex.split(command))
    if done.exception:
        raise done.exception
    return done.stdout


def predict(folder, base=" --base model"):
    return run(f"predict --model {folder}{base} --text 'film good'")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    tiny.causal(home / "model")
    train = write_jsonl(home / "train.jsonl", tiny.reviews(20))
    length = "--steps 4 --lr 1 --evaluations 1 --threads 1 --keep last --quiet"
    question = "--template '{text} It was' --word bad --word good"
    run(f"finetune --model {home}/model --adapter lora --train {train} {question} {length} --out {home}/tuned")
    return home


@pytest.fixture
def tuned(made, monkeypatch):
    """The folder of an adapter, whose files the test may change; any use of the network is recorded and fails."""
    before = {file: file.read_bytes() for file in (made / "tuned").iterdir() if file.is_file()}
    asked = []

    def refuse(*place):
        asked.append(place)
        raise OSError("no network here")

    monkeypatch.chdir(made)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    yield made / "tuned"
    for file in (made / "tuned").iterdir():
        if file.is_file():
            file.unlink()
    for file, content in before.items():
        file.write_bytes(content)
    assert not asked


@pytest.mark.parametrize("said", [
    {"base_model_name_or_path": "gpt2"},
    {"base_model_name_or_path": "../../../etc"},
    {"auto_mapping": {"base_model_class": "system", "parent_library": "os"}, "task_type": None},
    {"modules_to_save": ["lm_head"]},
    {"modules_to_save": 5},
    {"peft_type": "PREFIX_TUNING"},
    {"peft_type": "EVIL"},
    {"r": 10**9},
    {"megatron_config": {}, "megatron_core": "os"},
    "{",
    "[" * 100_000,
    None,
], ids=str)  # fmt: skip
def test_its_config_decides_nothing(tuned, said):
    expected, file = predict("tuned"), tuned / CONFIG
    if said is None:
        file.unlink()
    else:
        file.write_text(said if isinstance(said, str) else json.dumps({**json.loads(file.read_text()), **said}))
    assert predict("tuned") == expected


class Payload:
    def __reduce__(self):
        return os.system, ("touch executed",)


def test_a_pickle_is_not_read(tuned):
    (tuned / WEIGHTS).unlink()
    (tuned / "adapter_model.bin").write_bytes(pickle.dumps(Payload()))
    with pytest.raises(ExperimentError, match=f"^the adapter tuned/{WEIGHTS} cannot be read .No such file.*again$"):
        predict("tuned")
    assert not (tuned.parent / "executed").exists()


def test_weights_are_those_of_the_adapter(tuned):
    file, wrong = tuned / WEIGHTS, f"^tuned/{WEIGHTS} does not hold the weights that this adapter has on this base"
    weights = load_file(file)
    name = min(weights)
    changed = {"more": weights | {"more": weights[name].clone()}, "fewer": {name: weights[name]}}
    changed["other shape"] = weights | {name: weights[name][:1].clone()}
    for content in changed.values():
        save_file(content, file)
        with pytest.raises(ExperimentError, match=wrong):
            predict("tuned")
    file.write_bytes(b"garbage")
    with pytest.raises(ExperimentError, match=f"^the adapter tuned/{WEIGHTS} cannot be read .*; tune the model again$"):
        predict("tuned")


def test_a_whole_model_does_not_bring_one(tuned):
    """transformers would load it along, and by its config a model from the Hub."""
    for file in (tuned.parent / "model").iterdir():
        (tuned / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tuned / "forwardtune.json").read_text())
    (tuned / "forwardtune.json").write_text(json.dumps({**settings, "adapter": "none"}))
    with pytest.raises(
        ExperimentError, match=r"^tuned holds an adapter beside a model; merge them, or move .*json away$"
    ):
        predict("tuned", base="")
