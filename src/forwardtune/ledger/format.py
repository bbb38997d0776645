"""What a ledger says: the header, and the numbers of a step.

The header describes the run and the weights it started from. A step is packed as little-endian float64 numbers:

    kind, queries so far, the numeric settings of each group,
    then for each probe its direction, loss and offset in each group,
    then, if the step was taken, the stand in each direction and group
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from forwardtune.errors import InvalidArgumentError, LedgerError
from forwardtune.noise import DISTRIBUTIONS, NOISE_VERSION
from forwardtune.noise.backends import chunks
from forwardtune.noise.mover import check_number
from forwardtune.record import LineRecord, StepRecord

SCHEMA = 1
TAKEN, NOT_TAKEN, RAISED = 0, 1, 2
LEFT, BUFFERS = 4, 8
"""Added to the kind of a step that left another state behind than the step before, and if buffers are part of it."""


def dtype_name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


DTYPES = tuple(map(dtype_name, chunks.DTYPES))
"""The dtypes of weights, by name."""


@dataclass(frozen=True)
class Parameter:
    """A tensor that the run moves: its names in the model, its number and group in the noise, and what it held."""

    names: tuple[str, ...]
    number: int
    group: int
    shape: tuple[int, ...]
    dtype: str
    digest: str


@dataclass(frozen=True)
class Group:
    """A parameter group: its tensors' names (also of those that do not move), its settings and what it remembers.

    `labels` are the names that the optimizer was given, if any.
    """

    names: tuple[str, ...]
    labels: tuple[str, ...] | None
    settings: Mapping[str, Any]
    memory: Mapping[str, Any]

    @property
    def numbers(self) -> list[str]:
        """The settings whose values every step has; others are recorded when they change."""
        return [name for name, value in self.settings.items() if type(value) in (int, float)]


@dataclass(frozen=True)
class Header:
    """A run as it began; `frozen` is the fingerprint of the model's parameters that do not move."""

    method: str
    defaults: Mapping[str, Any]
    seed: int
    distribution: Any
    directions: int
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

    @property
    def dimension(self) -> int:
        """How many weights move."""
        return sum(math.prod(parameter.shape) for parameter in self.parameters)

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Header:
        """The header of a file that may come from anyone."""
        try:
            values = {name: frozen(value) for name, value in json.loads(text).items()}
            values["groups"] = tuple(Group(**group) for group in values["groups"])
            values["parameters"] = tuple(Parameter(**parameter) for parameter in values["parameters"])
            header = cls(**values)
            header._check()
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise LedgerError(f"the ledger's header makes no sense ({error})") from error
        if header.noise != NOISE_VERSION:
            raise LedgerError(
                f"the run was made with noise version {header.noise}, and this forwardtune makes version "
                f"{NOISE_VERSION}; install the release that made it ({header.version})"
            )
        return header

    def _check(self) -> None:
        check_number("seed", self.seed)
        check_number("step", self.step)
        check_number("direction", self.directions - 1)
        _require(self.distribution in DISTRIBUTIONS, f"distribution {self.distribution!r}")
        _require(self.groups and self.parameters, "no parameters")
        _require(len({p.number for p in self.parameters}) == len(self.parameters), "a parameter number twice")
        _require(all(type(n) is int for n in (self.queries, self.nonfinite, self.max_nonfinite)), "counters")
        _require(all(isinstance(text, str) for text in (self.method, self.version, self.created)), "texts")
        _require(isinstance(self.defaults, dict), f"defaults {self.defaults!r}")
        for group in self.groups:
            _require(isinstance(group.settings, dict) and isinstance(group.memory, dict), "a group's settings")
            for names in (group.names, group.names if group.labels is None else group.labels):
                _require(isinstance(names, tuple) and all(isinstance(n, str) for n in names), "a group's names")
                _require(len(names) == len(group.names), "a group's names")
        for p in self.parameters:
            _require(p.names and all(isinstance(name, str) for name in p.names), f"names {p.names!r}")
            _require(isinstance(p.number, int) and 0 <= p.number < 2**32, f"parameter number {p.number!r}")
            _require(isinstance(p.group, int) and 0 <= p.group < len(self.groups), f"group {p.group!r}")
            _require(all(isinstance(n, int) and n >= 0 for n in p.shape), f"shape {p.shape!r}")
            _require(p.dtype in DTYPES, f"dtype {p.dtype!r}")


def _require(condition: object, complaint: str = "") -> None:
    if not condition:
        raise ValueError(complaint)


def frozen(value: Any) -> Any:
    """JSON's lists as tuples, all the way down: what a search remembers is immutable."""
    if isinstance(value, list):
        return tuple(frozen(item) for item in value)
    if isinstance(value, dict):
        return {key: frozen(item) for key, item in value.items()}
    return value


class Row(NamedTuple):
    """A step as it is stored; `settings` has those that changed since the step before and are no numbers of `pack`."""

    numbers: bytes
    settings: str | None = None


def pack(record: StepRecord, left: int, settings: Sequence[float]) -> bytes:
    """The numbers of a step; `left` (LEFT and BUFFERS) says what it left behind."""
    kind = TAKEN if record.taken else RAISED if record.raised else NOT_TAKEN
    numbers: list[float] = [kind + left, record.queries]
    numbers += settings
    for direction, groups in enumerate(record.lines):
        for i, loss in enumerate(groups[0].losses):
            numbers += (direction, loss, *[line.offsets[i] for line in groups])
    if record.taken:
        numbers += [line.t for groups in record.lines for line in groups]
    return struct.pack(f"<{len(numbers)}d", *numbers)


def left_behind(blob: bytes, what: int = LEFT) -> bool:
    """Whether a packed step left another state behind than the step before, or (BUFFERS) buffers in it."""
    kind = struct.unpack_from("<d", blob)[0] if len(blob) >= 8 else 0.0
    return 0 <= kind < 2 * BUFFERS and bool(int(kind) & what)


def unpack(step: int, blob: bytes, header: Header) -> tuple[StepRecord, list[dict[str, float]]]:
    """The record of a packed step, without what only the method knows (gamma, sigma), and each group's numbers."""
    groups, directions = len(header.groups), header.directions
    try:
        kind, queries, *rest = struct.unpack(f"<{len(blob) // 8}d", blob)
        settings = []
        for group in header.groups:
            names = group.numbers
            values, rest = rest[: len(names)], rest[len(names) :]
            settings.append({n: _like(group.settings[n], value) for n, value in zip(names, values, strict=True)})
        _require(0 <= kind < 2 * BUFFERS and kind % LEFT in (TAKEN, NOT_TAKEN, RAISED))
        taken = kind % LEFT == TAKEN
        split = len(rest) - directions * groups if taken else len(rest)
        _require(split >= 0 and split % (2 + groups) == 0)
        probes = [rest[i : i + 2 + groups] for i in range(0, split, 2 + groups)]
        stands = [rest[i : i + groups] for i in range(split, len(rest), groups)] or [[0.0] * groups] * directions
        lines: list[tuple[LineRecord, ...]] = []
        for direction, own in groupby(probes, key=itemgetter(0)):
            _require(direction == len(lines) < directions)
            _, losses, *offsets = zip(*own, strict=True)
            pairs = zip(offsets, stands[len(lines)], strict=True)
            lines.append(tuple(LineRecord(o, losses, t) for o, t in pairs))
        _require(len(lines) == directions or not taken)
        record = StepRecord.of(step, lines, queries=int(queries), taken=taken, raised=kind % LEFT == RAISED)
    except (struct.error, ValueError, OverflowError) as error:
        raise LedgerError(f"step {step} of the ledger makes no sense") from error
    return record, settings


def _like(example: Any, value: float) -> float:
    """An integer where the run began with one."""
    return int(value) if isinstance(example, int) and value.is_integer() else value


def dump(value: Any) -> str:
    """Settings, or what a search remembers, as JSON."""
    try:
        return json.dumps(value, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"what a search remembers must be numbers, texts and tuples of them to be recorded: {error}"
        ) from None
