"""Tasks of texts: objectives, scores, base weights, and what a workload may say."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from forwardtune.errors import ExperimentError
from forwardtune.tasks import Sources, TextWorkload, prepare
from forwardtune.tasks.texts.data import Texts
from tests.helpers.comparisons import DATA, needs_data
from tests.helpers.texts import models_and_tables, task_of, workload


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return models_and_tables(tmp_path_factory.mktemp("models"))


def test_scores_are_between_two_answers(folder):
    """A score of 0 is the first answer, of 5 the second."""
    task = task_of(folder, "encoder", "pairs.jsonl")
    scores = torch.tensor([0.0, 5.0, 2.5])
    task.texts = Texts(("a", "b"), (), task.texts.train, scores, [], torch.tensor([]), high=5.0)
    logits = torch.tensor([[2.0, -1.0], [0.5, 3.0], [1.0, 1.0]])
    p = logits.softmax(1)[:, 1]
    expected = -(torch.log(1 - p[0]) + torch.log(p[1]) + 0.5 * torch.log(p[2] * (1 - p[2]))) / 3
    torch.testing.assert_close(task._objective(logits, scores), expected)
    torch.testing.assert_close(task.answer(logits), 5 * p)
    torch.testing.assert_close(task.answer(logits[:, :1]), logits[:, 0])
    torch.testing.assert_close(task._objective(logits[:, :1], scores), F.mse_loss(logits[:, 0], scores))


@pytest.mark.parametrize(("objective", "expected"), [("accuracy", 1 - 5 / 8), ("f1", 1 - 2 * 2 / (2 * 2 + 2 + 1))])
def test_objectives_without_gradients(folder, objective, expected):
    task = task_of(folder, "causal", objective=objective)
    actual = torch.tensor([1, 1, 1, 0, 0, 0, 0, 0])
    chosen = torch.tensor([1, 1, 0, 1, 1, 0, 0, 0])
    assert task._objective(F.one_hot(chosen, 2).double(), actual).item() == pytest.approx(expected)


def test_an_evaluation_is_over_all_its_examples(tmp_path, folder):
    task = task_of(folder, "causal")
    model = task.make_base(tmp_path / "base.safetensors")
    with torch.no_grad():
        logits = torch.cat([task.setup.logits(model, [task.setup.encode(text)]) for text in task.texts.test])
    scores = task.evaluate(model)
    assert scores.test_loss == pytest.approx(F.cross_entropy(logits, task.texts.test_y).item(), rel=1e-5)
    assert scores.metrics.keys() == {"accuracy", "f1"}
    assert scores.metrics["accuracy"] == (logits.argmax(1) == task.texts.test_y).double().mean().item()
    assert task.majority == task.data.majority == 0.5


@pytest.mark.parametrize("changes", [{}, {"setup": "head"}, {"adapter": "lora"}])
def test_the_base_is_what_the_models_files_lack(tmp_path, folder, changes):
    """Every run starts from the same weights, those of a new head or adapter included."""
    task = task_of(folder, "causal", **changes)
    made = task.make_base(tmp_path / "base.safetensors")
    started = task.start(tmp_path / "base.safetensors")
    for (name, p), q in zip(made.named_parameters(), started.parameters(), strict=True):
        assert torch.equal(p, q), name
    adapter = {name for name, p in made.named_parameters() if p.requires_grad}
    lacking = {(): set(), ("setup",): {"score.weight"}, ("adapter",): adapter}
    assert load_file(tmp_path / "base.safetensors").keys() == lacking[*changes]


@pytest.mark.parametrize(
    ("model", "changes"), [("causal", {}), ("encoder", {"template": "{text}"}), ("causal", {"adapter": "lora"})]
)
def test_a_fitted_head_tells_classes_apart_before_the_runs_begin(tmp_path, folder, model, changes):
    """And is all that is new in the base."""
    losses = []
    for fit in (0, 70):
        task = task_of(folder, model, setup="head", fit=fit, **changes)
        made = task.make_base(tmp_path / f"{fit}.safetensors")
        started = task.start(tmp_path / f"{fit}.safetensors")
        losses.append(task.evaluate(started).train_loss)
        for (name, p), q in zip(made.named_parameters(), started.parameters(), strict=True):
            assert torch.equal(p, q), name
    assert losses[1] < min(losses[0], 0.69)
    assert load_file(tmp_path / "0.safetensors").keys() == load_file(tmp_path / "70.safetensors").keys()


def test_a_head_that_a_model_brings_is_not_fitted_again(tmp_path, folder):
    task = task_of(folder, "causal", setup="head")
    task.make_base(tmp_path / "base.safetensors").save_pretrained(tmp_path / "headed")
    task.language.tokenizer.save_pretrained(tmp_path / "headed")
    (tmp_path / "reviews.jsonl").write_text((folder / "reviews.jsonl").read_text())
    headed = task_of(tmp_path, "headed", setup="head", fit=40)
    made, expected = headed.make_base(tmp_path / "new.safetensors"), load_file(tmp_path / "base.safetensors")
    assert torch.equal(made.get_parameter("score.weight"), expected["score.weight"])
    assert not load_file(tmp_path / "new.safetensors")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"train": ""}, "texts from files need 'train'"),
        ({"text": ("a", "b", "c")}, "one text or two, not 3"),
        ({"setup": "magic"}, "setup 'magic' is not known"),
        ({"setup": "head", "words": ("bad", "good")}, "a head uses no words"),
        ({"fit": 5}, "fit must be 0 or a number of examples, at least 10, not 5"),
        ({"adapter": "loar"}, r"adapter 'loar' is not known \(did you mean 'lora'\?\)"),
        ({"objective": "recall"}, "objective 'recall' is not known"),
        ({"max_length": 4}, "max_length must be at least 8"),
        ({"data": "sst2"}, "train does not apply to sst2"),
        ({"data": "mnist"}, "data 'mnist' is not known"),
        ({"network": "resnet18"}, "network 'resnet18' is not known"),
    ],
)
def test_workloads_of_texts_are_checked(changes, complaint):
    with pytest.raises(ExperimentError, match=complaint):
        workload("causal", **changes)


def test_scores_have_no_accuracy():
    given = {"name": "w", "data": "stsb", "network": "transformer", "weights": "m", "batch": 8, "seeds": (0,)}
    with pytest.raises(ExperimentError, match="stsb asks for scores, which have no accuracy"):
        TextWorkload(**given, queries=8, objective="accuracy")


@needs_data
def test_a_pretrained_model_knows_something_before_it_is_tuned(tmp_path):
    """Which is what the prompt is for: with a new head the same model guesses."""
    accuracies = {}
    for setup in ("prompt", "head"):
        given = {"name": "sst2", "data": "sst2", "network": "transformer", "weights": "weights/stories15M", "batch": 8}
        more = {"setup": setup, "pad_token": "</s>", "train_examples": 8, "test_examples": 300, "queries": 8}
        task = prepare(TextWorkload(**given | more, seeds=(0,)), Sources(DATA), "cpu")
        accuracies[setup] = task.evaluate(task.make_base(tmp_path / f"{setup}.safetensors")).metrics["accuracy"]
    assert accuracies["prompt"] > 0.57
    assert accuracies["head"] < 0.57
