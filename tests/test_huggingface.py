"""The Trainer: its loop and its processes with our step in them, and objectives of every kind."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import forwardtune as ft
from forwardtune._compat.transformers import transformers
from tests.helpers import trainers
from tests.helpers.trainers import causal, classifier, ragged, sentences, trained, trainer, weights


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


def test_a_micro_batch_without_labels_does_not_count(tmp_path):
    full = ragged(16)
    empty = [{**row, "labels": torch.full_like(row["labels"], -100)} for row in full]
    settings = {"train_sampling_strategy": "sequential", "max_steps": 3}
    mixed = [row for pair in zip(full, empty, strict=True) for row in pair]
    mixed_run = trained(tmp_path, causal(), mixed, micro=1, accumulation=8, **settings)
    full_run = trained(tmp_path, causal(), full, micro=4, **settings)
    torch.testing.assert_close(mixed_run, full_run, rtol=0, atol=2e-6)
    assert (full_run - weights(causal())).abs().max() > 1e-3


def test_the_trainer_takes_the_steps_of_the_plain_loop(tmp_path):
    model, data = classifier(), sentences()
    made = trainer(tmp_path, model, data, lr_scheduler_type="constant", train_sampling_strategy="sequential")
    made.train()
    plain = classifier().train()
    optimizer = ft.VS2P(plain.named_parameters(), lr=2.0, rho=1e-2, scale="absolute", seed=3)
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


@pytest.mark.parametrize("objective", ["loss", "f1"])
def test_two_processes_are_one(tmp_path, objective):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}
    done = subprocess.run(
        [*command, trainers.__file__, str(tmp_path), objective],
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


def test_callbacks_schedulers_evaluation_and_compute_loss_func(tmp_path):
    steps = []

    class Stop(transformers.TrainerCallback):
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
    double = trained(tmp_path, classifier(), data, **slow, max_steps=6, more={"compute_loss_func": twice})
    torch.testing.assert_close(double, single, rtol=0, atol=1e-10)


def test_an_optimizer_of_ones_own(tmp_path):
    """Passed to the Trainer, it is used unchanged."""
    model = classifier()
    optimizer = ft.MeZO(model.named_parameters(), lr=1e-2, rho=1e-2, scale="absolute", seed=3)
    trainer(tmp_path, model, sentences(), more={"optimizers": (optimizer, None)}).train()
    assert optimizer.queries == 20
    same = trained(tmp_path, classifier(), sentences(), method="MeZO", learning_rate=1e-2)
    assert torch.equal(weights(model), same)


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
def test_a_metric_itself_is_learned(tmp_path, objective):
    """On held-out data: a head learns to answer as another one does, and is told only how often it is right."""
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
            "compute_metrics": lambda output: {"right": (output.predictions.argmax(1) == output.label_ids).mean()},
        },
    )
    before = made.evaluate()["eval_right"]
    made.train()
    assert before < 0.6
    assert made.evaluate()["eval_right"] > 0.9


def test_plateaus_are_counted_and_warned_about(tmp_path):
    made = trainer(tmp_path, classifier(), sentences(), objective="accuracy", rho=1e-9, max_steps=25)
    start = weights(made.model)
    with pytest.warns(
        RuntimeWarning, match=r"20 of 20 steps saw the same loss .*Make the batch larger, probe further away"
    ):
        made.train()
    assert [entry["plateaus"] for entry in made.state.log_history if "loss" in entry][-1] == 25
    assert torch.equal(weights(made.model), start)
