"""Language models on plain texts: their loss against transformers' own, their perplexity, and what is refused."""

import json
import math
import re
import shlex

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from typer.testing import CliRunner

import forwardtune as ft
from forwardtune.cli.main import app
from forwardtune.cli.tuning import outcome
from forwardtune.errors import ExperimentError
from forwardtune.experiments import runner
from forwardtune.experiments.result import Curve
from forwardtune.finetuning.kept import Kept, kept
from forwardtune.tasks import Scores, Sources, TextWorkload, prepare
from forwardtune.tasks.texts.data import plain_texts
from forwardtune.tasks.texts.models import PretrainedModel
from forwardtune.tasks.texts.task import LanguageTask
from tests.helpers import tiny
from tests.helpers.comparisons import DATA, made_up, needs_data
from tests.helpers.texts import write_jsonl

LINES = [row["text"] for row in tiny.reviews(40)]


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny.causal(tmp_path / "model")
    (tmp_path / "texts.txt").write_text("\n\n".join(LINES) + "\n")
    return tmp_path


def workload(**changes):
    fixed = {"name": "w", "data": "texts", "network": "transformer", "weights": "model", "train": "texts.txt"}
    sizes = {"batch": 8, "seeds": (0,), "queries": 8, "evaluations": 2, "setup": "lm", "dtype": "float64"}
    return TextWorkload(**fixed | sizes | changes)


def ready(home, **changes):
    task = prepare(workload(**changes), Sources(DATA, home), "cpu")
    assert isinstance(task, LanguageTask)
    return task, task.make_base(home / "base.safetensors")


@torch.no_grad()
def by_transformers(task, model, text):
    """The loss of one text alone, as transformers computes it, and the number of its tokens."""
    ids = torch.tensor([task.setup.encode(text)[0]["input_ids"]])
    labels = ids.clone()
    labels[:, 0] = -100  # which only follows something where an adapter puts tokens in front
    return model(input_ids=ids, labels=labels).loss.double(), ids.shape[1] - 1


@pytest.mark.parametrize("adapter", ["none", "lora", "prompt", "prefix"])
def test_losses_are_those_of_transformers(home, adapter):
    """Whatever the padding: one by one, in buckets, and all in one pass."""
    task, model = ready(home, adapter=adapter)
    batch = task.batch(torch.arange(8))
    with torch.no_grad():
        losses = task.losses(model, batch)
        alone = torch.stack([task.losses(model, task.batch(torch.tensor([i])))[0] for i in range(8)])
        expected = torch.stack([by_transformers(task, model, text)[0] for text in task.texts.train[:8]])
        assert task.loss(model, batch).item() == pytest.approx(expected.mean().item(), rel=1e-6)
    assert losses.shape == (8,)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(losses, alone, rtol=1e-6, atol=0)
    assert len({len(rows[0]["input_ids"]) for rows in batch[0]}) > 3
    assert losses.std() > 0.1


def test_an_evaluation_is_over_all_tokens(home):
    task, model = ready(home)
    scores = task.evaluate(model)
    for loss, texts in ((scores.train_loss, task.texts.train), (scores.test_loss, task.texts.test)):
        means, counts = zip(*(by_transformers(task, model, text) for text in texts), strict=True)
        total = sum(mean.item() * n for mean, n in zip(means, counts, strict=True))
        assert loss == pytest.approx(total / sum(counts), rel=1e-6)
    assert scores.metrics == {"perplexity": pytest.approx(math.exp(scores.test_loss))}
    assert task.guessing == math.log(64)
    assert task.majority is None
    assert task.metrics == ("perplexity",)


def test_16_bits_have_losses_in_32(home):
    task, model = ready(home, dtype="bfloat16")
    with torch.no_grad():
        losses, first = (
            task.losses(model, task.batch(torch.arange(8))),
            task.batch(torch.arange(1))[0][0][0]["input_ids"],
        )
        logits = model(input_ids=torch.tensor([first])).logits[0, :-1]
    assert losses.dtype == torch.float32
    assert losses[0].item() == pytest.approx(F.cross_entropy(logits.float(), torch.tensor(first[1:])).item(), rel=2e-2)


def test_texts_begin_with_the_first_token_and_are_cut(home):
    task, _ = ready(home, max_length=8)
    words = ["film", "plot", "music", "scene"]
    (row,) = task.setup.encode((" ".join(words * 5),))
    assert row["input_ids"] == [1, *task.language.tokenizer(" ".join(words * 2))["input_ids"]][:8]
    assert task.setup.encode(("film",))[0]["input_ids"] == [1, task.language.tokenizer("film")["input_ids"][0]]
    assert task.setup.encode(("a film", "it was"))[0] == task.setup.encode(("a film it was",))[0]


def test_lines_and_tables_are_the_same_texts(home):
    """Without a test file a tenth is held out, always the same."""
    write_jsonl(home / "texts.jsonl", [{"body": line} for line in LINES])
    lines = plain_texts(home / "texts.txt", None, ("text",))
    table = plain_texts(home / "texts.jsonl", None, ("body",))
    assert (lines.train, lines.test) == (table.train, table.test)
    assert sorted([*lines.train, *lines.test]) == sorted((line,) for line in LINES)
    assert len(lines.test) == 4
    assert lines.note == "4 of the examples in texts.txt are held out for testing"
    assert all(f"line {1 + 2 * LINES.index(lines.test[i][0])}" in place for i, place in enumerate(lines.places[1]))
    apart = plain_texts(home / "texts.txt", home / "texts.txt", ("text",))
    assert apart.train == apart.test == [(line,) for line in LINES]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"setup": ""}, 'plain texts have no labels: they go with setup = "lm"'),
        ({"label": "label"}, "label does not apply to texts"),
        ({"train": ""}, "texts from files need 'train'"),
        ({"words": ("a", "b")}, "a language model on plain texts uses no template and no words"),
        ({"objective": "accuracy"}, "texts without labels have no accuracy"),
        ({"data": "files", "text": ("text",), "label": "label"}, 'needs no labels; name its texts with data = "texts"'),
    ],
)
def test_workloads_are_checked(changes, complaint):
    with pytest.raises(ExperimentError, match=complaint):
        workload(**changes)


@pytest.mark.parametrize("kind", ["encoder", "masked"])
def test_only_causal_models_continue_texts(home, kind):
    tiny.encoder(home / kind, masked=kind == "masked")
    with pytest.raises(
        ExperimentError, match=rf"{kind} \(Bert.*does not continue texts .* needs a causal language model"
    ):
        ready(home, weights=kind)


def test_a_text_with_nothing_to_predict_is_named(home):
    (home / "texts.csv").write_text('text\na film\n" "\n' + "a plot\n" * 20)
    with pytest.raises(ExperimentError, match=r"texts.csv, line 3: the text '' is too short: .* leave it out"):
        ready(home, train="texts.csv")
    (home / "texts.txt").write_text("a film\nfilm\n" + "a plot\n" * 20)
    ready(home)  # the first token is followed by this one
    tokenizer = tiny.tokenizer()
    tokenizer.bos_token = None
    tokenizer.save_pretrained(home / "model")
    with pytest.raises(ExperimentError, match=r"texts.txt, line 2: the text 'film' is too short"):
        ready(home)
    (home / "texts.txt").write_text("a film\n")
    with pytest.raises(ExperimentError, match="there is only one example, so none can be held out"):
        ready(home)


@needs_data
def test_sentences_of_a_task_are_texts(home):
    """Both of a pair, without labels; a language model of stories knows stories better."""
    task, model = ready(home, data="mrpc", train="", weights="weights/stories15M", dtype="float32", test_examples=4)
    text = task.texts.train[0]
    assert len(text) == 2
    tokenizer = task.language.tokenizer
    assert task.setup.encode(text)[0]["input_ids"] == [tokenizer.bos_token_id, *tokenizer(" ".join(text))["input_ids"]]
    expected, _ = by_transformers(task, model, text)
    with torch.no_grad():
        assert task.losses(model, task.batch(torch.tensor([0]))).item() == pytest.approx(expected.item(), rel=1e-5)
        known = -task.setup.logits(model, [task.setup.encode(("Once upon a time, there was a little girl.",))]).item()
    assert known < 1 < expected < task.guessing
    assert task.texts.classes == ()


def evaluated(*perplexities):
    scores = tuple(Scores(math.log(p), math.log(p), {"perplexity": p}) for p in perplexities)
    return made_up(Curve(tuple(10 * i for i in range(len(scores))), scores), metrics=("perplexity",))


def test_the_lowest_perplexity_is_the_best():
    result = evaluated(30.0, 25.0, 20.0, math.nan, 22.0)
    best = kept(result, "best")
    assert (best.queries, best.scores.metrics["perplexity"]) == (20, 20.0)
    told = [line for line, _ in outcome(result, best, 2)]
    assert told == [
        "test perplexity 30 to 20",
        "saved is the best evaluation, after 20 queries; the last has perplexity 22",
    ]
    worse = evaluated(30.0, 40.0)
    told = dict(outcome(worse, Kept(10, worse.final, True), 2))
    assert told["the test perplexity ended above where it began: 30 to 40"] == "red"
    assert kept(worse, "best").queries == 0


def run(*command):
    done = CliRunner().invoke(app, [word for part in command for word in shlex.split(part)])
    if done.exception:
        raise done.exception
    return done.stdout


LENGTH = "--queries 240 --evaluations 4 --threads 1 --batch 8"


@pytest.mark.parametrize("more", ["--lr 3", "--directions per-example", "--directions auto --adapter lora"])
def test_a_model_is_adapted_and_asked(home, monkeypatch, more):
    said = run("finetune --model model --objective lm --train texts.txt --test texts.txt", LENGTH, more)
    result = json.loads(next((home / "tuned" / "run" / "runs").glob("*.json")).read_text())
    settings = json.loads((home / "tuned" / "forwardtune.json").read_text())
    curve = result["curve"]["perplexity"]
    assert settings["final"]["perplexity"] == min(curve) < curve[0]
    assert settings["setup"] == "lm"
    before = list(result["base"].get("before", {}).values())  # an adapter has no norm to fit
    assert bool(before) == ("adapter" not in more)
    assert all(perplexity > curve[0] for perplexity in before)
    stages = [f"{perplexity:.4g}" for perplexity in (*before, curve[0], min(curve))]
    assert f"test perplexity {' to '.join(stages)}" in said
    assert ("agreement" in result) == ("directions" in more)
    card = (home / "tuned" / "README.md").read_text()
    assert f"| perplexity | {' | '.join(stages)} |" in card
    assert "On 40 test examples:\n" in card
    assert "text-generation" in card
    # What it answers is what was evaluated.
    base = " --base model" if "adapter" in more else ""
    answers = [json.loads(line) for line in run(f"predict --model tuned --input texts.txt{base}").splitlines()]
    tokens = sum(row["tokens"] for row in answers)
    mean = sum(row["tokens"] * math.log(row["perplexity"]) for row in answers) / tokens
    assert math.exp(mean) == pytest.approx(min(curve), rel=1e-5)
    one = json.loads(run(f"predict --model tuned --text '{LINES[0]}'{base}"))
    assert one["perplexity"] == pytest.approx(answers[0]["perplexity"], rel=1e-5)
    # The command on the card makes it once more.
    (command,) = re.findall(r"^forwardtune (replay .*)$", card, re.MULTILINE)
    monkeypatch.chdir(home / "tuned")
    run(command)
    name = "adapter_model.safetensors" if "adapter" in more else "model.safetensors"
    saved, again = (load_file(home / "tuned" / part / name) for part in (".", "again"))
    assert all(torch.equal(saved[key], again[key]) for key in saved)
    assert ft.ledger.read(home / "tuned" / "run.ledger").end > 0


def test_lines_of_their_own_are_as_good_as_one_for_all(home):
    """A step along a common line gives the same loss by either closure."""
    task, model = ready(home)
    batch = task.batch(torch.arange(8))
    losses = {}
    for directions, closure in ((1, task.loss), ("per-example", task.losses)):
        optimizer = ft.VS2P(model.named_parameters(), lr=1e-9, rho=1e-9, directions=directions)
        losses[directions] = optimizer.step(lambda closure=closure: closure(model, batch)).item()
    assert losses[1] == pytest.approx(losses["per-example"], rel=1e-5)


def test_a_run_is_planned_and_resumed(home, monkeypatch):
    command = "finetune --model model --objective lm --train texts.txt --minutes 0.1 --batch 8 --evaluations 2 --quiet"
    step, made = runner._LineSearchUnderWay._step, []

    def interrupted(self, *others):
        made.append(1)
        if len(made) == 17:
            raise KeyboardInterrupt
        return step(self, *others)

    monkeypatch.setattr(runner._LineSearchUnderWay, "_step", interrupted)
    assert CliRunner().invoke(app, shlex.split(command)).exit_code == 130
    assert "saved: tuned" in run(command)
    (result,) = (json.loads(file.read_text()) for file in (home / "tuned" / "run" / "runs").glob("*.json"))
    assert result["circumstances"]["sessions"] == 2
    assert result["queries"] >= 60


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("--train texts.txt --objective lm --label-column label", "leave --label-column and other setups out"),
        ("--train texts.txt --objective lm --setup head", "leave --label-column and other setups out"),
        ("--train texts.txt --objective lm --word a --word b", "uses no template and no words"),
        ("--train texts.txt --objective lm --text-column body", "there is no column 'body', only 'text'"),
        ("--train texts.txt", "texts without labels; add --objective lm"),
        ("--train none.txt --objective lm", "there is no file at .*none.txt"),
    ],
)
def test_bad_input_is_told(home, command, complaint):
    with pytest.raises(ExperimentError, match=complaint):
        run("finetune --model model", command)


def test_a_short_text_is_not_measured(home):
    run("finetune --model model --objective lm --train texts.txt --quiet --lr 1", LENGTH)
    with pytest.raises(ExperimentError, match="the text '' is too short"):
        run("predict --model tuned --text ''")


def test_a_model_of_classes_reads_lines_too(home):
    write_jsonl(home / "train.jsonl", tiny.reviews(40))
    run("finetune --model model --train train.jsonl --word bad --word good --quiet --lr 1", LENGTH)
    answers = [json.loads(line) for line in run("predict --model tuned --input texts.txt").splitlines()]
    assert [row["text"] for row in answers] == LINES
    assert {row["prediction"] for row in answers} <= {"neg", "pos"}


def test_the_setup_is_a_question_of_the_model(home):
    assert PretrainedModel(home / "model", "lm").setup((), "", (), 32).answers == 1
