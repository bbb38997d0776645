"""Five tasks of GLUE, from the TSV files in which they are published, or from a hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forwardtune.errors import ExperimentError
from forwardtune.tasks.texts.data import Row, Texts, numbers_of, rows, scores_of, texts_of

HUB = "nyu-mll/glue"


@dataclass(frozen=True)
class Glue:
    """How a task is published, asked and judged.

    columns, label, classes: of the TSV files; without classes the label is a score from 0 to 5.
    names: the classes for people.
    hub: the columns' names in the hub's version, whose labels are numbers of `order`.
    template, words: the question, and the answer for each class (of a score: for its two ends).
    size: training examples in the whole set.
    """

    folder: str
    columns: tuple[str, ...]
    label: str
    classes: tuple[str, ...]
    metrics: tuple[str, ...]
    template: str
    words: tuple[str, ...]
    size: int
    hub: tuple[str, ...]
    names: tuple[str, ...] = ()
    order: tuple[str, ...] = ()


TASKS = {
    "sst2": Glue(
        folder="SST-2",
        columns=("sentence",),
        label="label",
        classes=("0", "1"),
        metrics=("accuracy",),
        template="{sentence} It was",
        words=("terrible", "great"),
        size=67349,
        hub=("sentence",),
        names=("negative", "positive"),
        order=("0", "1"),
    ),
    "mrpc": Glue(
        folder="MRPC",
        columns=("#1 String", "#2 String"),
        label="Quality",
        classes=("0", "1"),
        metrics=("accuracy", "f1"),
        template="{#1 String} {#2 String} Do the two sentences mean the same? Answer:",
        words=("No", "Yes"),
        size=3668,
        hub=("sentence1", "sentence2"),
        names=("different", "same"),
        order=("0", "1"),
    ),
    "qnli": Glue(
        folder="QNLI",
        columns=("question", "sentence"),
        label="label",
        classes=("not_entailment", "entailment"),
        metrics=("accuracy",),
        template="{question} {sentence} Does the sentence answer the question? Answer:",
        words=("No", "Yes"),
        size=104743,
        hub=("question", "sentence"),
        order=("entailment", "not_entailment"),
    ),
    "rte": Glue(
        folder="RTE",
        columns=("sentence1", "sentence2"),
        label="label",
        classes=("not_entailment", "entailment"),
        metrics=("accuracy",),
        template='{sentence1} Does this mean that "{sentence2}" is true? Answer:',
        words=("No", "Yes"),
        size=2490,
        hub=("sentence1", "sentence2"),
        order=("entailment", "not_entailment"),
    ),
    "stsb": Glue(
        folder="STS-B",
        columns=("sentence1", "sentence2"),
        label="score",
        classes=(),
        metrics=("pearson", "spearman"),
        template="{sentence1} {sentence2} Do the two sentences mean the same? Answer:",
        words=("No", "Yes"),
        size=5749,
        hub=("sentence1", "sentence2"),
    ),
}


def load(name: str, folder: Path | None, *, download: bool = False) -> Texts:
    """A task by its name: its training and its dev set."""
    task = TASKS[name]
    if folder is None and not download:
        raise ExperimentError(
            f"{name} is read from a folder of data, and none was given; name it with --data DIR or in the environment "
            "variable FORWARDTUNE_DATA"
        )
    places = [place / task.folder for place in (folder / "glue", folder / "GLUE", folder)] if folder else []
    for place in places:
        if (place / "train.tsv").is_file():
            parts = [rows(place / f"{part}.tsv") for part in ("train", "dev")]
            return _texts(task, task.columns, task.label, parts)
    if download:
        return _texts(task, task.columns, "label", _from_hub(task, name))
    homes = " or ".join(str(place.parent) for place in places)
    raise ExperimentError(
        f"{name} needs {task.folder}/train.tsv and dev.tsv, which are not in {homes}"
        "; put them there, or have them fetched with --download"
    )


def _texts(task: Glue, columns: tuple[str, ...], label: str, parts: list[list[Row]]) -> Texts:
    train, test = parts
    if task.classes:
        train_y, test_y = (numbers_of(part, label, task.classes) for part in parts)
    else:
        train_y, test_y = (scores_of(part, label, 0.0, 5.0) for part in parts)
    note = f"{len(train):,} of the {task.size:,} training examples of {task.folder}" if len(train) < task.size else ""
    return Texts(
        columns,
        task.classes,
        texts_of(train, columns),
        train_y,
        texts_of(test, columns),
        test_y,
        names=task.names or task.classes,
        high=1.0 if task.classes else 5.0,
        note=note,
    )


def _from_hub(task: Glue, name: str) -> list[list[Row]]:
    """The same table by `datasets`."""
    try:
        import datasets
    except ImportError:
        raise ExperimentError("a download of GLUE needs datasets; install it: pip install datasets") from None
    try:
        found: Any = datasets.load_dataset(HUB, name)
    except Exception as error:  # of many kinds, from many libraries
        raise ExperimentError(
            f"{name} could not be fetched from {HUB} ({str(error).splitlines()[0]}); where there is no internet, put "
            f"{task.folder}/train.tsv and dev.tsv into the folder of data"
        ) from None

    def cells(row: dict[str, Any]) -> dict[str, Any]:
        label = task.order[row["label"]] if task.order else row["label"]
        return {**{ours: row[theirs] for ours, theirs in zip(task.columns, task.hub, strict=True)}, "label": label}

    return [
        [(f"{HUB}, {part} {number}", cells(row)) for number, row in enumerate(found[part])]
        for part in ("train", "validation")
    ]
