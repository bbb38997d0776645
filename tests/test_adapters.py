"""peft's adapters under the Trainer, also on bases that backpropagation cannot go through."""

import pytest
import torch
from safetensors.torch import load_file, save_file

import forwardtune as ft
from forwardtune._compat.transformers import transformers
from forwardtune.integrations.huggingface import footprint
from tests.helpers import tiny
from tests.helpers.trainers import causal, ragged, trainer

import peft  # isort: skip  (imports transformers, which must have been made importable)

CONFIGS = {
    "lora": lambda: peft.LoraConfig(task_type="CAUSAL_LM", r=2),
    "ia3": lambda: peft.IA3Config(task_type="CAUSAL_LM"),
    "prefix": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
}


def adapted(base, adapter="lora"):
    torch.manual_seed(7)
    return peft.get_peft_model(base, CONFIGS[adapter]())


@pytest.mark.parametrize("directions", [1, "per-example"])
@pytest.mark.parametrize("adapter", CONFIGS)
def test_adapters_train_and_the_base_stays(tmp_path, adapter, directions):
    model = adapted(causal(), adapter)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    tuned = {name for name, p in model.named_parameters() if p.requires_grad}
    made = trainer(tmp_path, model, ragged(), ledger=str(tmp_path / "run.ledger"), directions=directions)
    made.train()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == tuned
    assert footprint(model).tuned == sum(before[name].numel() for name in tuned) < footprint(model).total
    again = ft.replay(adapted(causal(), adapter), tmp_path / "run.ledger")
    for (name, p), q in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_a_base_of_eight_bits(tmp_path):
    folder = tiny.causal(tmp_path / "model")
    base = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=transformers.BitsAndBytesConfig(load_in_8bit=True), device_map="cpu"
    )
    assert base.model.layers[0].mlp.up_proj.weight.dtype == torch.int8
    model = adapted(base)
    before = base.model.layers[0].mlp.up_proj.weight.clone()
    made = trainer(tmp_path / "out", model, ragged(), max_steps=200, learning_rate=10.0, logging_steps=40)
    made.train()
    losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.02
    assert torch.equal(base.model.layers[0].mlp.up_proj.weight, before)


@pytest.mark.parametrize("inference", [False, True])
def test_a_base_of_bfloat16_or_made_for_inference(tmp_path, inference):
    with torch.inference_mode(inference):
        base = causal().bfloat16().requires_grad_(False)
    assert base.lm_head.weight.is_inference() == inference
    with torch.inference_mode(False):
        model = adapted(base)
    tuned = [p for p in model.parameters() if p.requires_grad]
    assert {p.dtype for p in tuned} == {torch.float32}
    before, head = [p.detach().clone() for p in tuned], base.lm_head.weight.clone()
    trainer(tmp_path, model, ragged(), learning_rate=5.0).train()
    assert all(not torch.equal(p, q) for p, q in zip(tuned, before, strict=True))
    assert base.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(base.lm_head.weight, head)


def test_an_adapter_is_shared_as_its_start_and_a_ledger(tmp_path):
    """The recipe of docs/huggingface.md: two small files give the tuned adapter."""
    model = adapted(causal())
    start = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    save_file(start, tmp_path / "start.safetensors")
    trainer(tmp_path, model, ragged(), ledger=str(tmp_path / "run.ledger")).train()
    received = peft.get_peft_model(causal(), CONFIGS["lora"]())
    received.load_state_dict(load_file(tmp_path / "start.safetensors"), strict=False)
    ft.replay(received, tmp_path / "run.ledger")
    for p, q in zip(model.parameters(), received.parameters(), strict=True):
        assert torch.equal(p, q)
