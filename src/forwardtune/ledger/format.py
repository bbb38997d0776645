"""What a ledger says: the header, and the numbers of a step.

The header describes the run and the weights it started from. A step is packed as little-endian float64 numbers:

    kind, queries so far, then for each probe its direction, loss and offset in each group,
    then, if the step was taken, the stand in each direction and group

Every step carries the CRC-32 of itself and of all that came before it, beginning with the header, so that a step that
is changed, missing or from another run is noticed, and all before it are known to be sound.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from forwardtune.errors import InvalidArgumentError, LedgerError
from forwardtune.noise import DISTRIBUTIONS, NOISE_VERSION
from forwardtune.noise.walker import check_number
from forwardtune.record import LineRecord, StepRecord

SCHEMA = 1
TAKEN, NOT_TAKEN, RAISED = 0, 1, 2

DTYPES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""The dtypes of weights, with their sizes in bytes."""


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
    """A parameter group: its tensors' names (also of those that do not move), its settings and what it remembers."""

    names: tuple[str, ...]
    named: bool
    settings: Mapping[str, Any]
    memory: Mapping[str, Any]


@dataclass(frozen=True)
class Header:
    """A run as it began."""

    method: str
    defaults: Mapping[str, Any]
    seed: int
    distribution: Any
    directions: int
    max_nonfinite: int
    step: int
    queries: int
    nonfinite: int
    groups: tuple[Group, ...]
    parameters: tuple[Parameter, ...]
    noise: int
    version: str
    created: str

    @property
    def dimension(self) -> int:
        """How many weights move."""
        return sum(elements(parameter.shape) for parameter in self.parameters)

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
        for p in self.parameters:
            _require(p.names and all(isinstance(name, str) for name in p.names), f"names {p.names!r}")
            _require(isinstance(p.number, int) and 0 <= p.number < 2**32, f"parameter number {p.number!r}")
            _require(isinstance(p.group, int) and 0 <= p.group < len(self.groups), f"group {p.group!r}")
            _require(all(isinstance(n, int) and n >= 0 for n in p.shape), f"shape {p.shape!r}")
            _require(p.dtype in DTYPES, f"dtype {p.dtype!r}")


def _require(condition: object, complaint: str = "") -> None:
    if not condition:
        raise ValueError(complaint)


def elements(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def frozen(value: Any) -> Any:
    """JSON's lists as tuples, all the way down: what a search remembers is immutable."""
    if isinstance(value, list):
        return tuple(frozen(item) for item in value)
    if isinstance(value, dict):
        return {key: frozen(item) for key, item in value.items()}
    return value


@dataclass(frozen=True)
class Row:
    """A step as it is stored; `settings` has those settings of each group that changed since the step before."""

    step: int
    crc: int
    numbers: bytes
    settings: str | None = None


def checksum(previous: int, numbers: bytes, settings: str | None) -> int:
    crc = zlib.crc32(numbers, previous)
    return zlib.crc32(settings.encode(), crc) if settings else crc


def pack(record: StepRecord) -> bytes:
    kind = TAKEN if record.taken else RAISED if record.raised else NOT_TAKEN
    numbers: list[float] = [kind, record.queries]
    for direction, groups in enumerate(record.lines):
        for i, loss in enumerate(groups[0].losses):
            numbers += (direction, loss)
            numbers += [line.offsets[i] for line in groups]
    if record.taken:
        numbers += [line.t for groups in record.lines for line in groups]
    return struct.pack(f"<{len(numbers)}d", *numbers)


def unpack(step: int, blob: bytes, header: Header) -> StepRecord:
    """The record of a packed step, without what only the method knows (gamma, sigma)."""
    groups, directions = len(header.groups), header.directions
    try:
        kind, queries, *rest = struct.unpack(f"<{len(blob) // 8}d", blob)
        split = len(rest) - directions * groups if kind == TAKEN else len(rest)
        probes = [rest[i : i + 2 + groups] for i in range(0, split, 2 + groups)]
        stands = [rest[i : i + groups] for i in range(split, len(rest), groups)] or [[0.0] * groups] * directions
        _require(kind in (TAKEN, NOT_TAKEN, RAISED) and split >= 0 and split % (2 + groups) == 0)
        visited = sorted({int(probe[0]) for probe in probes})
        _require(visited == list(range(directions if kind == TAKEN else len(visited))))
        _require([probe[0] for probe in probes] == sorted(probe[0] for probe in probes))
    except (struct.error, ValueError, OverflowError) as error:
        raise LedgerError(f"step {step} of the ledger makes no sense") from error
    lines = []
    for direction in visited:
        own = [probe for probe in probes if probe[0] == direction]
        losses = tuple(probe[1] for probe in own)
        offsets = zip(*(probe[2:] for probe in own), strict=True)
        lines.append(tuple(LineRecord(o, losses, t) for o, t in zip(offsets, stands[direction], strict=True)))
    return StepRecord.of(step, lines, queries=int(queries), taken=kind == TAKEN, raised=kind == RAISED)


def plain_settings(group: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Those of a group's values that JSON can hold."""
    return {name: group[name] for name in names if isinstance(group.get(name), str | int | float | None)}


def dump(value: Any, what: str) -> str:
    try:
        return json.dumps(value, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"{what} must be numbers, texts and lists of them to be recorded: {error}") from None
