"""How texts are put to models: every setup against one example at a time without padding, and what is refused."""

import json
from itertools import pairwise, product
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.nn.functional as F

from forwardtune._compat.transformers import transformers
from forwardtune.errors import ExperimentError
from forwardtune.tasks.texts import models, setups
from forwardtune.tasks.texts.models import PretrainedModel
from tests.helpers import tiny
from tests.helpers.comparisons import DATA, needs_data
from tests.helpers.texts import models_and_tables, task_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return models_and_tables(tmp_path_factory.mktemp("models"))


@torch.no_grad()
def naive(task, model, text):
    """The logits of one example alone, without padding."""
    by_setup = {"similarity": naive_similarity, "head": naive_head, "prompt": naive_prompt}
    return by_setup[task.language.setup_name](task, model, text)


def naive_similarity(task, model, text):
    around = task.template.replace("{text}", "").replace("{a}", "").replace("{b}", "").strip()
    answers = [text[1]] if len(text) == 2 else [f"{around} {word}." for word in task.words]
    first, *others = [
        F.normalize(model(**task.language.tokenizer(t, return_tensors="pt")).last_hidden_state.mean(1), dim=1)
        for t in (text[0], *answers)
    ]
    scaled = setups.SCALE * torch.stack([(first * other).sum() for other in others])
    return scaled if len(text) == 1 else torch.stack([0 * scaled[0], scaled[0] - setups.SCALE * setups.THRESHOLD])


def naive_head(task, model, text):
    if task.template:
        prompt = task.template.format_map(dict(zip(task.texts.columns, text, strict=True)))
        return model(input_ids=torch.tensor([[1, *task.language.tokenizer(prompt)["input_ids"]]])).logits[0]
    return model(**task.language.tokenizer(*text, return_tensors="pt")).logits[0]


def naive_prompt(task, model, text):
    tokenizer = task.language.tokenizer
    prompt = task.template.format_map(dict(zip(task.texts.columns, text, strict=True)))
    words = [tokenizer.convert_tokens_to_ids(word) for word in task.words]
    if task.language.kind == "masked":
        inputs = tokenizer(f"{prompt} {tokenizer.mask_token}.", return_tensors="pt")
        mask = inputs["input_ids"][0].tolist().index(tokenizer.mask_token_id)
        return model(**inputs).logits[0, mask, words]
    inputs = torch.tensor([[1, *tokenizer(prompt)["input_ids"]]])
    return model(input_ids=inputs).logits[0, -1, words]


@pytest.mark.parametrize(
    ("model", "file", "changes"),
    [
        ("causal", "reviews.jsonl", {}),
        ("causal", "pairs.jsonl", {}),
        ("padless", "reviews.jsonl", {}),
        ("causal", "reviews.jsonl", {"adapter": "lora"}),
        ("causal", "reviews.jsonl", {"setup": "head"}),
        ("causal", "reviews.jsonl", {"setup": "head", "template": "{text} It was"}),
        ("causal", "pairs.jsonl", {"setup": "head", "template": "{a} {b} Answer :", "adapter": "lora"}),
        ("masked", "reviews.jsonl", {}),
        ("masked", "reviews.jsonl", {"adapter": "lora"}),
        ("masked", "pairs.jsonl", {"setup": "similarity"}),
        ("encoder", "reviews.jsonl", {}),
        ("encoder", "pairs.jsonl", {}),
        ("encoder", "pairs.jsonl", {"adapter": "lora"}),
        ("encoder", "pairs.jsonl", {"setup": "head"}),
        ("encoder", "pairs.jsonl", {"setup": "head", "adapter": "lora"}),
        ("causal", "reviews.jsonl", {"setup": "head", "pad_token": "Answer"}),
    ],
)
def test_a_batch_is_its_examples_alone(tmp_path, folder, model, file, changes):
    """Buckets and padding change nothing."""
    task = task_of(folder, model, file, **changes)
    network = task.make_base(tmp_path / "base.safetensors")
    rows = [task.setup.encode(text) for text in task.texts.train]
    with torch.no_grad():
        logits = task.setup.logits(network, rows)
    expected = torch.stack([naive(task, network, text) for text in task.texts.train])
    torch.testing.assert_close(logits.double(), expected.double(), rtol=0, atol=2e-6)
    torch.testing.assert_close(task.predict(network, rows), logits, rtol=0, atol=2e-6)
    assert logits.std(0).max() > 1e-3


def test_long_texts_lose_their_end_and_the_template_stays(folder):
    task = task_of(folder, "causal", max_length=16)
    text = (" ".join(["cloud"] * 50),)
    ids = task.setup.encode(text)[0]["input_ids"]
    assert 10 < len(ids) <= 16
    assert ids[0] == 1
    assert ids[-2:] == task.language.tokenizer("It was")["input_ids"]


def test_buckets_hold_every_row_once_and_cost_least():
    """Compared with every way to cut the rows, in order of length, into buckets."""
    lengths = [5, 9, 3, 40, 41, 4, 3, 22, 60]

    def cost(split):
        return sum(len(bucket) * max(lengths[i] for i in bucket) + setups.PASS for bucket in split)

    split = setups.buckets(lengths)
    assert sorted(i for bucket in split for i in bucket) == list(range(len(lengths)))
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    costs = []
    for cuts in product([False, True], repeat=len(order) - 1):
        ends = [i for i, cut in enumerate(cuts, 1) if cut]
        costs.append(cost([order[a:b] for a, b in pairwise([0, *ends, len(order)])]))
    assert cost(split) == min(costs) < costs[0]


def test_padding_fills_every_column():
    rows = [{"input_ids": [5, 6], "token_type_ids": [0, 1]}, {"input_ids": [7], "token_type_ids": [1]}]
    padded = setups.pad(rows, 9, torch.device("cpu"))
    assert {name: tensor.tolist() for name, tensor in padded.items()} == {
        "input_ids": [[5, 6], [7, 9]],
        "token_type_ids": [[0, 1], [1, 0]],
        "attention_mask": [[1, 1], [1, 0]],
    }


def test_odd_texts(tmp_path, folder):
    """Nothing at all, the mask itself, braces, and columns with a dot."""
    masked = task_of(folder, "masked")
    network = masked.make_base(tmp_path / "base.safetensors")
    odd = [("<mask> film",), ("",), ("{text} {0}",)]
    with torch.no_grad():
        logits = masked.setup.logits(network, [masked.setup.encode(text) for text in odd])
    ids = masked.setup.encode(odd[0])[0]["input_ids"]
    assert masked.setup._answer_index(ids, len(ids)) == -3  # before the period and the end
    assert logits.isfinite().all()
    head = task_of(folder, "causal", setup="head")
    with torch.no_grad():
        logits = head.setup.logits(head.make_base(tmp_path / "head.safetensors"), [head.setup.encode(("",))])
    assert logits.shape == (1, 2)
    assert logits.isfinite().all()
    assert setups.fill("{a.b} {c}", ("a.b", "c"), ("{c}", "x")) == "{c} x"
    setups.check_template("{a.b} {c}", ("a.b", "c"))


@pytest.mark.parametrize(
    ("model", "changes", "complaint"),
    [
        ("encoder", {"setup": "prompt"}, r"encoder \(BertModel\) cannot continue a text"),
        ("causal", {"setup": "similarity"}, r"does not embed them; use the setup \"prompt\""),
        ("padless", {"setup": "head"}, r"has no pad token.*as pad token, \"</s>\".*or use the setup \"prompt\""),
        ("padless", {"setup": "head", "pad_token": "<nothing>"}, "has no token '<nothing>' to pad with"),
        (
            "causal",
            {"template": "{movie} It was"},
            r"the template '\{movie\} It was' asks for 'movie'; it can hold \{text\}",
        ),
        ("causal", {"template": "It was"}, r"does not hold \{text\}; add it"),
        ("causal", {"words": ("good", "good film")}, "the words 'good', 'good film' begin with the same token"),
        ("causal", {"words": ("good", "")}, "the word '' has no token"),
        ("causal", {"setup": "head", "adapter": "prompt"}, "the head of a causal model cannot find the end of a text"),
        ("causal", {"words": ("a", "b", "c")}, r"there are 3 words for the classes neg, pos; give 2"),
        ("nowhere", {}, r"no model at .*nowhere.*no folder with a config.json"),
        ("package:no_such_package/model", {}, "in a package that is not installed: pip install no_such_package"),
        (
            "causal",
            {"template": "{text} " + "it was " * 8, "max_length": 8},
            "the template alone has 8 tokens or more",
        ),
    ],
)
def test_models_and_questions_that_do_not_go_together(folder, model, changes, complaint):
    with pytest.raises(ExperimentError, match=complaint):
        task_of(folder, model, **changes)


def test_a_head_takes_the_pad_token_it_is_given(folder):
    task = task_of(folder, "padless", setup="head", pad_token="</s>")
    assert task.language.tokenizer.pad_token_id == 2


def test_a_model_larger_than_the_memory_is_refused_before_it_is_loaded(folder, monkeypatch):
    task = task_of(folder, "causal")
    task.check()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    with pytest.raises(ExperimentError, match=r"causal needs 49.8 kB .* and 1 kB are free on cpu; choose a smaller"):
        task.check()


def test_the_size_of_a_model_is_known_before_it_is_loaded(folder):
    language = PretrainedModel(folder / "causal", "prompt")
    model, _ = language.build(2)
    assert models._elements(folder / "causal", language.config) == sum(p.numel() for p in model.parameters())


@needs_data
def test_sentencepiece_alone_is_read_as_llamas(tmp_path):
    language = PretrainedModel(DATA / "weights" / "stories15M", "prompt")
    assert language.tokenizer.tokenize("film It was great") == ["▁film", "▁It", "▁was", "▁great"]
    language.tokenizer.save_pretrained(tmp_path)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert again.tokenize("film It was great") == ["▁film", "▁It", "▁was", "▁great"]


@pytest.mark.parametrize("model_type", ["stranger", "llama"])
def test_code_in_a_model_folder_is_never_run(tmp_path, monkeypatch, model_type):
    folder, ran = tiny.causal(tmp_path / "model"), tmp_path / "ran"
    (folder / "strange.py").write_text(f"open({str(ran)!r}, 'w')\nclass Strange: pass\n")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": model_type, "auto_map": {"AutoConfig": "strange.Strange", "AutoModel": "strange.Strange"}}
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked the user"))
    if model_type == "llama":  # what transformers knows needs no code of the folder
        PretrainedModel(folder, "prompt").build(2)
    else:
        with pytest.raises(ExperimentError, match=r"the config of the model .* cannot be loaded"):
            PretrainedModel(folder, "prompt")
    assert not ran.exists()
