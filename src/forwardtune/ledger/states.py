"""What a run leaves behind beside its weights: the states of torch's generators and the buffers that changed.

They may be large and only the last counts, so they are not in the journal. Two files hold them in turn, written before
the step that they belong to: one of the two is always whole. Their checksum begins with that of the run's header, so
that the slots of another run are not taken for its own.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SLOT = struct.Struct("<QQQI")
"""Step, length of the index, length of index and values, CRC-32."""


@dataclass(frozen=True)
class State:
    """A tensor that the run leaves behind beside its weights: a generator's state or a buffer."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    value: bytes


def slot_paths(path: Path) -> list[Path]:
    return [path.with_name(f"{path.name}.state{number}") for number in range(2)]


def pack_slot(identity: int, step: int, states: Sequence[State]) -> bytes:
    index = json.dumps([(state.name, state.dtype, state.shape, len(state.value)) for state in states]).encode()
    body = index + b"".join(state.value for state in states)
    return SLOT.pack(step, len(index), len(body), zlib.crc32(body, identity ^ step & 0xFFFFFFFF)) + body


def read_slots(path: Path, identity: int) -> dict[int, tuple[int, list[State]]]:
    """The slots that are whole and the run's: their number, the step that they belong to, and their states."""
    found = {}
    for number, slot in enumerate(slot_paths(path)):
        try:
            data = slot.read_bytes()
            step, index, size, claimed = SLOT.unpack_from(data)
            body = data[SLOT.size : SLOT.size + size]
            if len(body) == size and zlib.crc32(body, identity ^ step & 0xFFFFFFFF) == claimed:
                found[number] = step, list(_states(body, index))
        except (OSError, struct.error, ValueError, TypeError, OverflowError, RecursionError):
            continue
    return found


def _states(body: bytes, index: int) -> Iterator[State]:
    at = index
    for name, dtype, shape, size in json.loads(body[:index]):
        yield State(str(name), str(dtype), tuple(int(n) for n in shape), body[at : at + size])
        at += size
