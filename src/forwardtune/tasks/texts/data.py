"""Texts, with labels or without, from tables in files or line by line."""

from __future__ import annotations

import csv
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forwardtune.errors import ExperimentError
from forwardtune.files import parse_json

MANY = 100
"""More different labels than this are probably not labels."""

Text = tuple[str, ...]
"""One example: a text, or two."""
Row = tuple[str, dict[str, Any]]
"""Where it comes from, for error messages, and its cells by column."""
LINE = "text"
"""The column that the lines of a .txt file make."""


@dataclass(frozen=True)
class Texts:
    """Examples and their labels: indices of `classes` or, if there are none, scores from `low` to `high`.

    `names` are the classes as people call them, `places` where the texts of either set come from.
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
    places: tuple[Sequence[str], Sequence[str]] = ((), ())

    @cached_property
    def digest(self) -> str:
        content = json.dumps([self.train, self.train_y.tolist(), self.test, self.test_y.tolist(), self.classes])
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def without_labels(self) -> Texts:
        train_y, test_y = torch.zeros(len(self.train)), torch.zeros(len(self.test))
        return replace(self, classes=(), names=(), train_y=train_y, test_y=test_y)


def rows(file: Path) -> list[Row]:
    """The table in a .csv, .tsv or .jsonl file, or that of a single column which the lines of a .txt file make."""
    readers = {".csv": _csv_rows, ".tsv": _csv_rows, ".jsonl": _json_rows, ".txt": _lines}
    if file.suffix not in readers:
        raise ExperimentError(f"{file} is not a table that can be read: it must be .csv, .tsv, .jsonl or .txt")
    try:
        with open(file, encoding="utf-8-sig", newline="") as content:
            table = list(readers[file.suffix](content, file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ExperimentError(f"{file} cannot be read ({error})") from None
    if not table:
        raise ExperimentError(f"{file} has no examples in it")
    return table


def _csv_rows(content: Any, file: Path) -> Iterator[Row]:
    style: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if file.suffix == ".tsv" else {}
    reader = csv.DictReader(content, strict=True, **style)
    names = list(reader.fieldnames or ())
    name, times = Counter(names).most_common(1)[0] if names else ("", 0)
    if times > 1:
        raise ExperimentError(f"{file} has {times} columns called {name!r}; give each a name of its own")
    for row in reader:
        where = f"{file}, line {reader.line_num}"
        if None in row or None in row.values():
            raise ExperimentError(f"{where}: the number of cells differs from that of the header")
        yield where, row


def _json_rows(content: Any, file: Path) -> Iterator[Row]:
    for number, line in enumerate(content, 1):
        where = f"{file}, line {number}"
        try:
            row = parse_json(line) if line.strip() else None
        except ValueError as error:
            raise ExperimentError(f"{where} is not JSON ({error})") from None
        if row is not None and not isinstance(row, dict):
            raise ExperimentError(f"{where} is not an object with a text and a label")
        if row is not None:
            yield where, row


def _lines(content: Any, file: Path) -> Iterator[Row]:
    for number, line in enumerate(content, 1):
        if line.strip():
            yield f"{file}, line {number}", {LINE: line.strip()}


def texts_of(table: Sequence[Row], columns: Sequence[str]) -> list[Text]:
    return [tuple(str(cell(row, column)).strip() for column in columns) for row in table]


def places_of(train: Sequence[Row], test: Sequence[Row]) -> tuple[Sequence[str], Sequence[str]]:
    return [where for where, _ in train], [where for where, _ in test]


def cell(row: Row, column: str) -> Any:
    where, cells = row
    if column not in cells:
        raise ExperimentError(f"{where}: there is no column {column!r}, only {', '.join(map(repr, cells))}")
    given = cells[column]
    if given is None:
        raise ExperimentError(f"{where}: the cell of {column!r} is empty; fill it, or leave the line out")
    if not isinstance(given, str | int | float):
        raise ExperimentError(f"{where}: the cell of {column!r} is not a text or a number, but {given!r}")
    if isinstance(given, str) and any("\ud800" <= c <= "\udfff" for c in given):
        raise ExperimentError(f"{where}: the cell of {column!r} holds half a character ({given!r}); mend it")
    return given


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
    table, tests, note = _with_tests(table, class_indices(table, label, classes), train, test)
    return Texts(
        columns,
        classes,
        texts_of(table, columns),
        class_indices(table, label, classes),
        texts_of(tests, columns),
        class_indices(tests, label, classes),
        names=classes,
        note=note,
        places=places_of(table, tests),
    )


def plain_texts(train: Path, test: Path | None, columns: tuple[str, ...]) -> Texts:
    """A user's own texts without labels; without a test file a tenth, drawn once, is held out."""
    table = rows(train)
    table, tests, note = _with_tests(table, torch.zeros(len(table)), train, test)
    return Texts(
        columns,
        (),
        texts_of(table, columns),
        torch.zeros(len(table)),
        texts_of(tests, columns),
        torch.zeros(len(tests)),
        note=note,
        places=places_of(table, tests),
    )


def _with_tests(table: list[Row], labels: Tensor, train: Path, test: Path | None) -> tuple[list[Row], list[Row], str]:
    """Training and test rows, with a note if the latter are held out of the former."""
    if test is not None:
        return table, rows(test), ""
    held = _tenth(labels)
    tests = [row for i, row in enumerate(table) if i in held]
    rest = [row for i, row in enumerate(table) if i not in held]
    return rest, tests, f"{len(held)} of the examples in {train.name} are held out for testing"


def _tenth(labels: Tensor) -> set[int]:
    """The indices of a tenth, at least one, of every class that has two examples or more."""
    held: set[int] = set()
    for label in set(labels.tolist()):
        own = (labels == label).nonzero()[:, 0]
        order = own[torch.randperm(len(own), generator=torch.Generator().manual_seed(0))].tolist()
        held.update(order[: max(1, round(len(order) / 10)) if len(order) > 1 else 0])
    if not held:
        one = "every class has" if len(labels) > 1 else "there is"
        raise ExperimentError(f"{one} only one example, so none can be held out; give more, or a test file")
    return held
