"""Files from anyone: what is wrong with them is told in a sentence, soon, and nothing in them is obeyed."""

from __future__ import annotations

import json
import math
import shlex
import socket
import sys
import time

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save
from typer.testing import CliRunner

import forwardtune as ft
from forwardtune.cli.main import app, main
from forwardtune.errors import LONGEST, ExperimentError, LedgerError, warn
from forwardtune.experiments import spec as specs
from forwardtune.experiments.store import Store
from forwardtune.finetuning.tuned import read_settings
from forwardtune.ledger.format import checksum
from forwardtune.tasks.texts.data import rows, texts_of
from tests import fuzz
from tests.helpers import tiny
from tests.helpers.runs import recorded

ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"
EXAMPLES = {"ledger": 40, "settings": 60}
"""Of the slower readers; of the others 100."""


@pytest.mark.parametrize("name", fuzz.READERS)
def test_nothing_but_an_error_of_ours_leaves_a_reader(tmp_path, name):
    outcomes = fuzz.fuzz(fuzz.READERS[name](tmp_path), EXAMPLES.get(name, 100))
    assert outcomes["refused"] > outcomes["accepted"] > 0


# A tuned model


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """A whole model in a folder as `finetune` leaves it, on a machine without a network."""
    monkeypatch.chdir(tmp_path)
    folder = tiny.causal(tmp_path / "tuned")
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("the network was asked"))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("the network was asked"))
    write(folder)
    return folder


def write(folder, **changes):
    table = {**fuzz.SETTINGS, **changes}
    (folder / "forwardtune.json").write_text(json.dumps({name: value for name, value in table.items() if value != ...}))


def run(command, **options):
    done = CliRunner().invoke(app, shlex.split(command), **options)
    if done.exception:
        raise done.exception
    return done.stdout


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"words": ...}, "lacks 'words'; tune the model again"),
        ({"dtype": "load"}, "dtype 'load' is not known; choose one of float32"),
        ({"max_length": "64"}, "max_length must be a whole number, not '64'"),
        ({"max_length": -1}, "max_length must be at least 1, not -1"),
        ({"columns": "text"}, r"columns must be a list with at least one entry, not 'text'"),
        ({"words": ["good"]}, "there are 1 words for 2 classes"),
        ({"low": math.inf}, "low must be finite, not inf"),
        ({"model": None}, "model must be text, not None"),
        ({"setup": [[[]]]}, r"setup must be text, not \[\[\[\]\]\]"),
        ({"format": "1"}, "was written by another version"),
    ],
)
def test_what_a_tuned_model_says_of_itself_is_checked(tuned, changes, message):
    write(tuned, **changes)
    with pytest.raises(ExperimentError, match=rf"forwardtune\.json.*{message}"):
        run("predict --model tuned --text film")


def test_the_template_of_a_head_in_format_1_had_no_effect(tuned):
    write(tuned, setup="head")
    assert read_settings(tuned).template == "{text} It was"
    write(tuned, setup="head", format=1)
    assert read_settings(tuned).template == ""
    write(tuned, format=1)
    assert read_settings(tuned).template == "{text} It was"


def test_a_deeply_nested_file_is_an_error(tuned):
    for text in ("[" * 100_000, '{"a":' * 100_000, "[" * 100 + "]" * 100):
        (tuned / "forwardtune.json").write_text(text)
        with pytest.raises(ExperimentError, match=r"cannot be read .it is nested too deeply"):
            read_settings(tuned)


@pytest.mark.parametrize("said", ["gpt2", "../other", "/etc", "package:os"])
def test_a_base_is_where_the_user_says_and_never_where_a_file_does(tuned, said):
    write(tuned, adapter="lora", model=said)
    for command in ("predict --model tuned --text film", "replay --model tuned --out again"):
        with pytest.raises(
            ExperimentError,
            match=f"does not hold its base, which was {said} when it was tuned; name one that you trust",
        ):
            run(command)
    with pytest.raises(ExperimentError, match=r"there is no model at gpt2: .*with --download"):
        run("predict --model tuned --text film --base gpt2")
    write(tuned)
    with pytest.raises(ExperimentError, match="holds a whole model, which needs no base"):
        run("predict --model tuned --text film --base gpt2")


def test_code_in_a_model_folder_is_not_run_and_the_network_not_asked(tuned):
    """Not even on a "y": nobody is asked."""
    (tuned / "evil.py").write_text(
        "open('owned', 'w')\nfrom transformers import LlamaConfig as Config\nModel = Config\n"
    )
    kinds = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer")
    for name in ("config.json", "tokenizer_config.json"):
        table = json.loads((tuned / name).read_text())
        table |= {"auto_map": dict.fromkeys(kinds, "evil.Model"), "_name_or_path": "stranger/model"}
        (tuned / name).write_text(json.dumps(table))
    answer = json.loads(run("predict --model tuned --text film", input="y\n"))
    assert answer["prediction"] in ("neg", "pos")
    table |= {"model_type": "unheard-of"}
    config = json.loads((tuned / "config.json").read_text())
    (tuned / "config.json").write_text(json.dumps({**config, "model_type": "unheard-of"}))
    with pytest.raises(ExperimentError, match="the config of the model tuned cannot be loaded"):
        run("predict --model tuned --text film", input="y\n")
    assert not (tuned.parent / "owned").exists()


# What reaches a terminal


def test_what_a_file_says_is_not_obeyed_by_the_terminal(tuned, monkeypatch, capsys):
    shown = "?]0;owned??[2J?31m?"
    with pytest.warns(RuntimeWarning, match="^a \\?\\]0;owned"):
        warn(f"a {ESCAPES}")
    assert str(LedgerError(f"a {ESCAPES}")) == f"a {shown}"
    assert len(str(LedgerError("x" * 10**6))) == LONGEST + 5
    (tuned.parent / "film.csv").write_text(f"text,{ESCAPES}\na film\n")
    monkeypatch.setattr(sys, "argv", ["forwardtune", "predict", "--model", "tuned", "--input", "film.csv"])
    (tuned.parent / "film.csv").write_text(f"te{ESCAPES}xt\na film\n")
    with pytest.raises(SystemExit):
        main()
    told = capsys.readouterr().err
    assert told.replace("\n", "").isprintable()
    assert "there is no column 'text', only 'te" in told


def test_a_prediction_has_escapes_for_what_it_cannot_show(tuned):
    (tuned.parent / "film.jsonl").write_text(json.dumps({"text": f"a film{ESCAPES}"}) + "\n")
    said = run("predict --model tuned --input film.jsonl")
    assert said.replace("\n", "").isprintable()
    assert json.loads(said)["text"] == f"a film{ESCAPES}"


def test_the_header_of_a_ledger_is_shown_as_it_can_be(tmp_path):
    _, optimizer, _ = recorded(tmp_path / "run.ledger", steps=2)
    optimizer.recorder.close()
    change = lambda document: {**document, "header": {**document["header"], "version": ESCAPES, "method": "[red]x"}}  # noqa: E731
    (tmp_path / "odd.ledger").write_bytes(fuzz.encoded(change(fuzz.document_of(tmp_path / "run.ledger"))))
    said = run(f"ledger show {tmp_path}/odd.ledger")
    assert said.replace("\n", "").isprintable()
    assert "[red]x (lr 4" in said


# Results, specs, tables


def test_a_result_that_is_wrong_is_named(tmp_path):
    reader = fuzz.Result(tmp_path)
    document, file = reader.document(reader.run), reader.store.runs / f"{reader.run.id}.json"
    for changes, message in [
        ({"queries": math.nan}, "queries must be a whole number, not nan"),
        ({"final": {**document["final"], "train_loss": math.inf}}, "final: train_loss must be finite, not inf"),
        ({"final": {"train_loss": 1.0, "test_loss": 1.0}}, "has no accuracy among its scores"),
        ({"curve": {**document["curve"], "accuracy": [1.0]}}, "curve has columns of different lengths"),
        ({"data": {}}, "data has no 'name'"),
        ({"status": "lost"}, "status 'lost' is not known"),
    ]:
        file.write_text(json.dumps({**document, **changes}))
        with pytest.raises(ExperimentError, match=rf"{file}.*{message}.*; move it away to run it again"):
            Store(reader.store.folder).result(reader.run.id)
    file.write_text(json.dumps({name: value for name, value in document.items() if name != "run"}))
    with pytest.raises(ExperimentError, match=f"{file} has no 'run'; move it away"):
        reader.store.result(reader.run.id)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("batch = 8", "batch = 8\nrho = " + "[" * 100_000), "is not TOML"),
        (("batch = 8", "batch = 8\nrho = " + "[" * 200 + "]" * 200), "is not TOML: it is nested too deeply"),
        (("queries = 60", "queries = " + "9" * 5000), "is not TOML: Exceeds the limit"),
        (('title = "a test"', 'title = "\\u001b[2J"\nunknown = 1'), "the key 'unknown' is not known"),
        (("lr = [1.0]", 'lr = ["auto"]'), "lr must be a list of rates"),
        (("lr = [1.0]", "lr = []"), "lr must be a list with at least one entry"),
        (("lr = [1.0]", f"lr = [{'9' * 400}]"), "lr must be a number, not 999"),
    ],
)
def test_a_spec_that_is_wrong_is_an_error(tmp_path, change, message):
    text = fuzz.as_toml(fuzz.SPEC).decode().replace('"', "", 0)
    plain = text.replace('"batch"', "batch").replace('"queries"', "queries").replace('"title"', "title")
    plain = plain.replace('"lr"', "lr")
    assert change[0] in plain
    with pytest.raises(ExperimentError, match=message):
        specs.parse(plain.replace(*change, 1), "test", tmp_path)


def test_a_spec_is_read_without_making_its_steps(tmp_path):
    """A step along 65,536 lines makes as many searches; the budget may be beyond all floats."""
    spec = {**fuzz.SPEC, "queries": 10**400, "methods": [{"method": "VS2P", "lr": [1.0], "directions": 2**16}]}
    start = time.process_time()
    parsed = specs.parse(fuzz.as_toml(spec).decode(), "test", tmp_path)
    assert time.process_time() - start < 0.5
    assert parsed.methods[0].queries_per_step == 2 * 2**16
    assert specs.steps(parsed.workloads[0], parsed.methods[0], 10**400) == 10**400 // 2**17
    start = time.process_time()
    with pytest.raises(ExperimentError, match="two methods are called 'VS2P'; give each a label of its own"):
        specs.parse(fuzz.as_toml({**spec, "methods": 2000 * spec["methods"]}).decode(), "test", tmp_path)
    assert time.process_time() - start < 0.5
    spec["methods"][0]["directions"] += 1
    with pytest.raises(ExperimentError, match="direction must be an integer from 0 to 65535"):
        specs.parse(fuzz.as_toml(spec).decode(), "test", tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"text,label,text\na,1,b\n", r"a\.csv has 2 columns called 'text'; give each a name of its own"),
        ("a.tsv", b"text\tlabel\tlabel\na\t1\tb\n", r"a\.tsv has 2 columns called 'label'"),
        ("a.jsonl", b'{"text": "a", "text": "b"}\n', r"line 1 is not JSON .it has 'text' twice in one object"),
        ("a.jsonl", b"[" * 100_000, r"line 1 is not JSON .it is nested too deeply"),
        ("a.jsonl", b'{"text": "a\\ud800"}\n', r"line 1: the cell of 'text' holds half a character"),
        ("a.jsonl", b'{"text": ["a"]}\n', r"line 1: the cell of 'text' is not a text or a number, but \['a'\]"),
        ("a.csv", "text\nä\n".encode("utf-16"), "cannot be read .'utf-8' codec"),
    ],
)
def test_a_table_that_is_wrong_is_an_error(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ExperimentError, match=message):
        texts_of(rows(tmp_path / name), ("text",))


# Ledgers with sound checksums


def test_an_export_with_impossible_columns_is_refused_at_once(tmp_path):
    recorded(tmp_path / "run.ledger", steps=3)[1].recorder.close()
    ft.ledger.export(tmp_path / "run.ledger", tmp_path / "sound.safetensors")
    with safe_open(tmp_path / "sound.safetensors", "numpy") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = dict(file.metadata())
    header = json.loads(metadata["header"])
    many = {**header, "directions": 2**16, "groups": 300 * header["groups"]}
    for changes, columns, message in [
        ({"header": json.dumps(many)}, {}, "column visited.1 is missing"),
        ({"columns": "[]"}, {}, "'list' object has no attribute"),
        ({"columns": '{"t.0.0": ["loss"]}'}, {}, "unhashable type"),
        ({"columns": '{"t.0.0": "loss"}'}, {}, "column t.0.0 is a multiple of 'loss'"),
        ({"anchors": "[[1e400, 0]]"}, {}, "cannot convert float infinity"),
        ({"header": metadata["header"].replace('"queries":0', '"queries":-5')}, {}, "header is invalid .counters"),
        ({}, {"visited.0": np.array([-1])}, "column visited.0 has what is no count"),
        ({}, {"visited.0": np.array([2.0])}, "column visited.0 has what is no count"),
        ({}, {"kind": np.array([7])}, "kind 7"),
        ({}, {"t.0.0": np.array([math.nan])}, "offset nan"),
        ({}, {"visited.0": np.array([0])}, "0 of 1 directions"),
    ]:
        told = {**metadata, **changes}
        told["crc"] = str(checksum({**arrays, **columns}, told))
        (tmp_path / "odd.safetensors").write_bytes(save({**arrays, **columns}, told))
        start = time.process_time()
        with pytest.raises(LedgerError, match=message):
            list(ft.ledger.read(tmp_path / "odd.safetensors").records())
        assert time.process_time() - start < 0.5


@pytest.mark.filterwarnings("ignore:the run's generators and buffers are lost")
def test_a_live_ledger_with_impossible_values_is_refused(tmp_path):
    fuzz.RUNS["auto"](tmp_path / "run.ledger")
    sound = fuzz.document_of(tmp_path / "run.ledger")
    header, steps = sound["header"], sound["steps"]
    auto, group = header["auto"], header["groups"][0]

    def grouped(**changes):
        return {"groups": [{**group, **changes}, *header["groups"][1:]]}

    for changes, message in [
        (grouped(memory={"recent": [[[1e999]], {"a": 1}]}), "a group's settings"),
        (grouped(memory={"recent": 5}), "can be replayed but not resumed"),
        (grouped(settings={**group["settings"], "tau_a": -1.0}), "cannot be built again: tau_a must be"),
        (grouped(settings={**group["settings"], "params": 1}), "a group's settings"),
        ({"auto": {**auto, "losses": 3}}, "auto"),
        ({"auto": {**auto, "trail": [[0, [[1e30, 0.0]], 0]]}}, "auto"),
        ({"queries": 2**60}, "counters"),
        ({"parameters": [{**header["parameters"][0], "scale": 1e300}]}, "scale 1e.300"),
    ]:
        (tmp_path / "odd.ledger").write_bytes(fuzz.encoded({**sound, "header": {**header, **changes}}))
        with pytest.raises(LedgerError, match=message):
            ft.resume(fuzz.Net(), tmp_path / "odd.ledger", repair=True)
        (tmp_path / "odd.ledger.damaged").unlink(missing_ok=True)
    for numbers, message in [
        ([0.0, 2.5, *steps[0]["numbers"][2:]], "step 0 .* is invalid .2.5 queries"),
        ([0.0, 2.0**60, *steps[0]["numbers"][2:]], r"step 0 .* is invalid .1.15292e\+18 queries"),
    ]:
        odd = {**sound, "steps": [{"numbers": numbers, "settings": None}, *steps[1:]]}
        (tmp_path / "odd.ledger").write_bytes(fuzz.encoded(odd))
        done = CliRunner().invoke(app, ["ledger", "verify", str(tmp_path / "odd.ledger")])
        with pytest.raises(LedgerError, match=message):
            raise done.exception
