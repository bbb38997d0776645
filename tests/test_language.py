"""Texts, the ways to put them to a model, and metrics, each against an obvious reference."""

import json
import math

import pytest
import torch
import torch.nn.functional as F

from forwardtune.errors import ExperimentError
from forwardtune.experiments.comparison import Machine, compare
from forwardtune.experiments.plan import plan
from forwardtune.experiments.runner import execute
from forwardtune.experiments.scoring import chosen_rates, score
from forwardtune.experiments.spec import Workload
from forwardtune.experiments.store import Store
from forwardtune.tasks import Sources, prepare
from forwardtune.tasks.texts import glue, models, setups, texts
from forwardtune.metrics import metric
from forwardtune.tasks.texts.models import Language
from tests.helpers import tiny
from tests.helpers.comparisons import DATA, needs_data, parse


def write(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    home = tmp_path_factory.mktemp("models")
    tiny.causal(home / "causal")
    tiny.causal(home / "padless", pad=False)
    tiny.encoder(home / "encoder")
    tiny.encoder(home / "masked", masked=True)
    write(home / "reviews.jsonl", tiny.reviews())
    write(home / "pairs.jsonl", [{"a": r["text"], "b": "It was good", "label": r["label"]} for r in tiny.reviews(20)])
    return home


def workload(model, file="reviews.jsonl", **more):
    if more.get("setup") == "head":
        more = {"words": (), "template": ""} | more
    given = {"train": file, "text": ("text",) if file == "reviews.jsonl" else ("a", "b"), "label": "label"}
    usual = {"words": ("bad", "good"), "template": "{text} It was" if len(given["text"]) == 1 else "{a} {b} Answer :"}
    fixed = {"name": "w", "data": "files", "network": "transformer", "weights": model, "batch": 8, "seeds": (0,)}
    return Workload(**fixed | given | usual | {"queries": 8, "dtype": "float64", "evaluations": 2} | more)


def task_of(folders, model, file="reviews.jsonl", **more):
    return prepare(workload(model, file, **more), Sources(folder=folders), "cpu")


def started(task, folder):
    task.make_base(folder / "base.safetensors")
    return task.start(folder / "base.safetensors")


@torch.no_grad()
def naive(task, model, text):
    """One example alone, without padding."""
    language, setup = task.language, task.language.setup_name
    tokenizer = language.tokenizer
    if setup == "similarity":
        around = task.template.replace("{text}", "").replace("{a}", "").replace("{b}", "").strip()
        answers = [text[1]] if len(text) == 2 else [f"{around} {word}." for word in task.words]
        first, *others = [
            F.normalize(model(**tokenizer(t, return_tensors="pt")).last_hidden_state.mean(1), dim=1)
            for t in (text[0], *answers)
        ]
        cosines = torch.stack([(first * other).sum() for other in others])
        scaled = setups.SCALE * cosines
        return scaled if len(text) == 1 else torch.stack([0 * scaled[0], scaled[0] - setups.SCALE * setups.THRESHOLD])
    if setup == "head":
        return model(**tokenizer(*text, return_tensors="pt")).logits[0]
    prompt = task.template.format_map(dict(zip(task.texts.columns, text, strict=True)))
    ids = [tokenizer.convert_tokens_to_ids(word) for word in task.words]
    if language.kind == "masked":
        inputs = tokenizer(f"{prompt} {tokenizer.mask_token}.", return_tensors="pt")
        place = inputs["input_ids"][0].tolist().index(tokenizer.mask_token_id)
        return model(**inputs).logits[0, place, ids]
    inputs = torch.tensor([[1, *tokenizer(prompt)["input_ids"]]])
    return model(input_ids=inputs).logits[0, -1, ids]


@pytest.mark.parametrize(
    ("model", "file", "more"),
    [
        ("causal", "reviews.jsonl", {}),
        ("causal", "pairs.jsonl", {}),
        ("padless", "reviews.jsonl", {}),
        ("causal", "reviews.jsonl", {"adapter": "lora"}),
        ("causal", "reviews.jsonl", {"setup": "head"}),
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
def test_a_batch_is_its_examples_alone(tmp_path, folders, model, file, more):
    """Buckets and padding change nothing."""
    task = task_of(folders, model, file, **more)
    network = started(task, tmp_path)
    rows = [task.setup.encode(text) for text in task.texts.train]
    with torch.no_grad():
        found = task.setup.logits(network, rows)
    expected = torch.stack([naive(task, network, text) for text in task.texts.train])
    torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=2e-6)
    torch.testing.assert_close(task.predict(network, rows), found, rtol=0, atol=2e-6)
    assert found.std(0).max() > 1e-3


@pytest.mark.parametrize("adapter", ["lora", "prefix", "prompt", "ia3"])
def test_adapters_are_tuned_and_nothing_else(tmp_path, folders, adapter):
    task = task_of(folders, "causal", adapter=adapter)
    run = plan(parse(SPEC.format(adapter=adapter)))[0]
    store = Store(tmp_path / "store")
    result = execute(run, store, Sources(folder=folders))
    network = started(task, tmp_path)
    tuned = [p for p in network.parameters() if p.requires_grad]
    assert result["weights"] == sum(p.numel() for p in tuned) < 0.6 * sum(p.numel() for p in network.parameters())
    assert result["status"] == "finished"
    assert result["curve"]["train_loss"][0] != result["final"]["train_loss"]
    batch = task.batch(torch.arange(8))
    with torch.no_grad():
        before = task.loss(network, batch).item()
        for p in tuned:
            p.add_(0.05)
        assert task.loss(network, batch).item() != before


SPEC = """
title = "adapters"
queries = 20
batch = 8
seeds = [0]
evaluations = 2

[[workloads]]
name = "w"
data = "files"
network = "transformer"
weights = "causal"
train = "reviews.jsonl"
text = ["text"]
label = "label"
template = "{{text}} It was"
words = ["bad", "good"]
adapter = "{adapter}"

[[methods]]
method = "VS2P"
lr = [3]
"""


def test_long_texts_lose_their_end_and_the_template_stays(folders):
    task = task_of(folders, "causal", max_length=16)
    text = (" ".join(["cloud"] * 50),)
    ids = task.setup.encode(text)[0]["input_ids"]
    end = task.language.tokenizer("It was")["input_ids"]
    assert len(ids) <= 16
    assert ids[0] == 1
    assert ids[-2:] == end
    assert len(ids) > 10


def test_buckets_hold_every_row_once():
    lengths = [5, 9, 3, 40, 41, 4, 3, 22]
    found = setups.buckets(lengths)
    assert sorted(i for bucket in found for i in bucket) == list(range(8))
    for bucket in found:
        assert max(lengths[i] for i in bucket) <= 1.25 * min(lengths[i] for i in bucket)


def test_scores_are_between_two_answers(tmp_path, folders):
    """A score of 0 is the first answer, of 5 the second."""
    task = task_of(folders, "encoder", "pairs.jsonl")
    scored = texts.Texts(
        ("a", "b"), (), task.texts.train, torch.tensor([0.0, 5.0, 2.5]), [], torch.tensor([]), high=5.0
    )
    task.texts = scored
    logits = torch.tensor([[2.0, -1.0], [0.5, 3.0], [1.0, 1.0]])
    p = logits.softmax(1)[:, 1]
    expected = -(torch.log(1 - p[0]) + torch.log(p[1]) + 0.5 * torch.log(p[2] * (1 - p[2]))) / 3
    torch.testing.assert_close(task._objective(logits, scored.train_y), expected)
    torch.testing.assert_close(task.answer(logits), 5 * p)
    torch.testing.assert_close(task.answer(logits[:, :1]), logits[:, 0])
    torch.testing.assert_close(task._objective(logits[:, :1], scored.train_y), F.mse_loss(logits[:, 0], scored.train_y))
    prepare.cache_clear()


@pytest.mark.parametrize(("objective", "expected"), [("accuracy", 1 - 5 / 8), ("f1", 1 - 2 * 2 / (2 * 2 + 2 + 1))])
def test_objectives_without_gradients(folders, objective, expected):
    task = task_of(folders, "causal", objective=objective)
    actual = torch.tensor([1, 1, 1, 0, 0, 0, 0, 0])
    chosen = torch.tensor([1, 1, 0, 1, 1, 0, 0, 0])
    found = task._objective(F.one_hot(chosen, 2).double(), actual)
    assert found.item() == pytest.approx(expected)


def test_metrics():
    actual, predicted = torch.tensor([1, 1, 1, 0, 0]), torch.tensor([1, 0, 1, 1, 0])
    assert metric("accuracy", actual, predicted) == pytest.approx(0.6)
    assert metric("f1", actual, predicted) == pytest.approx(2 / 3)
    assert metric("f1", torch.tensor([0, 1, 2]), torch.tensor([0, 2, 2]), 3) == pytest.approx((1 + 0 + 2 / 3) / 3)
    assert metric("f1", actual, predicted, 3) == pytest.approx((2 / 3 + 1 / 2) / 2)
    x, y = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 1.0, 6.0])
    assert metric("pearson", x, y) == pytest.approx(4 / math.sqrt(2 * 14))
    assert metric("spearman", x, y) == pytest.approx(0.5)
    assert metric("pearson", x, torch.ones(3)) == 0.0


RATES = """
title = "rates from one workload"
queries = 12
batch = 4
seeds = [0, 1]
evaluations = 2
network = "transformer"
weights = "causal"
train = "reviews.jsonl"
text = ["text"]
label = "label"
words = ["bad", "good"]
rates_from = "chooser"

[[workloads]]
name = "other"
data = "files"
template = "{text} It was"

[[workloads]]
name = "chooser"
data = "files"
template = "{text} Answer :"

[[methods]]
method = "VS2P"
lr = [1e-3, 50]

[[methods]]
method = "STP"
lr = [1e-4]
"""


def test_rates_come_from_one_workload(tmp_path, folders):
    spec, store = parse(RATES, folders), Store(tmp_path / "store")
    assert [run.workload.name for run in plan(spec)] == ["chooser"] * 6
    assert score(spec, store).missing == 6 + 4
    events = []
    compare(spec, store, Sources(folder=folders), Machine(workers=1, threads=1), events.append)
    chosen = chosen_rates(spec, store)
    assert chosen == {"VS2P": 1e-3, "STP": 1e-4} or chosen == {"VS2P": 50.0, "STP": 1e-4}
    scores = score(spec, store)
    assert scores.missing == 0
    other, chooser = scores.workloads
    assert [len(found.rates) for found in chooser.methods] == [2, 1]
    assert [[rate.lr for rate in found.rates] for found in other.methods] == [[chosen["VS2P"]], [1e-4]]
    assert chosen["VS2P"] == chooser.methods[0].best.lr == min(chooser.methods[0].rates, key=lambda r: r.mean_loss).lr
    assert [event["runs"] for event in events if event["event"] == "plan"] == [6, 10]
    with pytest.raises(ExperimentError, match="workload 'nobody' is not known"):
        parse(RATES.replace('rates_from = "chooser"', 'rates_from = "nobody"'), folders)


def test_tables_in_files(tmp_path):
    (tmp_path / "t.csv").write_text('text,label\n"a, b",x\n"line\nbreak",y\n')
    assert [row for _, row in texts.rows(tmp_path / "t.csv")] == [
        {"text": "a, b", "label": "x"},
        {"text": "line\nbreak", "label": "y"},
    ]
    (tmp_path / "t.tsv").write_text('text\tlabel\na "quote\tx\n')
    assert texts.rows(tmp_path / "t.tsv")[0][1] == {"text": 'a "quote', "label": "x"}
    whole = texts.from_files(write(tmp_path / "r.jsonl", tiny.reviews(40)), None, ("text",), "label")
    assert (len(whole.train), len(whole.test)) == (36, 4)
    assert not set(whole.train) & set(whole.test) or len(set(whole.train)) < 36
    assert whole.classes == ("neg", "pos")
    assert "4 of the examples in r.jsonl are held out" in whole.note
    assert whole.test_y.bincount().tolist() == [2, 2]


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.csv", "", "a.csv has no examples in it"),
        ("a.csv", "text,label\n", "a.csv has no examples in it"),
        ("a.csv", "text,label\nfilm\n", r"a.csv, line 2: the number of cells is not that of the header's columns"),
        (
            "a.csv",
            "body,label\n" + "film,x\nplot,y\n" * 2,
            r"a.csv, line \d: there is no column 'text', only 'body', 'label'",
        ),
        ("a.csv", "text,label\nfilm,x\nplot,x\n", r"has 1 different labels \(the first is 'x'\); there must be 2"),
        ("a.jsonl", '{"text": "a", "label": 1}\n{"text"\n', r"a.jsonl, line 2 is not JSON"),
        ("a.jsonl", "[1]\n", "a.jsonl, line 1 is not an object"),
        ("a.csv", "text,label\nfilm,x\nplot,y\n", "every class has one example only"),
        ("a.csv", "text,label\nfilm,x\nplot,\n", "a.csv, line 3: the label is empty"),
        ("a.jsonl", '{"text": null, "label": 1}\n{"text": "a", "label": 2}\n' * 9, "the cell of 'text' is empty"),
        ("a.xlsx", "", "must be .csv, .tsv or .jsonl"),
        ("a.csv", "text,label\n" + "".join(f"film,{i}\n" for i in range(150)), "has 150 different labels"),
    ],
)
def test_tables_that_cannot_be_used(tmp_path, name, content, complaint):
    (tmp_path / name).write_text(content)
    with pytest.raises(ExperimentError, match=complaint):
        texts.from_files(tmp_path / name, None, ("text",), "label")


def test_labels_out_of_range_are_named_by_their_line(tmp_path):
    train = write(tmp_path / "train.jsonl", tiny.reviews(10))
    test = write(tmp_path / "test.jsonl", [*tiny.reviews(2), {"text": "film", "label": "meh"}])
    with pytest.raises(ExperimentError, match=r"test.jsonl, line 3: the label 'meh' is none of 'neg', 'pos'"):
        texts.from_files(train, test, ("text",), "label")


def test_models_and_questions_that_make_no_sense(folders, monkeypatch):
    def complains(complaint, model="causal", file="reviews.jsonl", **more):
        with pytest.raises(ExperimentError, match=complaint):
            task_of(folders, model, file, **more).check()

    complains(r"encoder \(BertModel\) cannot go on with a text", "encoder", setup="prompt")
    complains(r"does not embed them; use the setup \"prompt\"", setup="similarity")
    complains(r"has no pad token.*pad_token = \"</s>\".*or use the setup \"prompt\"", "padless", setup="head")
    task_of(folders, "padless", setup="head", pad_token="</s>")
    complains("has no token '<nothing>' to pad with", "padless", setup="head", pad_token="<nothing>")
    complains(r"the template '\{movie\} It was' asks for 'movie'; it can hold \{text\}", template="{movie} It was")
    complains(r"does not hold \{text\}; add it", template="It was")
    complains("the words 'good', 'good film' begin with the same token", words=("good", "good film"))
    complains("the word '' has no token", words=("good", ""))
    complains("tokens put in front hide from a head", setup="head", adapter="prompt")
    complains("a head is not asked by template and words", setup="head", template="{text} It was")
    complains(r"there are 3 words for the classes neg, pos; give 2", words=("a", "b", "c"))
    complains(r"no model at .*nowhere.*no folder with a config.json", "nowhere")
    complains("in a package that is not installed: pip install no_such_package", "package:no_such_package/model")
    complains("the template alone has 8 tokens or more", template="{text} " + "it was " * 8, max_length=8)
    monkeypatch.setattr("forwardtune.integrations.huggingface.footprint.available", lambda device: 1000)
    complains(r"causal needs .* for its weights alone, and 1 kB are free on cpu; choose a smaller model")


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"train": ""}, "texts from files need 'train'"),
        ({"text": ("a", "b", "c")}, "one text or two, not 3"),
        ({"setup": "magic"}, "setup 'magic' is not known"),
        ({"adapter": "loar"}, r"adapter 'loar' is not known \(did you mean 'lora'\?\)"),
        ({"objective": "recall"}, "objective 'recall' is not known"),
        ({"max_length": 4}, "max_length must be at least 8"),
        ({"data": "sst2"}, "train has no meaning for sst2"),
        ({"data": "mnist", "network": "resnet18"}, "train has no meaning for mnist"),
        ({"network": "resnet18"}, "network 'resnet18' is not known"),
    ],
)
def test_workloads_of_texts_are_checked(more, complaint):
    with pytest.raises(ExperimentError, match=complaint):
        workload("causal", **more)


@needs_data
@pytest.mark.parametrize(
    ("name", "train", "test", "majority"),
    [
        ("sst2", 67349, 872, 444 / 872),
        ("mrpc", 3668, 408, 279 / 408),
        ("qnli", 8999, 5463, 2761 / 5463),
        ("rte", 2490, 277, 146 / 277),
        ("stsb", 5749, 1500, None),
    ],
)
def test_glue(name, train, test, majority):
    found = glue.load(name, DATA)
    assert (len(found.train), len(found.test)) == (train, test)
    assert majority is None or found.test_y.bincount().max().item() / test == pytest.approx(majority)
    assert ("8,999 of the 104,743" in found.note) == (name == "qnli")
    assert all(len(text) == len(glue.TASKS[name].columns) and all(text) for text in found.test)
    if name == "stsb":
        assert 0 <= found.train_y.min() < found.train_y.max() == 5.0


def test_glue_from_a_hub(tmp_path, monkeypatch):
    """`datasets` reads a folder as it does a repository of the hub."""
    import datasets

    rows = {"sentence1": ["a film", "the plot"], "sentence2": ["a story", "that plot"], "label": [0, 1], "idx": [0, 1]}
    entail = {**rows, "label": [1, 0]}
    home = tmp_path / "glue"
    for task, columns in (("mrpc", rows), ("rte", entail)):
        for part in ("train", "validation"):
            (home / task).mkdir(parents=True, exist_ok=True)
            datasets.Dataset.from_dict(columns).to_parquet(str(home / task / f"{part}.parquet"))
    configs = "".join(
        f"- config_name: {task}\n  data_files:\n"
        + "".join(f"  - split: {part}\n    path: {task}/{part}.parquet\n" for part in ("train", "validation"))
        for task in ("mrpc", "rte")
    )
    (home / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    monkeypatch.setattr(glue, "HUB", str(home))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    found = glue.load("mrpc", None, download=True)
    assert (found.train, found.train_y.tolist()) == ([("a film", "a story"), ("the plot", "that plot")], [0, 1])
    found = glue.load("rte", None, download=True)
    assert found.train_y.tolist() == [0, 1]  # the hub's 1 is not_entailment, which is our 0
    with pytest.raises(ExperimentError, match=r"sst2 could not be fetched from .* put SST-2/train.tsv"):
        glue.load("sst2", None, download=True)
    with pytest.raises(ExperimentError, match="rte is read from a folder of data, and none was given"):
        glue.load("rte", None)
    with pytest.raises(ExperimentError, match=r"rte needs RTE/train.tsv and dev.tsv, which are not in"):
        glue.load("rte", tmp_path)


@needs_data
def test_a_pretrained_model_knows_something_before_it_is_tuned(tmp_path):
    """Which is what the prompt is for: with a new head the same model guesses."""
    accuracies = {}
    for setup in ("prompt", "head"):
        given = {"name": "sst2", "data": "sst2", "network": "transformer", "weights": "weights/stories15M", "batch": 8}
        more = {"setup": setup, "pad_token": "</s>", "train_examples": 8, "test_examples": 300, "queries": 8}
        task = prepare(Workload(**given | more, seeds=(0,)), Sources(DATA), "cpu")
        accuracies[setup] = task.evaluate(started(task, tmp_path))["accuracy"]
    assert accuracies["prompt"] > 0.57
    assert accuracies["head"] < 0.57


def test_the_size_of_a_model_is_known_before_it_is_loaded(folders):
    language = Language(folders / "causal", "prompt")
    model, _ = language.build(2)
    assert models._elements(folders / "causal", language.config) == sum(p.numel() for p in model.parameters())


def test_odd_texts(tmp_path, folders):
    """Nothing at all, the mask itself, braces, and columns with a dot."""
    masked = task_of(folders, "masked")
    network = started(masked, tmp_path)
    odd = [("<mask> film",), ("",), ("{text} {0}",)]
    with torch.no_grad():
        found = masked.setup.logits(network, [masked.setup.encode(text) for text in odd])
    row = masked.setup.encode(odd[0])[0]["input_ids"]
    assert masked.setup._place(row, len(row)) == -3  # before the dot and the end
    assert found.isfinite().all()
    head = task_of(folders, "causal", setup="head")
    with torch.no_grad():
        assert head.setup.logits(started(head, tmp_path), [head.setup.encode(("",))]).shape == (1, 2)
    assert setups.fill("{a.b} {c}", ("a.b", "c"), ("{c}", "x")) == "{c} x"
    setups.check_template("{a.b} {c}", ("a.b", "c"))


@needs_data
def test_sentencepiece_alone_is_read_as_llamas(tmp_path):
    language = Language(DATA / "weights" / "stories15M", "prompt")
    assert language.tokenizer.tokenize("film It was great") == ["▁film", "▁It", "▁was", "▁great"]
    language.tokenizer.save_pretrained(tmp_path)
    again = models.transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert again.tokenize("film It was great") == ["▁film", "▁It", "▁was", "▁great"]
