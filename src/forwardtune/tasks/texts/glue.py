"""Five tasks of GLUE, from the TSV files in which they are published, or from the Hugging Face Hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forwardtune.errors import ExperimentError
from forwardtune.tasks.texts.data import Row, Texts, class_indices, places_of, rows, scores_of, texts_of

HUB = "nyu-mll/glue"


@dataclass(frozen=True)
class Glue:
    """How a task is published, put to a model and measured.

    columns, label, classes: in the TSV files; without classes the label is a score from 0 to 5.
    names: the classes as people call them.
    hub: the columns' names in the Hub's version, whose labels are indices of `order`.
    template, words: the question, and the answer for each class (for a score: for its two ends).
    size: the number of training examples in the full dataset.
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
    """A task by name: its training set and its dev set."""
    task = TASKS[name]
    if folder is None and not download:
        raise ExperimentError(
            f"{name} is read from the data folder, and none was given; name it with --data DIR or in the environment "
            "variable FORWARDTUNE_DATA"
        )
    homes = [folder / "glue", folder / "GLUE", folder] if folder else []
    for home in homes:
        if (home / task.folder / "train.tsv").is_file():
            parts = [rows(home / task.folder / f"{part}.tsv") for part in ("train", "dev")]
            return _texts(task, task.label, parts)
    if download:
        return _texts(task, "label", _from_hub(task, name))
    raise ExperimentError(
        f"{name} needs {task.folder}/train.tsv and dev.tsv, which are not in {' or '.join(map(str, homes))}; put them "
        "there, or have them downloaded with --download"
    )


def _texts(task: Glue, label: str, parts: list[list[Row]]) -> Texts:
    train, test = parts
    if task.classes:
        train_y, test_y = (class_indices(part, label, task.classes) for part in parts)
    else:
        train_y, test_y = (scores_of(part, label, 0.0, 5.0) for part in parts)
    note = f"{len(train):,} of the {task.size:,} training examples of {task.folder}" if len(train) < task.size else ""
    return Texts(
        task.columns,
        task.classes,
        texts_of(train, task.columns),
        train_y,
        texts_of(test, task.columns),
        test_y,
        names=task.names or task.classes,
        high=1.0 if task.classes else 5.0,
        note=note,
        places=places_of(train, test),
    )


def _from_hub(task: Glue, name: str) -> list[list[Row]]:
    """The same tables by `datasets`, with the columns of the TSV files."""
    try:
        import datasets
    except ImportError:
        raise ExperimentError("downloading GLUE needs datasets; install it: pip install datasets") from None
    try:
        dataset: Any = datasets.load_dataset(HUB, name)
    except Exception as error:  # of many kinds, from many libraries
        raise ExperimentError(
            f"{name} could not be downloaded from {HUB} ({str(error).splitlines()[0]}); without internet access put "
            f"{task.folder}/train.tsv and dev.tsv into the data folder"
        ) from None
    return [
        [(f"{HUB}, {part} {number}", _cells(task, row)) for number, row in enumerate(dataset[part])]
        for part in ("train", "validation")
    ]


def _cells(task: Glue, row: dict[str, Any]) -> dict[str, Any]:
    label = task.order[row["label"]] if task.order else row["label"]
    return {**{ours: row[theirs] for ours, theirs in zip(task.columns, task.hub, strict=True)}, "label": label}
