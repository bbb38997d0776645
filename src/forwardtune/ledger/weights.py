"""A model's tensors by name: which are a run's weights, and what else a run leaves behind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from forwardtune.buffers import LARGE
from forwardtune.errors import InvalidArgumentError, LedgerError
from forwardtune.ledger.fingerprint import combined, digests
from forwardtune.ledger.format import BUFFERS, LEFT, Header, Parameter, dtype_name
from forwardtune.ledger.states import State
from forwardtune.noise import Field

Model = nn.Module | Mapping[str, Tensor]
"""A module, or tensors by name."""

GENERATOR, BUFFER = "generator:", "buffer:"
CPU = f"{GENERATOR}cpu"


def named_parameters(model: Model) -> dict[str, Tensor]:
    """All names of all parameters; tied ones have several."""
    if isinstance(model, nn.Module):
        return dict(model.named_parameters(remove_duplicate=False))
    if not isinstance(model, Mapping):
        raise InvalidArgumentError(
            f"pass the model, or a dict of its tensors by name, not {type(model).__name__}; "
            "names are what tells a run's weights apart"
        )
    for name, tensor in model.items():
        if not isinstance(tensor, Tensor):
            raise InvalidArgumentError(f"{name!r} is not a tensor but {type(tensor).__name__}")
    return dict(model)


def named_buffers(model: Model) -> dict[str, Tensor]:
    return dict(model.named_buffers(remove_duplicate=False)) if isinstance(model, nn.Module) else dict(model)


def frozen_digest(model: Model, parameters: Iterable[Parameter]) -> str | None:
    """The fingerprint of a module's parameters that do not move, if there are any."""
    if not isinstance(model, nn.Module):
        return None
    moving = {name for parameter in parameters for name in parameter.names}
    frozen = {name: p for name, p in model.named_parameters() if name not in moving and p.device.type != "meta"}
    return combined([*frozen, *digests(frozen.values())]) if frozen else None


def has_frozen_of(header: Header, model: Model) -> bool:
    """Whether a module's parameters that do not move are those of the run; of other models they are not known."""
    return not isinstance(model, nn.Module) or frozen_digest(model, header.parameters) == header.frozen


def weights_of(header: Header, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """The tensors that a run moves, in its order; the first that is missing or of another kind is an error."""
    found = []
    for parameter in header.parameters:
        name = next((name for name in parameter.names if name in tensors), None)
        if name is None:
            wrapped = any(n.endswith(f".{parameter.names[0]}") for n in tensors)
            raise LedgerError(
                f"the run moves {parameter.names[0]!r}, which is not among these weights ({_some(tensors)}); "
                + ("pass the model without its wrapper" if wrapped else "use the model that the ledger was made with")
            )
        tensor = tensors[name].detach()
        check_kind(parameter, tensor.shape, dtype_name(tensor.dtype))
        for other in parameter.names:
            if other in tensors and tensors[other].data_ptr() != tensor.data_ptr():
                raise LedgerError(f"{name!r} and {other!r} are one tensor in the run, and two here; tie them")
        found.append(tensor)
    return found


def check_kind(parameter: Parameter, shape: Iterable[int], dtype: str) -> None:
    ours, theirs = (tuple(shape), dtype), (parameter.shape, parameter.dtype)
    if ours != theirs:
        raise LedgerError(
            f"{parameter.names[0]!r} is {list(ours[0])} of {ours[1]}, and in the ledger it is {list(theirs[0])} of "
            f"{theirs[1]}; use the model that the ledger was made with, in its dtype"
        )


def _some(names: Iterable[str]) -> str:
    first = list(names)[:3]
    return ", ".join(first) + ", ..." if first else "there are none"


class Leftovers:
    """Watches what a run changes beside its weights: torch's generators and the model's buffers.

    `states` has all that have changed since the run began.
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
        self._known: dict[str, object] = {}
        for name, buffer in self._buffers():
            self._is_new(name, _look(buffer))

    def changed(self) -> int:
        """Whether anything is not as it was at the last call: LEFT, with BUFFERS if any buffer has ever changed."""
        new: list[State] = []
        generator = torch.default_generator.get_state().numpy().tobytes()
        if generator != self._known.get(CPU):
            self._known[CPU] = generator
            new.append(State(CPU, "uint8", (), generator))
        if self._devices or self._modules:
            new += [_state(name, tensor) for name, tensor in self._others() if self._is_new(name, _look(tensor))]
        for state in new:
            self.states[state.name] = state
        self._new = new
        if not new:
            return 0
        return LEFT + BUFFERS if any(name.startswith(BUFFER) for name in self.states) else LEFT

    def forget(self) -> None:
        """What was found has not been kept: it counts as changed the next time."""
        for state in self._new:
            self._known.pop(state.name, None)

    def _is_new(self, name: str, value: object) -> bool:
        known = self._known.get(name)
        same = torch.equal(known, value) if isinstance(known, Tensor) and isinstance(value, Tensor) else known == value
        if not same:
            self._known[name] = value.clone() if isinstance(value, Tensor) else value
        return not same

    def _others(self) -> Iterator[tuple[str, Tensor]]:
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


def _look(buffer: Tensor) -> object:
    """What tells whether a buffer has changed: its value, or of a large one its version."""
    if buffer.numel() <= LARGE:
        return buffer.detach()
    return buffer.data_ptr(), 0 if buffer.is_inference() else buffer._version


def _state(name: str, tensor: Tensor) -> State:
    value = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return State(name, dtype_name(tensor.dtype), tuple(tensor.shape), value)


def value_of(state: State) -> Tensor:
    """The tensor that a state holds."""
    dtype = getattr(torch, state.dtype, None)
    try:
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"unknown dtype {state.dtype}")
        flat = torch.frombuffer(bytearray(state.value), dtype=torch.uint8) if state.value else torch.empty(0)
        return flat if state.name.startswith(GENERATOR) else flat.view(dtype).view(state.shape)
    except (RuntimeError, TypeError, ValueError) as error:
        raise LedgerError(f"the ledger's state of {state.name!r} makes no sense ({error})") from error


def buffers_left(states: Iterable[State]) -> dict[str, Tensor]:
    """The values that a run left in buffers, by name."""
    return {s.name.removeprefix(BUFFER): value_of(s) for s in states if s.name.startswith(BUFFER)}


def check_buffers(values: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    """Refuses buffers of another kind than those that the run changed."""
    for name, value in values.items():
        if name in buffers and (buffers[name].shape != value.shape or buffers[name].dtype != value.dtype):
            raise LedgerError(
                f"the buffer {name!r} is {list(buffers[name].shape)} of {dtype_name(buffers[name].dtype)}, and the run "
                f"left {list(value.shape)} of {dtype_name(value.dtype)} in it; use the model it was made with"
            )


@torch.no_grad()
def restore_buffers(values: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> list[str]:
    """Gives buffers the values that a run left in them; the names of those that are not there."""
    for name in values.keys() & buffers.keys():
        buffers[name].copy_(values[name])
    return [name for name in values if name not in buffers]


def restore_generators(states: Iterable[State]) -> None:
    """Puts torch's generators where the run left them."""
    for state in states:
        try:
            if state.name == CPU:
                torch.set_rng_state(value_of(state))
            elif state.name.startswith(GENERATOR):
                device = torch.device(state.name.removeprefix(GENERATOR))
                torch.get_device_module(device).set_rng_state(value_of(state), device)
        except (RuntimeError, AttributeError) as error:
            raise LedgerError(f"the run's {state.name} cannot be restored here ({error})") from error
