"""Labelled texts from users' tables, and GLUE from files or the Hub."""

import pytest

from forwardtune.errors import ExperimentError
from forwardtune.tasks.texts import data, glue
from tests.helpers import tiny
from tests.helpers.comparisons import DATA, needs_data
from tests.helpers.texts import write_jsonl


def test_tables_in_files(tmp_path):
    (tmp_path / "t.csv").write_text('text,label\n"a, b",x\n"line\nbreak",y\n')
    assert [row for _, row in data.rows(tmp_path / "t.csv")] == [
        {"text": "a, b", "label": "x"},
        {"text": "line\nbreak", "label": "y"},
    ]
    (tmp_path / "t.tsv").write_text('text\tlabel\na "quote\tx\n')
    assert data.rows(tmp_path / "t.tsv") == [(f"{tmp_path / 't.tsv'}, line 2", {"text": 'a "quote', "label": "x"})]


def test_a_tenth_of_every_class_is_held_out(tmp_path):
    rows = tiny.reviews(40)
    whole = data.from_files(write_jsonl(tmp_path / "r.jsonl", rows), None, ("text",), "label")
    assert whole.classes == ("neg", "pos")
    assert (len(whole.train), len(whole.test)) == (36, 4)
    assert whole.test_y.bincount().tolist() == [2, 2]
    assert "4 of the examples in r.jsonl are held out" in whole.note
    parts = [(text, whole.classes[y]) for text, y in zip(whole.train, whole.train_y, strict=True)]
    parts += [(text, whole.classes[y]) for text, y in zip(whole.test, whole.test_y, strict=True)]
    assert sorted(parts) == sorted(((row["text"],), row["label"]) for row in rows)  # every example is in one part
    again = data.from_files(tmp_path / "r.jsonl", None, ("text",), "label")
    assert (again.test, again.digest) == (whole.test, whole.digest)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.csv", "", "a.csv has no examples in it"),
        ("a.csv", "text,label\n", "a.csv has no examples in it"),
        ("a.csv", "text,label\nfilm\n", r"a.csv, line 2: the number of cells differs from that of the header"),
        (
            "a.csv",
            "body,label\n" + "film,x\nplot,y\n" * 2,
            r"a.csv, line \d: there is no column 'text', only 'body', 'label'",
        ),
        ("a.csv", "text,label\nfilm,x\nplot,x\n", r"has 1 different labels \(the first is 'x'\); there must be 2"),
        ("a.jsonl", '{"text": "a", "label": 1}\n{"text"\n', r"a.jsonl, line 2 is not JSON"),
        ("a.jsonl", "[1]\n", "a.jsonl, line 1 is not an object"),
        ("a.csv", "text,label\nfilm,x\nplot,y\n", "every class has only one example"),
        ("a.csv", "text,label\nfilm,x\nplot,\n", "a.csv, line 3: the label is empty"),
        ("a.jsonl", '{"text": null, "label": 1}\n{"text": "a", "label": 2}\n' * 9, "the cell of 'text' is empty"),
        ("a.xlsx", "", "must be .csv, .tsv, .jsonl or .txt"),
        ("a.csv", "text,label\n" + "".join(f"film,{i}\n" for i in range(150)), "has 150 different labels"),
    ],
)
def test_tables_that_cannot_be_used(tmp_path, name, content, complaint):
    (tmp_path / name).write_text(content)
    with pytest.raises(ExperimentError, match=complaint):
        data.from_files(tmp_path / name, None, ("text",), "label")


def test_labels_out_of_range_are_named_by_their_line(tmp_path):
    train = write_jsonl(tmp_path / "train.jsonl", tiny.reviews(10))
    test = write_jsonl(tmp_path / "test.jsonl", [*tiny.reviews(2), {"text": "film", "label": "meh"}])
    with pytest.raises(ExperimentError, match=r"test.jsonl, line 3: the label 'meh' is none of 'neg', 'pos'"):
        data.from_files(train, test, ("text",), "label")
    scores = data.rows(write_jsonl(tmp_path / "scores.jsonl", [{"score": 5}, {"score": "5.5"}]))
    assert data.scores_of(scores[:1], "score", 0.0, 5.0).tolist() == [5.0]
    with pytest.raises(ExperimentError, match=r"line 2: the score '5.5' is not a number from 0 to 5"):
        data.scores_of(scores, "score", 0.0, 5.0)


@needs_data
@pytest.mark.parametrize(
    ("name", "train", "test", "majority"),
    [
        ("sst2", 67349, 872, 444 / 872),
        ("mrpc", 3668, 408, 279 / 408),
        ("qnli", 8999, 5463, 2761 / 5463),
        ("rte", 2490, 277, 146 / 277),
    ],
)
def test_classes_of_glue(name, train, test, majority):
    texts = glue.load(name, DATA)
    assert (len(texts.train), len(texts.test)) == (train, test)
    assert texts.test_y.bincount().max().item() / test == pytest.approx(majority)
    assert texts.note == ("8,999 of the 104,743 training examples of QNLI" if name == "qnli" else "")
    assert all(len(text) == len(glue.TASKS[name].columns) and all(text) for text in texts.test)


@needs_data
def test_scores_of_glue():
    texts = glue.load("stsb", DATA)
    assert (len(texts.train), len(texts.test)) == (5749, 1500)
    assert (texts.train_y.min(), texts.train_y.max()) == (0.0, 5.0)
    assert (texts.classes, texts.low, texts.high, texts.note) == ((), 0.0, 5.0, "")
    assert all(len(text) == 2 and all(text) for text in texts.test)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """`datasets` reads a folder as it does a repository on the Hub."""
    import datasets

    sentences = {"sentence1": ["a film", "the plot"], "sentence2": ["a story", "that plot"], "idx": [0, 1]}
    home = tmp_path / "glue"
    configs = ""
    for task, labels in (("mrpc", [0, 1]), ("rte", [1, 0])):
        configs += f"- config_name: {task}\n  data_files:\n"
        for part in ("train", "validation"):
            configs += f"  - split: {part}\n    path: {task}/{part}.parquet\n"
            (home / task).mkdir(parents=True, exist_ok=True)
            table = datasets.Dataset.from_dict({**sentences, "label": labels})
            table.to_parquet(str(home / task / f"{part}.parquet"))
    (home / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    monkeypatch.setattr(glue, "HUB", str(home))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("hub")
def test_glue_from_the_hub():
    texts = glue.load("mrpc", None, download=True)
    assert (texts.train, texts.train_y.tolist()) == ([("a film", "a story"), ("the plot", "that plot")], [0, 1])
    texts = glue.load("rte", None, download=True)
    assert texts.train_y.tolist() == [0, 1]  # the Hub's 1 is not_entailment, which is our 0
    with pytest.raises(ExperimentError, match=r"sst2 could not be downloaded from .* put SST-2/train.tsv"):
        glue.load("sst2", None, download=True)


def test_glue_without_its_files(tmp_path):
    with pytest.raises(ExperimentError, match="rte is read from the data folder, and none was given"):
        glue.load("rte", None)
    with pytest.raises(ExperimentError, match=r"rte needs RTE/train.tsv and dev.tsv, which are not in .*glue or .*"):
        glue.load("rte", tmp_path)
