"""What readouts see of a transformer's blocks: against hidden states that the model itself returns."""

import pytest
import torch
import torch.nn.functional as F

from forwardtune.errors import ExperimentError
from forwardtune.readout import Readout
from forwardtune.tasks.texts.blocks import blocks_of
from forwardtune.tasks.texts.padding import pad
from tests.helpers.texts import models_and_tables, task_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return models_and_tables(tmp_path_factory.mktemp("models"))


def slowly(model, row, front=0):
    """Of one text that is not padded, by the model's own hidden states: all blocks' means at length one."""
    inputs = pad([row], 0, torch.device("cpu"))
    states = model(**inputs, output_hidden_states=True).hidden_states[1:]
    return torch.cat([F.normalize(state[:, front:].mean(1), dim=1) for state in states], 1)[0].float()


@pytest.mark.parametrize("changes", [{}, {"adapter": "lora"}, {"adapter": "prompt"}, {"adapter": "prefix"}])
@pytest.mark.parametrize("model", ["causal", "masked", "encoder"])
def test_blocks_are_averaged_over_the_tokens_of_each_text(folder, model, changes):
    task = task_of(folder, model, **changes)
    tuned, _ = task._built()
    examples = task.batch(torch.arange(12))[0]
    narrow = task.setup.features(tuned, examples)
    features = task.setup.features(tuned, examples, blocks=True)
    own, more = features.tensor_split([task.setup.own], dim=1)
    torch.testing.assert_close(own, narrow, atol=1e-5, rtol=1e-4)
    assert more.shape[1] == task.setup.more > 0
    last = task.setup.hidden if model != "encoder" else 0  # Llama and BERT put a norm or a head after the last block
    for own, rows in zip(more, examples, strict=True):
        wanted = slowly(tuned, rows[0], 8 if changes == {"adapter": "prompt"} else 0)
        kept = len(wanted) - last
        torch.testing.assert_close(own[:kept], wanted[:kept], atol=1e-5, rtol=1e-4)


def test_pairs_are_compared_block_by_block(folder):
    task = task_of(folder, "encoder", "pairs.jsonl")
    model, _ = task._built()
    examples = task.batch(torch.arange(5))[0]
    features = task.setup.features(model, examples, blocks=True)
    assert features.shape[1] == 2 + task.setup.more
    torch.testing.assert_close(features[:, :2], task.setup.features(model, examples))
    for own, (first, second) in zip(features, examples, strict=True):
        u, v = slowly(model, first), slowly(model, second)
        torch.testing.assert_close(own[2:], torch.cat([u * v, (u - v).abs()]), atol=1e-5, rtol=1e-4)


def test_a_readout_is_given_as_many_features_as_it_reads(folder):
    task = task_of(folder, "causal")
    model, _ = task._built()
    rows = task.batch(torch.arange(4))[0]
    plain = task.setup.logits(model, rows)
    weight = torch.zeros(2, task.setup.own + task.setup.more)
    weight[:, :2] = torch.eye(2)
    for readout in (Readout(torch.eye(2), torch.ones(2)), Readout(weight, torch.ones(2))):
        task.setup.readout = readout
        torch.testing.assert_close(task.setup.logits(model, rows), plain + 1)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_model_without_a_list_of_blocks_has_none():
    blocks = [torch.nn.Linear(2, 2) for _ in range(5)]
    model = torch.nn.ModuleDict({"a": torch.nn.ModuleList(blocks)})
    assert blocks_of(model, 5, 5) == blocks
    assert blocks_of(model, 5, 2) == [blocks[1], blocks[4]]
    assert blocks_of(model, 3, 3) == ()
    assert blocks_of(torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Tanh()]), 2, 2) == ()


def test_wide_models_are_read_at_fewer_blocks(folder):
    setup = task_of(folder, "encoder", "pairs.jsonl").setup
    setup.depth, setup.hidden = 32, 1024
    assert setup.more == 4 * 2 * 1024
    setup.hidden = 2**15
    assert setup.more == 2 * 2**15


def test_numbers_that_are_not_finite_are_told_of(folder, tmp_path, monkeypatch):
    task = task_of(folder, "causal", fit=40)
    features = task.setup.features
    monkeypatch.setattr(task.setup, "features", lambda *args, **options: features(*args, **options) * torch.nan)
    with pytest.raises(ExperimentError, match="computes numbers that are not finite; leave fit out"):
        task.make_base(tmp_path / "base.safetensors")
