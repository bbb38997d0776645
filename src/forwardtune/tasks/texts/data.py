"""Labelled texts, from tables in files."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forwardtune.errors import ExperimentError

MANY = 100
"""More different labels than this are probably not labels."""

Text = tuple[str, ...]
"""One example: a text, or two."""
Row = tuple[str, dict[str, Any]]
"""Where it comes from, for error messages, and its cells by column."""


@dataclass(frozen=True)
class Texts:
    """Examples and their labels: indices of `classes` or, if there are none, scores from `low` to `high`.

    `names` are the classes as people call them.
    """

    columns: tuple[str, ...]
    classes: tuple[str, ...]
    train: Sequence[Text]
    train_y: Tensor
    test: Sequence[Text]
    test_y: Tensor
    names: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 1.0
    note: str = ""

    @cached_property
    def digest(self) -> str:
        content = json.dumps([self.train, self.train_y.tolist(), self.test, self.test_y.tolist(), self.classes])
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def rows(file: Path) -> list[Row]:
    """The table in a .csv, .tsv or .jsonl file."""
    if file.suffix not in (".csv", ".tsv", ".jsonl"):
        raise ExperimentError(f"{file} is not a table that can be read: it must be .csv, .tsv or .jsonl")
    try:
        with open(file, encoding="utf-8-sig", newline="") as content:
            table = list(_json_rows(content, file) if file.suffix == ".jsonl" else _csv_rows(content, file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ExperimentError(f"{file} cannot be read ({error})") from None
    if not table:
        raise ExperimentError(f"{file} has no examples in it")
    return table


def _csv_rows(content: Any, file: Path) -> Iterator[Row]:
    style: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if file.suffix == ".tsv" else {}
    reader = csv.DictReader(content, strict=True, **style)
    for row in reader:
        where = f"{file}, line {reader.line_num}"
        if None in row or None in row.values():
            raise ExperimentError(f"{where}: the number of cells differs from that of the header")
        yield where, row


def _json_rows(content: Any, file: Path) -> Iterator[Row]:
    for number, line in enumerate(content, 1):
        where = f"{file}, line {number}"
        try:
            row = json.loads(line) if line.strip() else None
        except ValueError as error:
            raise ExperimentError(f"{where} is not JSON ({error})") from None
        if row is not None and not isinstance(row, dict):
            raise ExperimentError(f"{where} is not an object with a text and a label")
        if row is not None:
            yield where, row


def texts_of(table: Sequence[Row], columns: Sequence[str]) -> list[Text]:
    return [tuple(str(cell(row, column)).strip() for column in columns) for row in table]


def cell(row: Row, column: str) -> Any:
    where, cells = row
    if column not in cells:
        raise ExperimentError(f"{where}: there is no column {column!r}, only {', '.join(map(repr, cells))}")
    if cells[column] is None:
        raise ExperimentError(f"{where}: the cell of {column!r} is empty; fill it, or leave the line out")
    return cells[column]


def classes_of(table: Sequence[Row], column: str) -> tuple[str, ...]:
    """The different labels, sorted."""
    for row in table:
        if not str(cell(row, column)).strip():
            raise ExperimentError(f"{row[0]}: the label is empty; fill it, or leave the line out")
    classes = sorted({str(cell(row, column)) for row in table})
    if len(classes) == 1 or len(classes) > MANY:
        raise ExperimentError(
            f"the column {column!r} has {len(classes)} different labels (the first is {classes[0]!r}); "
            f"there must be 2 to {MANY}"
        )
    return tuple(classes)


def class_indices(table: Sequence[Row], column: str, classes: Sequence[str]) -> Tensor:
    """The labels as indices of classes."""
    known = {name: index for index, name in enumerate(classes)}
    for row in table:
        if str(cell(row, column)) not in known:
            raise ExperimentError(
                f"{row[0]}: the label {str(cell(row, column))!r} is none of {', '.join(map(repr, classes))}"
            )
    return torch.tensor([known[str(cell(row, column))] for row in table])


def scores_of(table: Sequence[Row], column: str, low: float, high: float) -> Tensor:
    scores = []
    for row in table:
        try:
            score = float(cell(row, column))
        except (TypeError, ValueError):
            score = float("nan")
        if not low <= score <= high:
            raise ExperimentError(f"{row[0]}: the score {cell(row, column)!r} is not a number from {low:g} to {high:g}")
        scores.append(score)
    return torch.tensor(scores)


def from_files(train: Path, test: Path | None, columns: tuple[str, ...], label: str) -> Texts:
    """A user's own classes; without a test file a tenth of every class, drawn once, is held out."""
    table = rows(train)
    classes = classes_of(table, label)
    note = ""
    if test is None:
        held = _tenth(class_indices(table, label, classes))
        tests = [row for i, row in enumerate(table) if i in held]
        table = [row for i, row in enumerate(table) if i not in held]
        note = f"{len(held)} of the examples in {train.name} are held out for testing"
    else:
        tests = rows(test)
    return Texts(
        columns,
        classes,
        texts_of(table, columns),
        class_indices(table, label, classes),
        texts_of(tests, columns),
        class_indices(tests, label, classes),
        names=classes,
        note=note,
    )


def _tenth(labels: Tensor) -> set[int]:
    """The indices of a tenth, at least one, of every class that has two examples or more."""
    held: set[int] = set()
    for label in set(labels.tolist()):
        own = (labels == label).nonzero()[:, 0]
        order = own[torch.randperm(len(own), generator=torch.Generator().manual_seed(0))].tolist()
        held.update(order[: max(1, round(len(order) / 10)) if len(order) > 1 else 0])
    if not held:
        raise ExperimentError("every class has only one example, so none can be held out; give more, or a test file")
    return held
