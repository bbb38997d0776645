"""Quantized bases: packed weights stay as they are, adapters, norms, biases and heads are tuned."""

import json
import shlex
from operator import attrgetter

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import forwardtune as ft
from forwardtune._compat.transformers import transformers
from forwardtune.cli.main import app
from forwardtune.errors import ExperimentError, InvalidArgumentError
from forwardtune.finetuning.tuned import Tuned
from forwardtune.integrations.huggingface import footprint
from forwardtune.packed import is_packed, keep_as_packed
from tests.helpers import tiny
from tests.helpers.texts import task_of, write_jsonl
from tests.helpers.trainers import ragged, trainer

import peft  # isort: skip  (imports transformers, which must have been made importable)


def packing(kind):
    """What transformers is told, or a skip where the package is missing."""
    if kind == "torchao":
        pytest.importorskip("torchao", reason="torchao is not installed")
        from torchao.quantization import Int8WeightOnlyConfig

        return transformers.TorchAoConfig(Int8WeightOnlyConfig())
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    asked = {"int8": {"load_in_8bit": True}, "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}
    return transformers.BitsAndBytesConfig(**asked[kind])


@pytest.fixture(params=["int8", "nf4", "torchao"])
def quantized(request, tmp_path):
    """Makes a quantized Llama, with an adapter or without."""
    folder, config = tiny.causal(tmp_path / "model", width=64), packing(request.param)

    def make(adapter=True):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map="cpu")
        keep_as_packed(model)
        torch.manual_seed(7)
        return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=2)) if adapter else model

    return make


def losses(model, rows=16):
    tokens = torch.stack([row["input_ids"] for row in ragged(rows)])
    logits = model(input_ids=tokens).logits[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").mean(1)


def moved(model):
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


@pytest.mark.parametrize("directions", [1, "per-example"])
def test_the_optimizer_takes_all_parameters_and_moves_the_adapter(quantized, tmp_path, directions):
    """Recorded, replayed and resumed, bit for bit."""
    model = quantized()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    def query():
        own = losses(model)
        return own.mean() if directions == 1 else own

    file = tmp_path / "run.ledger"
    optimizer = ft.VS2P(model.named_parameters(), directions=directions, recorder=ft.Ledger(file, model))
    first = optimizer.step(query).item()
    for _ in range(59):
        optimizer.step(query)
    optimizer.recorder.close()
    assert losses(model).mean() < first - 0.005
    for name, p in model.named_parameters():
        if p.requires_grad:
            assert not torch.equal(p, before[name]), name
        else:
            own = [p, before[name]] if not hasattr(p, "dequantize") else [p.dequantize(), before[name].dequantize()]
            assert torch.equal(*own), name
    assert torch.equal(moved(ft.replay(quantized(), file)), moved(model))
    again = quantized()
    resumed, step = ft.resume(again, file)
    assert step == 60
    assert torch.equal(moved(again), moved(model))
    resumed.recorder.close()


def test_a_base_with_other_scales_is_another(quantized, tmp_path):
    model, file = quantized(), tmp_path / "run.ledger"
    optimizer = ft.VS2P(model.named_parameters(), lr=0.1, recorder=ft.Ledger(file, model))
    optimizer.step(lambda: losses(model).mean())
    optimizer.recorder.close()
    other = quantized()
    weight = other.base_model.model.model.layers[0].mlp.up_proj.weight
    scales = {torch.uint8: "quant_state.absmax", torch.int8: "SCB", torch.float32: "scale"}
    attrgetter(scales[weight.dtype])(weight).mul_(2)
    with pytest.warns(RuntimeWarning, match="parameters that the run did not move differ"):
        ft.replay(other, file)


def test_the_footprint_counts_packed_weights(quantized):
    model = quantized(adapter=False)
    packed = [p for p in model.parameters() if is_packed(p)]
    assert len(packed) == 14
    for p in packed:
        p.requires_grad_(False)
    printed = footprint(model)
    assert (printed.tuned, printed.total) == (4416, 86336)
    floats = 4 * (4416 + 32)  # with buffers of rotary embeddings
    kinds = {torch.uint8: 81920 // 2, torch.int8: 81920, torch.float32: 81920}
    least = floats + kinds[packed[0].dtype]
    assert least + 4000 < printed.memory < least + 8000  # scales
    assert "tunes 4,416 of 86,336 weights (5.11%)" in str(printed)


def test_what_would_move_must_be_able_to():
    """Frozen parameters of any kind are left alone; none is frozen where none requires a gradient."""
    whole, weight = nn.Parameter(torch.ones(4, dtype=torch.int8), requires_grad=False), nn.Parameter(torch.ones(3))
    for groups in ([whole, weight], [{"params": [whole]}, {"params": [weight]}], [("a", whole), ("b", weight)]):
        optimizer = ft.VS2P(groups, lr=0.1)
        optimizer.step(lambda: weight.sum())
    assert torch.equal(whole, torch.ones(4, dtype=torch.int8))
    offloaded = nn.Parameter(torch.ones(4, device="meta"), requires_grad=False)
    ft.VS2P([offloaded, weight], lr=0.1).step(lambda: weight.sum())
    with pytest.raises(InvalidArgumentError, match=r"a has dtype torch.int8 and cannot be tuned"):
        ft.VS2P([("a", whole), ("b", weight.detach())])
    frozen = ft.VS2P([("a", whole), ("b", weight)], lr=0.1)
    weight.requires_grad_(False)
    with pytest.raises(InvalidArgumentError, match=r"a has dtype torch.int8 and cannot be tuned"):
        frozen.step(lambda: weight.sum())


@pytest.mark.parametrize("directions", [1, "per-example"])
def test_the_trainer_on_a_quantized_base(quantized, tmp_path, directions):
    settings = {"directions": directions, "learning_rate": None, "rho": None, "scale": "relative", "max_steps": 80}
    made = trainer(tmp_path / "out", quantized(), ragged(), **settings, logging_steps=20, micro=32)
    made.train()
    logged = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    assert logged[-1] < logged[0] - 0.02


# The command


def run(*command):
    done = CliRunner().invoke(app, [word for part in command for word in shlex.split(part)])
    if done.exception:
        raise done.exception
    return done.stdout


ASKED = "--template '{text} It was' --word bad --word good --steps 40 --evaluations 2 --threads 1 --keep last"
USUAL = f"--train reviews.jsonl {ASKED}"


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny.causal(tmp_path / "model", width=64)
    write_jsonl(tmp_path / "reviews.jsonl", tiny.reviews(60))
    return tmp_path


@pytest.mark.parametrize("dtype", ["int8", "nf4"])
def test_norms_and_biases_are_tuned_without_an_adapter(home, dtype):
    packing(dtype)
    said = run(f"finetune --model model --dtype {dtype} --lr 5", USUAL)
    assert "tunes 320 of 86,336 weights (0.37%): model.layers.*.input_layernorm.weight" in said
    assert "its norms, biases and new weights tuned" in (home / "tuned" / "README.md").read_text()
    saved = load_file(home / "tuned" / "model.safetensors")
    assert saved["model.layers.0.mlp.up_proj.weight"].dtype == {"int8": torch.int8, "nf4": torch.uint8}[dtype]
    run("replay --model tuned --base model --out again")
    again = load_file(home / "again" / "model.safetensors")
    assert all(torch.equal(saved[name], again[name]) for name in saved)
    final = json.loads((home / "tuned" / "forwardtune.json").read_text())["final"]
    rows = tiny.reviews(60)
    assert len(list(Tuned(home / "tuned").answers([(row["text"],) for row in rows]))) == 60
    assert 0 <= final["accuracy"] <= 1


@pytest.mark.parametrize("kind", ["int8", "nf4", "torchao"])
def test_a_folder_of_quantized_weights(home, kind):
    model = transformers.AutoModelForCausalLM.from_pretrained("model", quantization_config=packing(kind))
    model.save_pretrained("packed")
    tiny.tokenizer().save_pretrained("packed")
    said = run("finetune --model packed --adapter lora --directions per-example", USUAL)
    assert "tunes 4,096 of 90,432 weights" in said
    list(Tuned(home / "tuned", base="packed").answers([("a film",)]))
    run("replay --model tuned --base packed --out again")
    saved, again = (load_file(home / part / "adapter_model.safetensors") for part in ("tuned", "again"))
    assert all(torch.equal(saved[name], again[name]) for name in saved)
    other = {"int8": "nf4", "nf4": "int8", "torchao": "nf4"}[kind]
    with pytest.raises(ExperimentError, match=f"already quantized, not as {other}; leave the dtype out"):
        run(f"finetune --model packed --dtype {other} --out other", USUAL)


def test_what_cannot_be_quantized_or_saved_is_refused_at_the_start(home, monkeypatch):
    packing("nf4")
    quantizer = transformers.quantizers.quantizer_bnb_4bit.Bnb4BitHfQuantizer
    with monkeypatch.context() as patch:
        patch.setattr(quantizer, "is_serializable", lambda self: False)
        with pytest.raises(ExperimentError, match=r"cannot save models quantized by bitsandbytes; tune an adapter"):
            run("finetune --model model --dtype nf4 --lr 5", USUAL)
        run("finetune --model model --dtype nf4 --adapter lora --lr 5 --out adapted", USUAL)
    tiny.causal(home / "narrow")
    with pytest.raises(
        ExperimentError, match=r"rows are multiples of 64, and those of .*q_proj.* have 16; choose int8"
    ):
        run("finetune --model narrow --dtype nf4 --lr 5 --out none", USUAL)
    with monkeypatch.context() as patch:
        patch.setattr("forwardtune.tasks.texts.quantized.find_spec", lambda name: None)
        with pytest.raises(ExperimentError, match="nf4 needs bitsandbytes; install it: pip install bitsandbytes"):
            run("finetune --model model --dtype nf4 --lr 5 --out none", USUAL)


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_a_gguf_file_is_unpacked_and_tuned(home, adapter):
    pytest.importorskip("gguf", reason="gguf is not installed")
    tiny.packed_file(home / "model.gguf")
    said = run(f"finetune --model model.gguf --adapter {adapter} --dtype bfloat16", USUAL)
    assert "tunes" in said
    assert ("(100.00%)" in said) == (adapter == "none")
    final = json.loads(next((home / "tuned" / "run" / "runs").glob("*.json")).read_text())["final"]
    base = "model.gguf" if adapter != "none" else None
    (answer,) = Tuned(home / "tuned", base=base).answers([("a warm film",)])
    assert answer.prediction in ("neg", "pos")
    assert 0 <= final["accuracy"] <= 1
    run("replay --model tuned --base model.gguf --out again")
    name = "model.safetensors" if adapter == "none" else "adapter_model.safetensors"
    saved, again = (load_file(home / part / name) for part in ("tuned", "again"))
    assert all(torch.equal(saved[key], again[key]) for key in saved)
    with pytest.raises(ExperimentError, match="are unpacked on load, not packed as nf4; choose bfloat16"):
        run("finetune --model model.gguf --dtype nf4 --out other", USUAL)


def test_a_quantized_workload_is_another_run(home):
    assert task_of(home, "model").base_id != task_of(home, "model", dtype="nf4").base_id
