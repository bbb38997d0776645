"""The Trainer along lines of examples' own: one loss per example, the steps of the plain loop, and what is refused."""

import pytest
import torch
import torch.nn.functional as F

import forwardtune as ft
from forwardtune._compat.transformers import transformers
from forwardtune.errors import InvalidArgumentError
from forwardtune.integrations.huggingface import ForwardTrainingArguments
from forwardtune.layers.perturbation import example_losses
from tests.helpers.trainers import causal, classifier, ragged, sentences, trained, trainer, weights

import peft  # isort: skip  (imports transformers, which must have been made importable)

OWN = {"directions": "per-example", "learning_rate": 0.5, "rho": None, "scale": "relative"}
AUTO = {"directions": "auto", "learning_rate": None, "rho": None, "scale": "relative"}


def with_lora(model, task):
    torch.manual_seed(7)
    return peft.get_peft_model(model, peft.LoraConfig(task_type=task, r=2)).double()


MODELS = {
    "causal": (causal, ragged),
    "causal with LoRA": (lambda: with_lora(causal(), "CAUSAL_LM"), ragged),
    "classifier": (classifier, sentences),
    "classifier with LoRA": (lambda: with_lora(classifier(), "SEQ_CLS"), sentences),
}


def batch_of(data):
    return transformers.default_data_collator(data)


def losses(folder, model, data, **settings):
    made = trainer(folder, model, data, **{**OWN, **settings})
    with torch.no_grad():
        return made._objective(made, model.eval(), [batch_of(data)])


@pytest.mark.parametrize("kind", ["causal", "causal with LoRA", "classifier", "score", "labels", "masked"])
@torch.no_grad()
def test_the_mean_of_the_losses_is_the_models_own(tmp_path, kind):
    """With as many labels for every example; a model of tokens computes its loss in float32."""
    tokens = [row["input_ids"] for row in sentences()]
    if kind == "score":
        model, data = classifier(num_labels=1), [{"input_ids": x, "labels": float(x[0]) / 64} for x in tokens]
    elif kind == "labels":
        model, data = classifier(classes=3), [{"input_ids": x, "labels": (x[:3] > 30).double()} for x in tokens]
    elif kind == "masked":
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        model = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=64, **sizes)).double()
        data = [{"input_ids": x, "labels": x.masked_fill(torch.arange(8) % 2 > 0, -100)} for x in tokens]
    elif kind == "classifier":
        model, data = classifier(classes=3), sentences(classes=3)
    else:
        model, data = MODELS[kind][0](), [{"input_ids": x, "labels": x} for x in tokens]
    model = model.eval()
    batch = batch_of(data)
    if kind == "labels":
        batch["labels"] = batch["labels"].double()
    made = trainer(tmp_path, model, data, **OWN)
    vector = made._objective(made, model, [batch])
    assert vector.shape == (64,)
    assert vector.std() > 1e-3
    assert vector.mean().item() == pytest.approx(model(**batch).loss.item(), rel=1e-5)
    alone = [made._objective(made, model, [{name: x[i : i + 1] for name, x in batch.items()}]) for i in range(3)]
    torch.testing.assert_close(vector[:3], torch.cat(alone), rtol=1e-6, atol=1e-8)


def test_examples_count_by_their_own_labels(tmp_path):
    """However many they have; one without any has a loss of zero."""
    data = ragged(8)
    data[2]["labels"] = torch.full((10,), -100)
    model = causal()
    vector = losses(tmp_path, model, data)
    assert vector[2] == 0
    with torch.no_grad():
        for i in (0, 1, 5):
            alone = model(input_ids=data[i]["input_ids"][None], labels=data[i]["labels"][None]).loss
            assert vector[i].item() == pytest.approx(alone.item(), rel=1e-5)


def test_the_accuracy_of_an_example_is_right_or_wrong(tmp_path):
    model, data = classifier(), sentences()
    vector = losses(tmp_path, model, data, objective="accuracy")
    with torch.no_grad():
        wrong = model(input_ids=torch.stack([row["input_ids"] for row in data])).logits.argmax(1)
    assert vector.tolist() == (wrong != torch.tensor([row["labels"] for row in data])).float().tolist()
    tokens = losses(tmp_path, causal(), ragged(8), objective="accuracy")
    assert tokens.shape == (8,)
    assert ((tokens >= 0) & (tokens <= 1)).all()


@pytest.mark.parametrize("kind", MODELS)
def test_the_trainer_takes_the_steps_of_the_plain_loop(tmp_path, kind):
    """Bit for bit, of VS2P by hand with the same losses."""
    make, rows = MODELS[kind]
    model, data = make(), rows()
    made = trainer(tmp_path, model, data, **OWN, lr_scheduler_type="constant", train_sampling_strategy="sequential")
    made.train()
    plain = make().train()
    tuned = [(name, p) for name, p in plain.named_parameters() if p.requires_grad]
    optimizer = ft.VS2P(tuned, lr=0.5, directions="per-example", seed=3)
    for step in range(10):
        batch = batch_of(data[16 * (step % 4) :][:16])

        def query(batch=batch):
            logits, labels = plain(input_ids=batch["input_ids"]).logits, batch["labels"]
            if labels.ndim == 1:
                return F.cross_entropy(logits, labels, reduction="none")
            known = [(x[y != -100], y[y != -100]) for x, y in zip(logits[:, :-1], labels[:, 1:], strict=True)]
            return torch.stack([F.cross_entropy(x, y, reduction="none").sum() / len(y) for x, y in known])

        loss = optimizer.step(query)
    assert torch.equal(weights(model), weights(plain))
    logged = [entry for entry in made.state.log_history if "loss" in entry]
    assert logged[-1]["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert logged[-1]["queries"] == 20
    assert "agreement" not in logged[-1]
    assert len(made._method.last_step.lines) == 16


@pytest.mark.parametrize(
    ("kind", "directions"), [*((kind, "per-example") for kind in MODELS), ("causal with LoRA", "auto")]
)
def test_training_lowers_the_loss(tmp_path, kind, directions):
    make, rows = MODELS[kind]
    settings = {**AUTO, "directions": directions, "max_steps": 120, "logging_steps": 10}
    made = trainer(tmp_path, make(), rows(), **settings, micro=64)
    made.train()
    logged = [entry for entry in made.state.log_history if "loss" in entry]
    assert logged[-1]["loss"] < logged[0]["loss"] - 0.008
    assert -1 <= logged[-1]["agreement"] <= 1


@pytest.mark.parametrize("settings", [OWN, AUTO], ids=["per-example", "auto"])
@pytest.mark.parametrize("kind", ["causal with LoRA", "classifier"])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, kind, settings, monkeypatch):
    monkeypatch.setattr("forwardtune.auto.SURVEYS", 1)
    monkeypatch.setattr("forwardtune.auto.SPAN", 2)
    make, rows = MODELS[kind]
    ledger = str(tmp_path / "run.ledger")
    settings = {**settings, "save_strategy": "steps", "save_steps": 4, "ledger": ledger}
    whole, again = make(), make()
    trainer(tmp_path, whole, rows(), **settings).train()
    trainer(tmp_path, again, rows(), **settings).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert torch.equal(weights(again), weights(whole))
    assert torch.equal(weights(ft.replay(make(), ledger)), weights(whole))


def test_an_objective_of_ones_own_returns_a_loss_per_example(tmp_path):
    def squares(model, batch):
        return (model(input_ids=batch["input_ids"]).logits[:, 0] - batch["labels"]).square()

    assert not torch.equal(
        trained(tmp_path, classifier(), sentences(), **OWN, objective=squares), weights(classifier())
    )
    for wrong, got in ((lambda *_: 1.0, "float"), (lambda *a: squares(*a).mean(), r"shape \(\)")):
        with pytest.raises(InvalidArgumentError, match=rf"one loss per example, .* shape \(16,\), not .*{got}"):
            trained(tmp_path, classifier(), sentences(), **OWN, objective=wrong)


def test_what_has_no_loss_per_example_is_refused(tmp_path):
    def refused(complaint, model=None, data=None, **settings):
        with pytest.raises(InvalidArgumentError, match=complaint):
            trainer(tmp_path, model or classifier(), data or sentences(), **OWN | settings).train()

    refused("a single example has no f1; minimize the loss", objective="f1")
    refused("label_smoothing_factor does not return; give an objective of your own", label_smoothing_factor=0.1)
    refused("compute_loss_func does not return; give an obj", more={"compute_loss_func": lambda *_, **__: 0})
    refused("every forward pass has the whole batch; leave gradient_accumulation_steps at 1", accumulation=2)
    refused("objective 'recall' is not known", objective="recall")
    floats = [{**row, "labels": float(row["labels"])} for row in sentences()]
    refused(r"not known for torch.float32 labels of shape \(16,\)", data=floats)
    refused("labels must be integers", data=floats, model=classifier(num_labels=1), objective="accuracy")
    unlabelled = [{"input_ids": row["input_ids"]} for row in sentences()]
    refused("do not have both; give an objective of your own", data=unlabelled)
    t5 = transformers.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    refused("not known for an encoder-decoder", model=transformers.T5ForConditionalGeneration(t5), data=ragged())
    made = trainer(tmp_path, classifier(), sentences())
    made.args._n_gpu = 2
    own = ft.VS2P(made.model.parameters(), lr=0.5, directions="per-example")
    with pytest.raises(InvalidArgumentError, match="train in one process on one device"):
        made.__class__(made.model, made.args, train_dataset=sentences(), optimizers=(own, None))


def test_directions_of_the_arguments(tmp_path):
    parser = transformers.HfArgumentParser(ForwardTrainingArguments)
    for text, meant in (("1", 1), ("4", 4), ("auto", "auto"), ("per-example", "per-example")):
        (parsed,) = parser.parse_args_into_dataclasses(["--output_dir", str(tmp_path), "--directions", text])
        assert parsed.directions == meant
        assert parsed.optimizer([torch.zeros(3)]).directions == meant
    (parsed,) = parser.parse_args_into_dataclasses(["--output_dir", str(tmp_path)])
    assert parsed.directions == 1
    for wrong, complaint in (
        ({"directions": "each"}, 'must be a whole number, "per-example" or "auto"'),
        ({"directions": 0}, "an integer of at least 1"),
        ({"directions": "auto", "learning_rate": 1.0}, "goes without a learning_rate"),
        ({"directions": "per-example", "distribution": "normal"}, "made of signs"),
    ):
        with pytest.raises(InvalidArgumentError, match=complaint):
            ForwardTrainingArguments(str(tmp_path), use_cpu=True, **wrong)


def test_losses_in_low_precision_are_computed_in_float32(tmp_path):
    model = causal().bfloat16()
    vector = losses(tmp_path, model, ragged(8))
    assert vector.dtype == torch.float32
    assert len(example_losses(vector, 8)) == 8
    before = weights(model).clone()
    assert not torch.equal(trained(tmp_path, model, ragged(), **OWN), before)
