"""A full disk: one sentence that names the file, nothing half-written, and the same command finishes with room."""

import errno
import shutil
from pathlib import Path

import pytest
from safetensors import SafetensorError
from safetensors.torch import load_file
from typer.testing import CliRunner

from forwardtune.cli.main import app
from forwardtune.errors import ForwardTuneError
from forwardtune.files import create_file, filled, replace_file, write_text
from tests.helpers import tiny
from tests.helpers.texts import write_jsonl

FULL = "No space left on device"


def full(*_, **__):
    raise OSError(errno.ENOSPC, FULL)


def serialize_file_full(*_, **__):
    """As safetensors fails on a disk that is full."""
    raise SafetensorError(f"Error while serializing: I/O error: {FULL} (os error 28)")


def invoke(command):
    done = CliRunner().invoke(app, command)
    if done.exception:
        raise done.exception
    return done.stdout


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny.causal(tmp_path / "model")
    write_jsonl(tmp_path / "train.jsonl", tiny.reviews(30))
    return tmp_path


def finetune(out, *more):
    question = ["--template", "{text} It was", "--word", "bad", "--word", "good"]
    length = ["--steps", "6", "--lr", "1", "--evaluations", "1", "--threads", "1", "--keep", "last", "--quiet"]
    return invoke(
        ["finetune", "--model", "model", "--train", "train.jsonl", *question, *length, "--out", str(out), *more]
    )


def tuned(out):
    return {file.name: file.read_bytes() for file in out.iterdir() if file.is_file() and file.name != "README.md"}


def test_finetune_on_a_full_disk_loses_nothing(home):
    """Each write of its result fails in turn: that of the base, the weights, the tokenizer, the card, the settings."""
    finetune("whole")
    assert (home / "whole" / "model.safetensors").exists()
    for number, (what, failing, named) in enumerate([
        ("safetensors.torch.serialize_file", serialize_file_full, "bases/"),
        ("transformers.modeling_utils.safe_save_file", serialize_file_full, "tuned0 cannot be written"),
        ("transformers.PreTrainedTokenizerBase.save_pretrained", full, "tuned0"),
        ("forwardtune.finetuning.tune.write_text", full, "tuned0"),
        ("forwardtune.finetuning.tune.ledgers.export", full, "tuned0"),
        ("forwardtune.finetuning.tune.write_json", full, "tuned0"),
    ]):  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(what, failing)
            with pytest.raises(ForwardTuneError, match=FULL) as error:
                finetune("tuned0")
        assert named in str(error.value)
        assert "\n" not in str(error.value)
        assert not (home / "tuned0" / "forwardtune.json").exists()
        assert not (home / "tuned0" / ".new").exists()
        if number < 4:
            assert not list((home / "tuned0").glob("*.safetensors"))
    finetune("tuned0")
    ours, theirs = tuned(home / "tuned0"), tuned(home / "whole")
    assert ours.keys() == theirs.keys()
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert ours[name] == theirs[name]


def test_a_replay_of_a_tuned_model_leaves_no_part_of_a_folder(home):
    finetune("tuned")
    command = ["replay", "--model", "tuned", "--base", "model", "--out", "again"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.modeling_utils.safe_save_file", serialize_file_full)
        with pytest.raises(ForwardTuneError, match=f"again cannot be written .*{FULL}"):
            invoke(command)
    assert not [file for file in home.iterdir() if "again" in file.name]
    invoke(command)
    ours, theirs = (load_file(home / name / "model.safetensors") for name in ("again", "tuned"))
    assert all(ours[name].equal(theirs[name]) for name in theirs)


def test_a_copy_of_the_ledger_is_whole_or_not_there(home, monkeypatch):
    finetune("tuned")
    monkeypatch.setattr("forwardtune.cli.finetune.copyfile", full)
    with pytest.raises(ForwardTuneError, match=f"copy.ledger cannot be written .*{FULL}: 'copy.ledger'"):
        finetune("tuned", "--ledger", "copy.ledger")
    assert not [file for file in home.iterdir() if "copy" in file.name]


def test_a_file_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    """The system does not say which file it was when a write fails, nor is it the temporary one that we mean."""
    file = tmp_path / "page.html"
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match=r"No space left on device: '[^']*/page\.html'$") as error:
        write_text(file, "text")
    assert error.value.filename == str(file)
    with pytest.raises(OSError, match=r"No such file or directory: '[^']*/missing'$"):  # not to be written, to be read
        replace_file(file, lambda new: shutil.copyfile(tmp_path / "missing", new))
    assert not list(tmp_path.iterdir())


def test_on_a_read_only_file_system_it_is_named_too(tmp_path, monkeypatch):
    """There even removing what is not there fails."""

    def read_only(path, *_, **__):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "write_text", read_only)
    monkeypatch.setattr(Path, "unlink", read_only)
    file = tmp_path / "page.html"
    for make in (replace_file, create_file):
        with pytest.raises(OSError, match=r"^\[Errno 30\] Read-only file system: '.*/page\.html'$"):
            make(file, lambda new: new.write_text("text"))
    assert not list(tmp_path.iterdir())


def test_a_folder_is_filled_whole_or_not_at_all(tmp_path):
    (tmp_path / "kept").write_text("old")
    (tmp_path / ".new").mkdir()
    (tmp_path / ".new" / "stale").write_text("of a process that was killed")

    def fill_in_part():
        with filled(tmp_path) as new:
            (new / "kept").write_text("new")
            full()

    with pytest.raises(OSError, match=FULL):
        fill_in_part()
    assert [file.name for file in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept").read_text() == "old"
    with filled(tmp_path) as new:
        (new / "kept").write_text("new")
        (new / "folder").mkdir()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["folder", "kept"]
    assert (tmp_path / "kept").read_text() == "new"
