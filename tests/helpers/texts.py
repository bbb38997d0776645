"""Small text workloads for tests: models and tables in a folder, and tasks on them."""

import json

from forwardtune.tasks import Sources, TextWorkload, prepare
from tests.helpers import tiny


def write_jsonl(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def models_and_tables(home):
    """Models of every kind, and two tables: of single texts, and of pairs."""
    tiny.causal(home / "causal")
    tiny.causal(home / "padless", pad=False)
    tiny.encoder(home / "encoder")
    tiny.encoder(home / "masked", masked=True)
    pairs = [{"a": row["text"], "b": "It was good", "label": row["label"]} for row in tiny.reviews(20)]
    write_jsonl(home / "reviews.jsonl", tiny.reviews())
    write_jsonl(home / "pairs.jsonl", pairs)
    return home


QUESTIONS = {
    "reviews.jsonl": {"text": ("text",), "template": "{text} It was", "words": ("bad", "good")},
    "pairs.jsonl": {"text": ("a", "b"), "template": "{a} {b} Answer :", "words": ("bad", "good")},
}


def workload(model, file="reviews.jsonl", **changes):
    asked = QUESTIONS[file]
    if changes.get("setup") == "head":
        asked = {"text": asked["text"]}
    fixed = {"name": "w", "data": "files", "network": "transformer", "weights": model, "train": file, "label": "label"}
    sizes = {"batch": 8, "seeds": (0,), "queries": 8, "evaluations": 2, "dtype": "float64"}
    return TextWorkload(**fixed | sizes | asked | changes)


def task_of(folder, model, file="reviews.jsonl", **changes):
    return prepare(workload(model, file, **changes), Sources(folder=folder), "cpu")
