"""The last norm of a language model, fitted: against autograd and scipy, folded into the model, and what is refused."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from scipy.optimize import minimize

from forwardtune._compat.transformers import transformers
from forwardtune.errors import ExperimentError
from forwardtune.tasks.task import before_fit
from forwardtune.tasks.texts import last_norm
from forwardtune.tasks.texts.last_norm import fit_last_norm
from tests.helpers import tiny
from tests.test_language import home, ready

__all__ = ["home"]
SIZES = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}


def llama(folder):
    tiny.causal(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, **SIZES)
    return transformers.GPT2LMHeadModel(config).eval()


def batches():
    """Sentences in which the next token is mostly twice the one before."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 60, (24, 9), generator=generator)
    ids[:, 1:] = torch.where(torch.rand(24, 8, generator=generator) < 0.7, 2 * ids[:, :-1] % 60, ids[:, 1:])
    nexts = F.pad(ids[:, 1:], (0, 1), value=-1)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return [({k: v[i : i + 10] for k, v in inputs.items()}, nexts[i : i + 10]) for i in (0, 10, 20)]


@torch.no_grad()
def loss_of(model):
    logits, nexts = zip(*((model(**inputs).logits, y) for inputs, y in batches()), strict=True)
    return F.cross_entropy(torch.cat(logits)[:, :-1].flatten(0, 1), torch.cat(nexts)[:, :-1].flatten()).item()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_fit_is_the_minimum(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(last_norm, "ITERATIONS", 300)
    model = llama(tmp_path / "m") if kind == "llama" else gpt2()
    norm = model.model.norm if kind == "llama" else model.transformer.ln_f
    if kind == "gpt2":
        torch.nn.init.normal_(norm.bias, std=0.1)
    hidden, y = [], []
    hook = norm.register_forward_hook(lambda module, args, output: hidden.append(output[:, :-1].flatten(0, 1)))
    before = loss_of(model)
    hook.remove()
    y = torch.cat([nexts[:, :-1].flatten() for _, nexts in batches()])
    h, w = torch.cat(hidden).double(), model.lm_head.weight.detach().double()
    old = {name: weight.clone() for name, weight in norm.named_parameters()}
    with torch.no_grad():
        names, told = fit_last_norm(model, batches())
    size = h.square().mean().sqrt()

    def objective(flat):
        solution = torch.tensor(flat).view(-1, 16).requires_grad_()
        shift = size * solution[1] if len(solution) > 1 else 0.0
        loss = F.cross_entropy((h * (1 + solution[0]) + shift) @ w.T, y)
        (loss + told.penalty / 2 * solution.square().sum()).backward()
        return (loss + told.penalty / 2 * solution.square().sum()).item(), solution.grad.flatten().numpy()

    best = minimize(objective, np.zeros(16 * len(names)), jac=True, method="L-BFGS-B", options={"ftol": 1e-13}).x
    best = torch.tensor(best).view(-1, 16).float()
    torch.testing.assert_close(norm.weight.detach(), old["weight"] * (1 + best[0]), atol=2e-2, rtol=2e-2)
    if kind == "gpt2":
        expected = old["bias"] * (1 + best[0]) + size.float() * best[1]
        torch.testing.assert_close(norm.bias.detach(), expected, atol=2e-2, rtol=2e-2)
    assert told.examples == len(y) == 24 * 8
    assert loss_of(model) < 0.99 * before
    assert names == {"llama": ["model.norm.weight"], "gpt2": ["transformer.ln_f.weight", "transformer.ln_f.bias"]}[kind]


def gemma():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.GemmaConfig(**sizes, num_key_value_heads=1, head_dim=8, pad_token_id=0, **SIZES)
    model = transformers.GemmaForCausalLM(config).eval()
    torch.nn.init.normal_(model.model.norm.weight, std=0.1)
    return model


def test_a_norm_that_adds_one_to_its_weights_is_fitted_too():
    model = gemma()
    before = loss_of(model)
    fit_last_norm(model, batches())
    assert loss_of(model) < 0.999 * before


class OddNorm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((16,), 2.0))

    def forward(self, x):
        return F.normalize(x, dim=-1) * self.weight.square()


def test_models_whose_logits_are_not_the_head_of_a_norm_are_refused(tmp_path):
    model = llama(tmp_path / "odd")
    model.model.norm = OddNorm()
    with pytest.raises(ExperimentError, match=r"model.norm does not multiply by its weight; leave the fit out"):
        fit_last_norm(model, batches())
    assert torch.equal(model.model.norm.weight, torch.full((16,), 2.0))
    with pytest.raises(ExperimentError, match="the output embeddings of this model cannot be read"):
        fit_last_norm(torch.nn.Linear(2, 2), batches())
    model = llama(tmp_path / "m")
    model.model.norm = torch.nn.Identity()
    with pytest.raises(ExperimentError, match="no norm comes right before the output embeddings"):
        fit_last_norm(model, batches())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_runs_begin_with_the_fitted_norm(home):
    plain, before = ready(home)
    first = plain.evaluate(before)
    task, model = ready(home, fit=30)
    scores = task.evaluate(model)
    assert scores.train_loss < 0.95 * first.train_loss
    assert scores.metrics["perplexity"] < first.metrics["perplexity"]
    assert before_fit(home / "base.safetensors") == first.metrics
    assert load_file(home / "base.safetensors").keys() == {"model.norm.weight"}
    assert task.evaluate(task.start(home / "base.safetensors")) == scores
    for (name, p), q in zip(model.named_parameters(), before.parameters(), strict=True):
        assert torch.equal(p, q) == (name != "model.norm.weight")


def test_an_adapter_has_no_norm_to_fit(home):
    with pytest.raises(ExperimentError, match="an adapter or packed weights stays as it is; leave fit out"):
        ready(home, fit=30, adapter="lora")
