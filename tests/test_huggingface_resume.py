"""The Trainer's checkpoints and ledgers: runs that stop and resume."""

import pytest
import torch

import forwardtune as ft
from forwardtune._compat.transformers import transformers
from forwardtune.errors import InvalidArgumentError, LedgerError
from tests.helpers.trainers import classifier, sentences, trained, trainer, weights


@pytest.mark.parametrize(("method", "rate"), [("MeZO", 1e-2), ("vs2p", 2.0), ("STP", 1e-2), ("VS2P", None)])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, method, rate, monkeypatch):
    """Bit for bit, with dropout, a scheduler, accumulation and a ledger; without a rate, across reviews."""
    monkeypatch.setattr("forwardtune.auto.SURVEYS", 1)
    monkeypatch.setattr("forwardtune.auto.SPAN", 2)
    settings = {
        "method": method,
        "learning_rate": rate,
        "rho": None,
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


def test_an_interrupted_trainer_resumes(tmp_path):
    class Interrupt(transformers.TrainerCallback):
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


@pytest.mark.parametrize("method", ["VS2P", "MeZO", "STP"])
def test_a_ledger_is_not_taken_for_another_runs(tmp_path, method):
    settings = {"save_strategy": "steps", "save_steps": 4, "ledger": str(tmp_path / "run.ledger"), "method": method}
    settings |= {"rho": None, "learning_rate": 0.5 if method == "VS2P" else 1e-3}
    trainer(tmp_path / "a", classifier(), sentences(), **settings).train()
    with pytest.raises(InvalidArgumentError, match=r"already exists: resume its run by .*resume_from_checkpoint"):
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
    with pytest.raises(LedgerError, match=r"holds steps 0 to 2, .* from step 8"):
        trainer(tmp_path / "b", classifier(), sentences(), **{**short, "max_steps": 10}).train(
            resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-8")
        )
    assert (tmp_path / "run.ledger").read_bytes() == before


def test_the_best_weights_are_not_the_ledgers_end(tmp_path):
    """They are loaded when the run is over, and the ledger still leads to the last step."""
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
