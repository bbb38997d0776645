"""A run's state: torch's generators and the model's buffers, watched while the run is recorded, kept in two files.

A state may be large and only the latest matters, so it is not part of the journal. Two files take turns; each is
written before the step it belongs to, so that one of the two is always whole. Their checksum starts from that of the
run's header, so that a state of another run is never mistaken for one of this run.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from forwardtune.buffers import LARGE
from forwardtune.errors import LedgerError
from forwardtune.files import parse_json
from forwardtune.ledger.format import NEW_STATE, WITH_BUFFERS, dtype_name
from forwardtune.ledger.weights import Model
from forwardtune.noise import Field

PREAMBLE = struct.Struct("<QQQI")
"""Step, length of the index, length of index and values, CRC-32."""

GENERATOR, BUFFER = "generator:", "buffer:"
CPU = f"{GENERATOR}cpu"


@dataclass(frozen=True)
class State:
    """One tensor of a run's state: that of a generator, or a buffer."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    value: bytes

    @property
    def is_buffer(self) -> bool:
        return self.name.startswith(BUFFER)

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> State:
        value = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return cls(name, dtype_name(tensor.dtype), tuple(tensor.shape), value)

    def tensor(self) -> Tensor:
        dtype = getattr(torch, self.dtype, None)
        try:
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"unknown dtype {self.dtype}")
            flat = torch.frombuffer(bytearray(self.value), dtype=torch.uint8) if self.value else torch.empty(0)
            return flat if self.name.startswith(GENERATOR) else flat.view(dtype).view(self.shape)
        except (RuntimeError, TypeError, ValueError, OverflowError) as error:
            complaint = f"the ledger's state of {self.name!r} is invalid ({error}); get an undamaged copy of the file"
            raise LedgerError(complaint) from error


# The files


def state_paths(ledger: Path) -> list[Path]:
    return [ledger.with_name(f"{ledger.name}.state{number}") for number in range(2)]


def pack_states(identity: int, step: int, states: Sequence[State]) -> bytes:
    """The contents of a state file."""
    index = json.dumps([(state.name, state.dtype, state.shape, len(state.value)) for state in states]).encode()
    body = index + b"".join(state.value for state in states)
    return PREAMBLE.pack(step, len(index), len(body), zlib.crc32(body, identity ^ step & 0xFFFFFFFF)) + body


def read_states(ledger: Path, identity: int) -> dict[int, tuple[int, list[State]]]:
    """The state files that are whole and of this run, by number: the step that each belongs to, and its states."""
    whole = {}
    for number, path in enumerate(state_paths(ledger)):
        try:
            data = path.read_bytes()
            step, index, size, claimed = PREAMBLE.unpack_from(data)
            body = data[PREAMBLE.size : PREAMBLE.size + size]
            if len(body) == size and zlib.crc32(body, identity ^ step & 0xFFFFFFFF) == claimed:
                whole[number] = step, list(_unpacked(body, index))
        except (OSError, struct.error, ValueError, TypeError, OverflowError):
            continue
    return whole


def _unpacked(body: bytes, index: int) -> Iterator[State]:
    start = index
    for name, dtype, shape, size in parse_json(body[:index]):
        yield State(str(name), str(dtype), tuple(int(n) for n in shape), body[start : start + size])
        start += size


# While a run is recorded


class StateWatcher:
    """Notices what a run changes besides its weights: torch's generators and the model's buffers.

    `states` holds everything that has changed since the start of the run.
    """

    def __init__(self, model: Model, field: Field, states: Iterable[State] = ()) -> None:
        self.states = {state.name: state for state in states}
        self._devices = sorted((device for device in field.devices if device.type != "cpu"), key=str)
        self._tuned = field.storages
        self._modules = [
            (f"{BUFFER}{prefix}." if prefix else BUFFER, module)
            for prefix, module in (model.named_modules() if isinstance(model, nn.Module) else ())
            if module._buffers
        ]
        self._changed: list[State] = []
        self._seen: dict[str, object] = {}
        for name, buffer in self._buffers():
            self._has_changed(name, _version(buffer))

    def update(self) -> int:
        """Takes up what has changed since the last call; returns the flags of the step that changed it, or 0."""
        self._changed = []
        generator = torch.default_generator.get_state().numpy().tobytes()
        if generator != self._seen.get(CPU):
            self._seen[CPU] = generator
            self._changed.append(State(CPU, "uint8", (), generator))
        if self._devices or self._modules:
            pairs = self._other_tensors()
            self._changed += [State.of(name, t) for name, t in pairs if self._has_changed(name, _version(t))]
        for state in self._changed:
            self.states[state.name] = state
        if not self._changed:
            return 0
        return NEW_STATE + WITH_BUFFERS if any(state.is_buffer for state in self.states.values()) else NEW_STATE

    def undo(self) -> None:
        """The last update could not be written: what had changed counts as changed at the next one, too."""
        for state in self._changed:
            self._seen.pop(state.name, None)

    def _has_changed(self, name: str, value: object) -> bool:
        seen = self._seen.get(name)
        same = torch.equal(seen, value) if isinstance(seen, Tensor) and isinstance(value, Tensor) else seen == value
        if not same:
            self._seen[name] = value.clone() if isinstance(value, Tensor) else value
        return not same

    def _other_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for device in self._devices:
            yield f"{GENERATOR}{device}", torch.get_device_module(device).get_rng_state(device)
        yield from self._buffers()

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        for prefix, module in self._modules:
            for name, buffer in module._buffers.items():
                if buffer is None or buffer.layout != torch.strided or nn.parameter.is_lazy(buffer):
                    continue
                if buffer.untyped_storage().data_ptr() not in self._tuned:
                    yield prefix + name, buffer


def _version(buffer: Tensor) -> object:
    """Differs if a buffer has changed: its value, or for a large one torch's count of its changes."""
    if buffer.numel() <= LARGE:
        return buffer.detach()
    return buffer.data_ptr(), 0 if buffer.is_inference() else buffer._version


# When a run is replayed or resumed


def buffers_in(states: Iterable[State]) -> dict[str, Tensor]:
    """The buffers that a run changed, by name, with the values it left in them."""
    return {state.name.removeprefix(BUFFER): state.tensor() for state in states if state.is_buffer}


def check_buffers(values: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    """Refuses buffers whose shape or dtype is not that of the recorded values."""
    for name, value in values.items():
        if name in buffers and (buffers[name].shape != value.shape or buffers[name].dtype != value.dtype):
            raise LedgerError(
                f"the buffer {name!r} is {list(buffers[name].shape)} of {dtype_name(buffers[name].dtype)}, and the run "
                f"left {list(value.shape)} of {dtype_name(value.dtype)} in it; use the model the run was made with"
            )


@torch.no_grad()
def restore_buffers(values: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> list[str]:
    """Copies the recorded values into the buffers; returns the names of those that are missing."""
    for name in values.keys() & buffers.keys():
        buffers[name].copy_(values[name])
    return [name for name in values if name not in buffers]


def restore_generators(states: Iterable[State]) -> None:
    """Puts torch's generators into the state in which the run left them."""
    for state in states:
        try:
            if state.name == CPU:
                torch.set_rng_state(state.tensor())
            elif state.name.startswith(GENERATOR):
                device = torch.device(state.name.removeprefix(GENERATOR))
                torch.get_device_module(device).set_rng_state(state.tensor(), device)
        except (RuntimeError, AttributeError) as error:
            raise LedgerError(
                f"the state of the run's {state.name} cannot be restored on this machine ({error})"
            ) from error
