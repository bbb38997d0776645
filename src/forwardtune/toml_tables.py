"""Frozen dataclasses from TOML or JSON: every key is known, every value has its type, errors say where they are."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from forwardtune.errors import ExperimentError, printable

T = TypeVar("T")

NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false", Mapping: "a table"}


def build(kind: type[T], table: Any, where: str, *, strict: bool = True) -> T:
    """The dataclass `kind` from a table; `where` is what an error calls the table.

    strict: refuse keys that are no fields, as in what people write; what we wrote may be by a version that has more.
    """
    if not isinstance(table, Mapping):
        raise ExperimentError(f"{where} must be a table, not {table!r}")
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    hints = get_type_hints(kind)
    if strict:
        for key in table:
            one_of(f"{where}: the key", key, fields)
    for name, field in fields.items():
        if name not in table and field.default is field.default_factory is dataclasses.MISSING:
            raise ExperimentError(f"{where} has no {name!r}" + ("; give it" if strict else ""))
    try:
        return kind(
            **{
                name: value(hints[name], table[name], f"{where}: {name}", strict=strict, least=int(field.default != ()))
                for name, field in fields.items()
                if name in table
            }
        )
    except ExperimentError as error:
        text = str(error)
        raise ExperimentError(text if text.startswith(printable(where)) else f"{where}: {text}") from None


def value(kind: Any, given: Any, where: str, *, strict: bool = True, least: int = 1) -> Any:
    """What was given, converted to a field's type; of a list there must be at least so many entries."""
    if get_origin(kind) in (Union, UnionType):
        if given is None and NoneType in get_args(kind):
            return None
        words = [word for member in get_args(kind) if get_origin(member) is Literal for word in get_args(member)]
        if isinstance(given, str) and given in words:
            return given
        kind = next(k for k in get_args(kind) if k is not NoneType and get_origin(k) is not Literal)
        return value(kind, given, where, strict=strict, least=least)
    if get_origin(kind) is tuple:
        if not isinstance(given, list | tuple) or len(given) < least:
            what = "a list with at least one entry" if least else "a list"
            raise ExperimentError(f"{where} must be {what}, not {given!r}")
        return tuple(value(get_args(kind)[0], entry, where, strict=strict) for entry in given)
    if dataclasses.is_dataclass(kind):
        if isinstance(given, kind):  # type: ignore[arg-type]
            return given
        return build(kind, given, where, strict=strict)  # type: ignore[arg-type]
    if get_origin(kind) is Mapping and isinstance(given, Mapping):
        inner = get_args(kind)[1]
        return {key: value(inner, entry, f"{where}: {key}", strict=strict) for key, entry in given.items()}
    if kind in (Any, object):
        return given
    if kind is float and isinstance(given, int) and not isinstance(given, bool) and abs(given) < 2**1000:
        return float(given)
    kind = get_origin(kind) or kind
    if not isinstance(given, kind) or (isinstance(given, bool) and kind is not bool):
        raise ExperimentError(f"{where} must be {NAMES[kind]}, not {given!r}")
    if kind is float and not math.isfinite(given):
        raise ExperimentError(f"{where} must be finite, not {given!r}")
    return given


def one_of(what: str, given: str, known: Iterable[str]) -> None:
    """Refuses a word that is not among the known ones."""
    known = list(known)
    if given not in known:
        raise ExperimentError(f"{what} {given!r} is not known{nearest(given, known)}; choose one of {', '.join(known)}")


def nearest(word: str, known: Iterable[str]) -> str:
    """A suggestion to append to an error, if a known word is similar.

    >>> nearest("Mnits", ["mnist", "digits"])
    " (did you mean 'mnist'?)"
    """
    originals = {k.lower(): k for k in known}
    matches = difflib.get_close_matches(word.lower(), originals, n=1)
    return f" (did you mean {originals[matches[0]]!r}?)" if matches else ""


def is_name(what: str, given: str) -> None:
    """Refuses what cannot be part of a file name or of a table's cell."""
    if not given or not given.isprintable() or set(given) & set('/\\|<>:"?*'):
        raise ExperimentError(f'{what} must be text without any of / \\ | < > : " ? *, not {given!r}')


def at_least(minimum: int, **settings: int) -> None:
    for name, given in settings.items():
        if given < minimum:
            raise ExperimentError(f"{name} must be at least {minimum}, not {given}")


def above_zero(**settings: float) -> None:
    for name, given in settings.items():
        if given <= 0:
            raise ExperimentError(f"{name} must be above zero, not {given:g}")
