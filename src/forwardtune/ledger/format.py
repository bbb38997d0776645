"""The contents of a ledger: the header, the numbers of a step, and the checksum of an exported file.

The header describes the run and the weights it started from. A step is packed as little-endian float64 numbers:

    kind, queries so far, of a review its number of steps and two losses, the numeric settings of each group,
    then for each probe its direction, loss and offset in each group,
    then, if the step was taken, the offset decided on in each direction and group

If examples have lines of their own, the last two are: the number of lines and of probes, the offset of each probe in
each group, each line's losses, and, if the step was taken, the offset decided on in each line and group.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from forwardtune.arguments import PROBES, ROUNDINGS, check_directions
from forwardtune.auto import SPAN, is_plain, is_state, start
from forwardtune.errors import InvalidArgumentError, LedgerError
from forwardtune.files import parse_json
from forwardtune.noise import DISTRIBUTIONS, NOISE_VERSION
from forwardtune.noise.backends import chunks
from forwardtune.noise.field import reach_of
from forwardtune.noise.mover import check_number
from forwardtune.record import LineRecord, Review, StepRecord
from forwardtune.scales import SCALES

SCHEMA = 4
TAKEN, NOT_TAKEN, RAISED = 0, 1, 2
NEW_STATE, WITH_BUFFERS, REVIEWED, WENT_BACK, SHARED = 4, 8, 16, 32, 64
"""Added to the kind of a step that changed the run's state, of one whose state includes buffers, of one that reviewed
others, of one that then undid them, and of one whose examples shared a line."""

MOST_QUERIES = 2**53
"""Counts are stored as floats, which tell whole numbers apart up to here."""
NOT_SETTINGS = ("params", "param_names", "memory", "run", "scales")
"""What a parameter group has beside its settings."""

EXPORT_FORMAT = "forwardtune ledger"
EXPORT_KEYS = {"format", "schema", "header", "steps", "lines", "columns", "anchors", "buffers", "state", "crc"}
"""Of an exported file's metadata; the checksum covers what they hold."""
Column = np.ndarray[Any, Any]
"""One number per step of an exported run, or a single one if it never changes."""


def dtype_name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


DTYPES = tuple(map(dtype_name, chunks.DTYPES))
"""The dtypes of weights, by name."""


@dataclass(frozen=True)
class Parameter:
    """A tensor that the run moves: its names in the model, its number in the noise, its group, and its fingerprint.

    `scale` is what its directions are multiplied by.
    """

    names: tuple[str, ...]
    number: int
    group: int
    shape: tuple[int, ...]
    dtype: str
    digest: str
    scale: float = 1.0


@dataclass(frozen=True)
class Group:
    """A parameter group: its tensors' names (including those that do not move), its settings and its memory.

    `labels` are the names that were passed to the optimizer, if any.
    """

    names: tuple[str, ...]
    labels: tuple[str, ...] | None
    settings: Mapping[str, Any]
    memory: Mapping[str, Any]

    @property
    def numbers(self) -> list[str]:
        """The numeric settings, which are recorded with every step; others only when they change."""
        return [name for name, value in self.settings.items() if type(value) in (int, float)]


@dataclass(frozen=True)
class Header:
    """A run at its start; `step` is the number of its first step.

    `frozen` is the fingerprint of the model's parameters that do not move, `noise` the version of the noise, `version`
    the release of forwardtune and `created` the time at which the recording started. `auto` is what the run knew of
    the size of its steps, if that is found while training.
    """

    method: str
    defaults: Mapping[str, Any]
    seed: int
    distribution: Any
    directions: int | str
    max_nonfinite: int
    fsync: Any
    checkpoint_every: int | None
    step: int
    queries: int
    nonfinite: int
    groups: tuple[Group, ...]
    parameters: tuple[Parameter, ...]
    frozen: str | None
    noise: int
    version: str
    created: str
    scale: Any = "absolute"
    auto: Mapping[str, Any] | None = None
    probes: Any = "in-place"
    rounding: Any = "nearest"

    @property
    def dimension(self) -> int:
        """The number of weights that move."""
        return sum(math.prod(parameter.shape) for parameter in self.parameters)

    @cached_property
    def reach(self) -> float:
        """The largest offset that the run's weights could go to."""
        return reach_of(getattr(torch, parameter.dtype) for parameter in self.parameters)

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Header:
        """The header, checked, since the file may come from anyone."""
        try:
            values = {name: immutable(value) for name, value in parse_json(text).items()}
            if isinstance(values.get("auto"), dict):
                values["auto"] = {**start(), **values["auto"]}
            values["groups"] = tuple(Group(**group) for group in values["groups"])
            values["parameters"] = tuple(Parameter(**parameter) for parameter in values["parameters"])
            header = cls(**values)
            header._check()
        except (TypeError, ValueError, ArithmeticError, KeyError, AttributeError) as error:
            raise LedgerError(f"the ledger's header is invalid ({error}); get an undamaged copy of the file") from error
        if header.noise != NOISE_VERSION:
            raise LedgerError(
                f"the run was made with noise version {header.noise}, and this release of forwardtune has version "
                f"{NOISE_VERSION}; install release {header.version}, which recorded the run"
            )
        return header

    def _check(self) -> None:
        check_number("seed", self.seed)
        check_number("step", self.step)
        check_directions(self.directions, self.distribution)
        _require(self.distribution in DISTRIBUTIONS, f"distribution {self.distribution!r}")
        _require(self.scale in SCALES, f"scale {self.scale!r}")
        _require(self.probes in PROBES and self.rounding in ROUNDINGS, f"{self.probes!r} and {self.rounding!r}")
        _require(self.auto is None or is_state(self.auto, len(self.groups), self.reach), "auto")
        _require(self.groups and self.parameters, "no parameters")
        _require(len({p.number for p in self.parameters}) == len(self.parameters), "duplicate parameter numbers")
        counters = (self.queries, self.nonfinite, self.max_nonfinite)
        _require(all(type(n) is int and 0 <= n < MOST_QUERIES for n in counters), "counters")
        _require(all(isinstance(text, str) for text in (self.method, self.version, self.created)), "texts")
        _require(are_settings(self.defaults), f"defaults {self.defaults!r}")
        for group in self.groups:
            _require(are_settings(group.settings) and _is_memory(group.memory), "a group's settings")
            for names in (group.names, group.names if group.labels is None else group.labels):
                _require(isinstance(names, tuple) and all(isinstance(n, str) for n in names), "a group's names")
                _require(len(names) == len(group.names), "a group's names")
        for p in self.parameters:
            _require(p.names and all(isinstance(name, str) for name in p.names), f"names {p.names!r}")
            _require(isinstance(p.number, int) and 0 <= p.number < 2**32, f"parameter number {p.number!r}")
            _require(isinstance(p.group, int) and 0 <= p.group < len(self.groups), f"group {p.group!r}")
            _require(all(isinstance(n, int) and n >= 0 for n in p.shape), f"shape {p.shape!r}")
            _require(p.dtype in DTYPES, f"dtype {p.dtype!r}")
            largest = math.sqrt(torch.finfo(getattr(torch, p.dtype)).max)
            _require(isinstance(p.scale, int | float) and 0 < p.scale < largest, f"scale {p.scale!r}")


def _require(condition: object, complaint: str) -> None:
    if not condition:
        raise ValueError(complaint)


def are_settings(values: Any) -> bool:
    """Whether these are settings of a group, by name."""
    return isinstance(values, dict) and all(
        name not in NOT_SETTINGS and is_plain(value, str) for name, value in values.items()
    )


def _is_memory(memory: Any) -> bool:
    return isinstance(memory, dict) and all(is_plain(value, str, tuple) for value in memory.values())


def immutable(value: Any) -> Any:
    """JSON with tuples for its lists, at all levels: a search's memory holds immutable values."""
    if isinstance(value, list):
        return tuple(immutable(item) for item in value)
    if isinstance(value, dict):
        return {key: immutable(item) for key, item in value.items()}
    return value


class Row(NamedTuple):
    """A step as it is stored: its packed numbers, and the other settings as JSON if they have changed."""

    numbers: bytes
    settings: str | None = None


def pack(record: StepRecord, flags: int, settings: Sequence[float], *, by_example: bool = False) -> bytes:
    """The numbers of a step; `flags` (NEW_STATE, WITH_BUFFERS) describe the state after it."""
    kind = TAKEN if record.taken else RAISED if record.raised else NOT_TAKEN
    flags += SHARED * record.shared
    numbers: list[float] = [kind + flags, record.queries]
    if record.review:
        flags += REVIEWED + WENT_BACK * record.review.back
        numbers = [kind + flags, record.queries, *record.review[:3]]
    numbers += settings
    if by_example:
        numbers += _pack_examples(record)
        return struct.pack(f"<{len(numbers)}d", *numbers)
    for direction, groups in enumerate(record.lines):
        for i, loss in enumerate(groups[0].losses):
            numbers += (direction, loss, *[line.offsets[i] for line in groups])
    if record.taken:
        numbers += [line.t for groups in record.lines for line in groups]
    return struct.pack(f"<{len(numbers)}d", *numbers)


def _pack_examples(record: StepRecord) -> list[float]:
    """The lines of examples, which are probed at the same offsets."""
    first = record.lines[0] if record.lines else ()
    numbers: list[float] = [len(record.lines), len(first[0].losses) if first else 0]
    numbers += [offset for line in first for offset in line.offsets]
    numbers += [loss for groups in record.lines for loss in groups[0].losses]
    return numbers + [line.t for groups in record.lines for line in groups if record.taken]


def _unpack_examples(rest: Sequence[float], groups: int, taken: bool) -> list[tuple[LineRecord, ...]]:
    lines, probes = (int(number) for number in rest[:2])
    least = int(taken)
    _require(lines >= least and probes >= least, f"{lines} lines with {probes} probes")
    rest = rest[2:]
    _require(len(rest) == groups * probes + lines * (probes + groups * taken), f"{len(rest)} numbers")
    offsets = [tuple(rest[g * probes : (g + 1) * probes]) for g in range(groups)]
    losses, targets = rest[groups * probes :], rest[groups * probes + lines * probes :]
    return [
        tuple(
            LineRecord(
                offsets[g], tuple(losses[j * probes : (j + 1) * probes]), targets[j * groups + g] if taken else 0.0
            )
            for g in range(groups)
        )
        for j in range(lines)
    ]


def has_flag(packed: bytes, flag: int) -> bool:
    """Whether a packed step has a flag such as NEW_STATE."""
    kind = struct.unpack_from("<d", packed)[0] if len(packed) >= 8 else 0.0
    return 0 <= kind < 2 * SHARED and bool(int(kind) & flag)


def unpack(step: int, packed: bytes, header: Header) -> tuple[StepRecord, list[dict[str, float]]]:
    """The record of a packed step, without what only the method knows (gamma, sigma), and each group's numbers."""
    groups, directions = len(header.groups), header.directions
    try:
        kind, queries, *rest = struct.unpack(f"<{len(packed) // 8}d", packed)
        counted = int(queries)
        _require(header.queries <= counted == queries < MOST_QUERIES, f"{queries:g} queries")
        _require(0 <= kind < 2 * SHARED and kind % NEW_STATE in (TAKEN, NOT_TAKEN, RAISED), f"kind {kind:g}")
        review = None
        if int(kind) & REVIEWED:
            review, rest = Review(int(rest[0]), rest[1], rest[2], bool(int(kind) & WENT_BACK)), rest[3:]
            _require(0 < review.steps <= SPAN, f"a review of {review.steps} steps")
        settings = []
        for group in header.groups:
            names = group.numbers
            values, rest = rest[: len(names)], rest[len(names) :]
            settings.append({n: like(group.settings[n], value) for n, value in zip(names, values, strict=True)})
        taken, raised = kind % NEW_STATE == TAKEN, kind % NEW_STATE == RAISED
        if not isinstance(directions, int):
            examples = checked(_unpack_examples(rest, groups, taken), header.reach)
            record = StepRecord.of(
                step,
                examples,
                queries=counted,
                taken=taken,
                raised=raised,
                review=review,
                by_example=True,
                shared=bool(int(kind) & SHARED),
            )
            return record, settings
        split = len(rest) - directions * groups if taken else len(rest)
        _require(split >= 0 and split % (2 + groups) == 0, f"{len(rest)} numbers")
        probes = [rest[i : i + 2 + groups] for i in range(0, split, 2 + groups)]
        targets = [rest[i : i + groups] for i in range(split, len(rest), groups)] or [[0.0] * groups] * directions
        lines: list[tuple[LineRecord, ...]] = []
        for direction, own in groupby(probes, key=itemgetter(0)):
            _require(direction == len(lines) < directions, f"direction {direction:g}")
            _, losses, *offsets = zip(*own, strict=True)
            pairs = zip(offsets, targets[len(lines)], strict=True)
            lines.append(tuple(LineRecord(o, losses, t) for o, t in pairs))
        _require(len(lines) == directions or not taken, f"{len(lines)} of {directions} directions")
        checked(lines, header.reach)
        record = StepRecord.of(step, lines, queries=counted, taken=taken, raised=raised, review=review)
    except (struct.error, ValueError, ArithmeticError, IndexError) as error:
        complaint = f"step {step} of the ledger is invalid ({error}); get an undamaged copy of the file"
        raise LedgerError(complaint) from error
    return record, settings


def checked(lines: list[tuple[LineRecord, ...]], reach: float) -> list[tuple[LineRecord, ...]]:
    """Refuses offsets to which no run goes."""
    for line in (line for groups in lines for line in groups):
        for t in (*line.offsets, line.t):
            _require(abs(t) <= reach, f"offset {t:g}")
    return lines


def like(example: Any, value: float) -> float:
    """An integer if the setting was one at the start of the run."""
    return int(value) if isinstance(example, int) and value.is_integer() else value


def dump(value: Any) -> str:
    """Settings, or a search's memory, as JSON."""
    try:
        return json.dumps(value, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"a ledger can record a search's memory only if it holds numbers, strings and tuples of them: {error}"
        ) from None


def checksum(columns: Mapping[str, Column], metadata: Mapping[str, str]) -> int:
    """The CRC-32 of all that is in an exported file."""
    crc = zlib.crc32(json.dumps([metadata[key] for key in sorted(metadata) if key != "crc"]).encode())
    for name in sorted(columns):
        crc = zlib.crc32(columns[name].tobytes(), zlib.crc32(f"{name} {columns[name].dtype}".encode(), crc))
    return crc
