"""The Trainer: its loop, its checkpoints, its processes, with our step in them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import forwardtune as ft
from forwardtune.errors import InvalidArgumentError, LedgerError
from forwardtune.integrations.huggingface import ForwardTrainer, ForwardTrainingArguments, footprint
from forwardtune.integrations.huggingface.footprint import check_fits
from tests.helpers.trainers import causal, classifier, ragged, sentences, trainer, weights

from transformers import TrainerCallback, TrainingArguments  # isort: skip

HERE = Path(__file__).parent


def trained(folder, model, data, **settings):
    made = trainer(folder, model, data, **settings)
    made.train()
    return weights(model)


@pytest.mark.parametrize("objective", ["loss", "accuracy", "f1"])
def test_accumulated_micro_batches_are_one_batch(tmp_path, objective):
    far = {} if objective == "loss" else {"rho": 0.2}
    runs = [
        trained(tmp_path, classifier(), sentences(), micro=16 // n, accumulation=n, objective=objective, **far)
        for n in (1, 2, 4)
    ]
    assert (runs[0] - weights(classifier())).abs().max() > 1e-3
    for other in runs[1:]:
        torch.testing.assert_close(other, runs[0], rtol=0, atol=1e-10)


def test_micro_batches_count_by_their_labels(tmp_path):
    """The mean over tokens of a causal model (whose loss is float32), though micro-batches have more or fewer."""
    runs = [trained(tmp_path, causal(), ragged(), micro=16 // n, accumulation=n) for n in (1, 4)]
    torch.testing.assert_close(runs[1], runs[0], rtol=0, atol=2e-6)
    assert (runs[0] - weights(causal())).abs().max() > 1e-3


def test_the_trainer_takes_the_steps_of_the_plain_loop(tmp_path):
    model, data = classifier(), sentences()
    made = trainer(tmp_path, model, data, lr_scheduler_type="constant", train_sampling_strategy="sequential")
    made.train()
    plain = classifier().train()
    optimizer = ft.VS2P(plain.named_parameters(), lr=2.0, rho=1e-2, seed=3)
    x, y = torch.stack([row["input_ids"] for row in data]), torch.tensor([row["labels"] for row in data])
    losses = []
    for step in range(10):
        at = slice(16 * (step % 4), 16 * (step % 4) + 16)
        losses.append(optimizer.step(lambda at=at: F.cross_entropy(plain(input_ids=x[at]).logits, y[at])).item())
    torch.testing.assert_close(weights(model), weights(plain), rtol=0, atol=1e-12)
    logged = [entry for entry in made.state.log_history if "loss" in entry]
    assert [entry["loss"] for entry in logged] == pytest.approx(losses, rel=1e-6)
    last = optimizer.last_step
    seen = {name: logged[-1][name] for name in ("gamma", "sigma", "t", "queries", "plateaus")}
    assert seen == pytest.approx(
        {"gamma": last.gamma, "sigma": last.sigma, "t": last.t, "queries": 20, "plateaus": 0}, rel=1e-6
    )
    assert "grad_norm" not in logged[-1]


@pytest.mark.parametrize("method", ["MeZO", "vs2p", "STP"])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, method):
    """Bit for bit, with dropout, a scheduler, accumulation and a ledger."""
    rates = {"MeZO": 1e-2, "vs2p": 2.0, "STP": 1e-2}
    settings = {
        "method": method,
        "learning_rate": rates[method],
        "rho": 1e-3,
        "save_strategy": "steps",
        "save_steps": 4,
    }
    settings |= {"micro": 8, "accumulation": 2, "lr_scheduler_type": "cosine"}
    dropout = {"attention_dropout": 0.3}
    whole = classifier(**dropout)
    trainer(tmp_path / "a", whole, sentences(), ledger=str(tmp_path / "a.ledger"), **settings).train()
    for checkpoint in (4, 8):
        again = classifier(seed=1, **dropout)
        made = trainer(tmp_path / "a", again, sentences(), ledger=str(tmp_path / "a.ledger"), **settings)
        made.train(resume_from_checkpoint=str(tmp_path / "a" / f"checkpoint-{checkpoint}"))
        assert torch.equal(weights(again), weights(whole))
        assert made.state.global_step == 10
    replayed = ft.replay(classifier(**dropout), tmp_path / "a.ledger")
    assert torch.equal(weights(replayed), weights(whole))


@pytest.mark.parametrize("method", ["VS2P", "MeZO", "STP"])
def test_a_ledger_is_not_taken_for_another_runs(tmp_path, method):
    settings = {"save_strategy": "steps", "save_steps": 4, "ledger": str(tmp_path / "run.ledger"), "method": method}
    settings |= {"rho": 1e-3, "learning_rate": 0.5 if method == "VS2P" else 1e-3}
    trainer(tmp_path / "a", classifier(), sentences(), **settings).train()
    with pytest.raises(InvalidArgumentError, match=r"is there already: go on .*resume_from_checkpoint"):
        trainer(tmp_path / "a", classifier(), sentences(), **settings).train()
    other = {**settings, "ledger": str(tmp_path / "other.ledger")}
    trainer(tmp_path / "b", classifier(), sentences(), **other, data_seed=5).train()
    before = (tmp_path / "run.ledger").read_bytes()
    with pytest.raises(LedgerError, match="the ledger of another run"):
        trainer(tmp_path / "b", classifier(), sentences(), **settings).train(
            resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-4")
        )
    short = {**settings, "ledger": str(tmp_path / "short.ledger"), "max_steps": 2}
    trainer(tmp_path / "c", classifier(), sentences(), **short).train()
    with pytest.raises(LedgerError, match=r"holds steps 0 to 2, and the run goes on from step 8"):
        trainer(tmp_path / "b", classifier(), sentences(), **{**short, "max_steps": 10}).train(
            resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-8")
        )
    assert (tmp_path / "run.ledger").read_bytes() == before


def test_the_best_weights_are_not_the_ledgers_end(tmp_path):
    """They are loaded when the run is over, and the ledger still leads to its last step."""
    data = sentences()
    made = trainer(
        tmp_path,
        classifier(),
        data,
        ledger=str(tmp_path / "run.ledger"),
        save_strategy="steps",
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="early",
        more={"eval_dataset": data, "compute_metrics": lambda _: {"early": -made.state.global_step}},
    )
    made.train()
    assert made.state.best_model_checkpoint.endswith("checkpoint-2")
    best = weights(made.model).clone()
    last = weights(ft.replay(classifier(), tmp_path / "run.ledger"))
    assert not torch.equal(best, last)
    assert torch.equal(last, trained(tmp_path / "b", classifier(), data))
    assert torch.equal(best, weights(ft.replay(classifier(), tmp_path / "run.ledger", until=2)))
    with pytest.raises(LedgerError, match="the ledger of another run"):  # from weights that are not its last
        made.train()


def test_an_interrupted_trainer_goes_on(tmp_path):
    class Interrupt(TrainerCallback):
        def on_step_end(self, args, state, control, **more):
            if state.global_step == 6:
                raise KeyboardInterrupt

    settings = {"ledger": str(tmp_path / "run.ledger"), "save_strategy": "steps", "save_steps": 4}
    whole = trained(tmp_path / "whole", classifier(), sentences())
    made = trainer(tmp_path, classifier(), sentences(), more={"callbacks": [Interrupt]}, **settings)
    with pytest.raises(KeyboardInterrupt):
        made.train()
    made.remove_callback(Interrupt)
    made.train(resume_from_checkpoint=True)
    assert torch.equal(weights(made.model), whole)
    assert torch.equal(weights(ft.replay(classifier(), tmp_path / "run.ledger")), whole)


def test_a_micro_batch_without_labels_does_not_count(tmp_path):
    full = ragged(16)
    empty = [{**row, "labels": torch.full_like(row["labels"], -100)} for row in full]
    settings = {"train_sampling_strategy": "sequential", "max_steps": 3}
    mixed = [row for pair in zip(full, empty, strict=True) for row in pair]
    found = trained(tmp_path, causal(), mixed, micro=1, accumulation=8, **settings)
    torch.testing.assert_close(found, trained(tmp_path, causal(), full, micro=4, **settings), rtol=0, atol=2e-6)


@pytest.mark.parametrize("objective", ["loss", "f1"])
def test_two_processes_are_one(tmp_path, objective):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent), "ACCELERATE_USE_CPU": "1"}
    done = subprocess.run(
        [*command, str(HERE / "trainers.py"), str(tmp_path), objective],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    both = [torch.load(tmp_path / f"weights{i}.pt") for i in range(2)]
    assert torch.equal(*both)
    one = trained(tmp_path, classifier(), sentences(), micro=16, objective=objective)
    torch.testing.assert_close(both[0], one, rtol=0, atol=1e-10)
    replayed = ft.replay(classifier(), tmp_path / "run.ledger")
    assert torch.equal(weights(replayed), both[0])


def test_an_objective_of_ones_own(tmp_path):
    """A function of the model and the batch, of a number that has no gradient."""
    seen = []

    def errors(model, batch):
        assert model.training
        seen.append(len(batch["labels"]))
        wrong = model(input_ids=batch["input_ids"]).logits.argmax(1) != batch["labels"]
        return float(wrong.double().mean())

    runs = [
        trained(tmp_path, classifier(), sentences(), micro=16 // n, accumulation=n, objective=errors, rho=0.2)
        for n in (1, 2)
    ]
    torch.testing.assert_close(runs[1], runs[0], rtol=0, atol=1e-10)
    named = trained(tmp_path, classifier(), sentences(), objective="accuracy", rho=0.2)
    torch.testing.assert_close(runs[0], named, rtol=0, atol=1e-10)
    assert set(seen) == {16, 8}
    assert len(seen) == 2 * 10 + 2 * 20


@pytest.mark.parametrize("objective", ["accuracy", "f1"])
def test_a_metric_itself_is_learnt(tmp_path, objective):
    """On held-out data: a head is to answer as another one does, and is told only how often it is right."""
    model = classifier()
    model.model.requires_grad_(False)
    tokens = torch.stack([row["input_ids"] for row in sentences(600)])
    with torch.no_grad():
        teacher = torch.randn(16, generator=torch.Generator().manual_seed(2)).double()
        labels = (model.model(tokens).last_hidden_state[:, -1] @ teacher > 0).long()
    data = [{"input_ids": row, "labels": label.item()} for row, label in zip(tokens, labels, strict=True)]
    made = trainer(
        tmp_path,
        model,
        data[:400],
        micro=100,
        objective=objective,
        rho=0.05,
        max_steps=300,
        logging_steps=100,
        more={
            "eval_dataset": data[400:],
            "compute_metrics": lambda found: {"right": (found.predictions.argmax(1) == found.label_ids).mean()},
        },
    )
    before = made.evaluate()["eval_right"]
    made.train()
    assert before < 0.6
    assert made.evaluate()["eval_right"] > 0.9


def test_plateaus_are_counted_and_told_of(tmp_path):
    made = trainer(tmp_path, classifier(), sentences(), objective="accuracy", rho=1e-9, max_steps=25)
    start = weights(made.model)
    with pytest.warns(RuntimeWarning, match=r"20 of 20 steps saw the same loss .*make the batch larger"):
        made.train()
    assert [entry["plateaus"] for entry in made.state.log_history if "loss" in entry][-1] == 25
    assert torch.equal(weights(made.model), start)


def test_callbacks_schedulers_evaluation_and_compute_loss_func(tmp_path):
    steps = []

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **more):
            steps.append(state.global_step)
            control.should_training_stop = state.global_step == 6

    def twice(outputs, labels, num_items_in_batch=None):
        return 2 * F.cross_entropy(outputs.logits, labels)

    data, slow = sentences(), {"method": "MeZO", "learning_rate": 5e-3, "warmup_steps": 2}
    made = trainer(
        tmp_path,
        classifier(),
        data,
        **slow,
        eval_strategy="steps",
        eval_steps=3,
        more={"callbacks": [Stop()], "eval_dataset": data, "compute_loss_func": twice},
    )
    made.train()
    assert steps == [1, 2, 3, 4, 5, 6]
    history = made.state.log_history
    rates = [entry["learning_rate"] for entry in history if "learning_rate" in entry]
    assert rates == pytest.approx([0.0, 2.5e-3, 5e-3, 4.375e-3, 3.75e-3, 3.125e-3])
    assert len([entry for entry in history if "eval_loss" in entry]) == 2
    single = trained(tmp_path, classifier(), data, method="MeZO", learning_rate=1e-2, warmup_steps=2, max_steps=6)
    double = trainer(
        tmp_path,
        classifier(),
        data,
        **slow,
        max_steps=6,
        more={"compute_loss_func": twice},
    )
    double.train()
    torch.testing.assert_close(weights(double.model), single, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ({"fp16": True}, "fp16=True has no meaning .*scaler.*load the model in float16 or use bf16"),
        ({"gradient_checkpointing": True}, "gradient_checkpointing=True has no meaning .*backward pass"),
        ({"max_grad_norm": 1.0}, r"max_grad_norm=1.0 has no meaning .*no gradients to clip"),
        ({"weight_decay": 0.1}, "weight_decay=0.1 has no meaning .*no method here decays weights"),
        ({"optim": "adafactor"}, "optim='adafactor' has no meaning .*chosen by `method`"),
        ({"fsdp": True}, "fsdp=True has no meaning .*whole in every process"),
        ({"method": "STP", "rho": 0.1}, "rho=0.1 has no meaning for STP, which probes at its rate"),
        ({"method_args": {"seed": 1}}, r"VS2P has no setting 'seed', only rho, tau_a, tau_b, window"),
        ({"method": "adam"}, "method 'adam' is not known; choose one of S2P, STP, VS2P, MeZO"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(tmp_path, setting, complaint):
    with pytest.raises(InvalidArgumentError, match=complaint):
        ForwardTrainingArguments(str(tmp_path), use_cpu=True, **setting)


def test_arguments_reach_the_method(tmp_path):
    settings = {"method": "vs2p", "directions": 3, "distribution": "sphere", "method_args": '{"window": 7}'}
    args = ForwardTrainingArguments(str(tmp_path), use_cpu=True, rho=0.5, seed=11, **settings)
    optimizer = args.optimizer([torch.zeros(3)])
    group = optimizer.param_groups[0]
    assert isinstance(optimizer, ft.VS2P)
    assert (group["lr"], group["rho"], group["window"]) == (1.0, 0.5, 7)
    assert (group["run"]["seed"], group["run"]["directions"], group["run"]["distribution"]) == (11, 3, "sphere")


def test_models_and_data_that_make_no_sense_are_refused(tmp_path):
    data = sentences()
    with pytest.raises(InvalidArgumentError, match=r"args must be ForwardTrainingArguments.* not TrainingArguments"):
        ForwardTrainer(classifier(), TrainingArguments(str(tmp_path), use_cpu=True), train_dataset=data)
    with pytest.raises(InvalidArgumentError, match="objective 'recall' is not known; choose one of loss, accuracy, f1"):
        trainer(tmp_path, classifier(), data, objective="recall")
    trainer(tmp_path, classifier(), data).log({"loss": 1.0})
    with pytest.raises(InvalidArgumentError, match=r"no pad token.*set model.config.pad_token_id"):
        trainer(tmp_path, classifier(pad_token_id=None), data)
    model = classifier()
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(InvalidArgumentError, match="the label 2 is out of range for a model with 2 classes"):
        trainer(tmp_path, model, sentences(classes=3)).train()
    assert not calls
    with pytest.raises(InvalidArgumentError, match="nothing to tune"):
        trainer(tmp_path, classifier().requires_grad_(False), data).train()
    adam = torch.optim.Adam(model.parameters())
    with pytest.raises(InvalidArgumentError, match="must be one of forwardtune's, not Adam"):
        trainer(tmp_path, model, data, more={"optimizers": (adam, None)})
    floats = [{**row, "labels": float(row["labels"])} for row in data]
    with pytest.raises(InvalidArgumentError, match=r"accuracy and F1 are of classes: labels must be integers"):
        trainer(tmp_path, classifier(num_labels=1), floats, objective="accuracy").train()


def test_an_optimizer_of_ones_own(tmp_path):
    """Passed to the Trainer, it is used as it is."""
    model = classifier()
    optimizer = ft.MeZO(model.named_parameters(), lr=1e-2, rho=1e-2, seed=3)
    trainer(tmp_path, model, sentences(), more={"optimizers": (optimizer, None)}).train()
    assert optimizer.queries == 20
    same = trained(tmp_path, classifier(), sentences(), method="MeZO", learning_rate=1e-2)
    assert torch.equal(weights(model), same)


def test_memory_in_words():
    model = classifier().float()
    model.model.requires_grad_(False)
    found = footprint(model)
    assert (found.tuned, found.total) == (32, sum(p.numel() for p in model.parameters()))
    assert found.names == ("score.weight",)
    assert found.adamw == 3 * 32 * 4
    assert found.memory >= 4 * found.total
    assert "tunes 32 of" in str(found)
    with pytest.raises(
        InvalidArgumentError, match=r"big needs 1e\+06 TB for its weights alone, and .* are free on cpu"
    ):
        check_fits(10**18, "big", torch.device("cpu"))
    check_fits(1, "small", torch.device("cpu"))
