"""What the Trainer is given: arguments, models and data that it takes or refuses, and the memory they need."""

import pytest
import torch

import forwardtune as ft
from forwardtune._compat.transformers import transformers
from forwardtune.errors import InvalidArgumentError
from forwardtune.integrations.huggingface import ForwardTrainer, ForwardTrainingArguments, footprint
from forwardtune.integrations.huggingface.footprint import check_fits
from tests.helpers.trainers import classifier, sentences, trainer


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ({"fp16": True}, "fp16=True does not apply .*scaler.*load the model in float16 or use bf16"),
        ({"gradient_checkpointing": True}, "gradient_checkpointing=True does not apply .*backward pass"),
        ({"max_grad_norm": 1.0}, r"max_grad_norm=1.0 does not apply .*no gradients to clip"),
        ({"weight_decay": 0.1}, "weight_decay=0.1 does not apply .*no method here decays weights"),
        ({"optim": "adafactor"}, "optim='adafactor' does not apply .*chosen by `method`"),
        ({"fsdp": True}, "fsdp=True does not apply .*every process needs all the weights"),
        ({"method": "STP", "rho": 0.1}, "rho=0.1 does not apply to STP, which probes at its learning rate"),
        ({"method_args": {"seed": 1}}, r"VS2P has no setting 'seed', only rho, tau_a, tau_b, window"),
        ({"method": "adam"}, "method 'adam' is not known; choose one of S2P, STP, VS2P, MeZO"),
    ],
)
def test_arguments_that_do_not_apply_are_refused(tmp_path, setting, complaint):
    with pytest.raises(InvalidArgumentError, match=complaint):
        ForwardTrainingArguments(str(tmp_path), use_cpu=True, **setting)


def test_arguments_reach_the_method(tmp_path):
    settings = {"method": "vs2p", "directions": 3, "distribution": "sphere", "method_args": '{"window": 7}'}
    args = ForwardTrainingArguments(str(tmp_path), use_cpu=True, learning_rate=1.0, rho=0.5, seed=11, **settings)
    optimizer = args.optimizer([torch.zeros(3)])
    group = optimizer.param_groups[0]
    assert isinstance(optimizer, ft.VS2P)
    assert (group["lr"], group["rho"], group["window"]) == (1.0, 0.5, 7)
    assert (group["run"]["seed"], group["run"]["directions"], group["run"]["distribution"]) == (11, 3, "sphere")


def test_arguments_and_objectives_of_another_kind_are_refused(tmp_path):
    data = sentences()
    plain = transformers.TrainingArguments(str(tmp_path), use_cpu=True)
    with pytest.raises(InvalidArgumentError, match=r"args must be ForwardTrainingArguments.* not TrainingArguments"):
        ForwardTrainer(classifier(), plain, train_dataset=data)
    with pytest.raises(InvalidArgumentError, match="objective 'recall' is not known; choose one of loss, accuracy, f1"):
        trainer(tmp_path, classifier(), data, objective="recall")
    model = classifier()
    adam = torch.optim.Adam(model.parameters())
    with pytest.raises(InvalidArgumentError, match="must be one of forwardtune's: Adam needs gradients"):
        trainer(tmp_path, model, data, more={"optimizers": (adam, None)})


def test_models_and_data_that_cannot_be_tuned_are_refused(tmp_path):
    data = sentences()
    with pytest.raises(InvalidArgumentError, match=r"no pad token.*set model.config.pad_token_id"):
        trainer(tmp_path, classifier(pad_token_id=None), data)
    with pytest.raises(InvalidArgumentError, match="nothing to tune"):
        trainer(tmp_path, classifier().requires_grad_(False), data).train()
    floats = [{**row, "labels": float(row["labels"])} for row in data]
    with pytest.raises(InvalidArgumentError, match=r"accuracy and F1 are metrics of classes: labels must be integers"):
        trainer(tmp_path, classifier(num_labels=1), floats, objective="accuracy").train()


def test_labels_out_of_range_are_refused_before_the_first_forward_pass(tmp_path):
    model, calls = classifier(), []
    model.register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(InvalidArgumentError, match="the label 2 is out of range for a model with 2 classes"):
        trainer(tmp_path, model, sentences(classes=3)).train()
    assert not calls


def test_a_trainer_logs_before_its_first_step(tmp_path):
    made = trainer(tmp_path, classifier(), sentences())
    made.log({"loss": 1.0})
    assert made.state.log_history[-1]["loss"] == 1.0
    assert "queries" not in made.state.log_history[-1]


def test_the_footprint_of_a_model():
    model = classifier().float()
    model.model.requires_grad_(False)
    total = sum(p.numel() for p in model.parameters())
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    printed = footprint(model)
    assert (printed.tuned, printed.total) == (32, total)
    assert printed.names == ("score.weight",)
    assert printed.adamw == 3 * 32 * 4
    assert printed.memory == 4 * total + buffers
    assert str(printed).startswith(f"tunes 32 of {total:,} weights")


def test_shared_weights_take_memory_once():
    model = torch.nn.Sequential(torch.nn.Linear(10, 10, bias=False), torch.nn.Linear(10, 10, bias=False))
    model[1].weight = torch.nn.Parameter(model[0].weight.detach())
    assert footprint(model).memory == 4 * 100


def test_what_does_not_fit_into_memory_is_refused():
    with pytest.raises(
        InvalidArgumentError, match=r"big needs 1e\+06 TB for its weights alone, and .* are free on cpu"
    ):
        check_fits(10**18, "big", torch.device("cpu"))
    check_fits(1, "small", torch.device("cpu"))


def test_without_a_rate_it_is_found_while_training(tmp_path):
    args = ForwardTrainingArguments(str(tmp_path))
    assert (args.auto, args.learning_rate, args.lr_scheduler_type) == (True, 1.0, "constant")
    optimizer = args.optimizer([torch.ones(3)])
    assert optimizer.auto is not None
    assert optimizer.scale == "relative"
    given = ForwardTrainingArguments(str(tmp_path), learning_rate=2.0)
    assert (given.auto, given.lr_scheduler_type) == (False, "linear")
    assert given.optimizer([torch.ones(3)]).auto is None
    assert given.optimizer([torch.ones(3)]).param_groups[0]["rho"] == 1e-2
    absolute = ForwardTrainingArguments(str(tmp_path), learning_rate=2.0, scale="absolute").optimizer([torch.ones(3)])
    assert (absolute.scale, absolute.param_groups[0]["rho"]) == ("absolute", 1e-3)
    assert ForwardTrainingArguments(str(tmp_path), method="MeZO").auto
    rules = {"step_size": "dynamic", "L": 1.0}
    assert not ForwardTrainingArguments(str(tmp_path), method="S2P", method_args=rules).auto
    factor = ForwardTrainingArguments(str(tmp_path), auto=True, learning_rate=0.5)
    assert factor.optimizer([torch.ones(3)]).param_groups[0]["lr"] == 0.5
    for wrong, complaint in (
        (
            {"method": "S2P", "auto": True, "method_args": rules},
            "S2P cannot find its step size; give it a learning_rate",
        ),
        (
            {"method": "S2P"},
            "method_args: S2P needs a step_size, its rule, and what that needs: 'stationary' with alpha0 and steps",
        ),
        ({"method": "STP", "auto": False}, "STP needs a learning_rate"),
        ({"rho": 0.1}, "rho is found while training, too"),
        ({"scale": "log"}, "scale 'log' is not known"),
    ):
        with pytest.raises(InvalidArgumentError, match=complaint):
            ForwardTrainingArguments(str(tmp_path), **wrong)
