"""A model's tensors by name, and which of them are a run's weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from forwardtune.errors import InvalidArgumentError, LedgerError
from forwardtune.ledger.fingerprint import combined, digests
from forwardtune.ledger.format import Header, Parameter, dtype_name
from forwardtune.packed import scales_in

Model = nn.Module | Mapping[str, Tensor]
"""A module, or tensors by name."""


def named_parameters(model: Model) -> dict[str, Tensor]:
    """All parameters by all of their names; a tied one has several."""
    if isinstance(model, nn.Module):
        return dict(model.named_parameters(remove_duplicate=False))
    if not isinstance(model, Mapping):
        raise InvalidArgumentError(
            f"pass the model, or a dict of its tensors by name, not {type(model).__name__}; "
            "a ledger identifies weights by their names"
        )
    for name, tensor in model.items():
        if not isinstance(tensor, Tensor):
            raise InvalidArgumentError(f"{name!r} must be a tensor, not {type(tensor).__name__}")
    return dict(model)


def named_buffers(model: Model) -> dict[str, Tensor]:
    return dict(model.named_buffers(remove_duplicate=False)) if isinstance(model, nn.Module) else dict(model)


def frozen_digest(model: Model, parameters: Iterable[Parameter], *, scales: bool = True) -> str | None:
    """The fingerprint of a module's parameters that do not move, with their scales; None if there are none."""
    if not isinstance(model, nn.Module):
        return None
    moving = {name for parameter in parameters for name in parameter.names}
    tensors = {**dict(model.named_parameters()), **(scales_in(model) if scales else {})}
    frozen = {name: p for name, p in tensors.items() if name not in moving and p.device.type != "meta"}
    return combined([*frozen, *digests(frozen.values())]) if frozen else None


def has_frozen_weights(header: Header, model: Model) -> bool:
    """Whether a module's parameters that do not move are those of the run; not checked for a dict of tensors.

    In older ledgers their fingerprint is without the scales of packed ones.
    """
    if not isinstance(model, nn.Module):
        return True
    return any(frozen_digest(model, header.parameters, scales=scales) == header.frozen for scales in (True, False))


def weights_of(header: Header, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """The tensors that a run moves, in its order; one that is missing or of another shape or dtype is an error."""
    weights = []
    for parameter in header.parameters:
        name = next((name for name in parameter.names if name in tensors), None)
        if name is None:
            wrapped = any(n.endswith(f".{parameter.names[0]}") for n in tensors)
            raise LedgerError(
                f"the run moves {parameter.names[0]!r}, which is not among these weights ({_some(tensors)}); "
                + ("pass the model without its wrapper" if wrapped else "use the model that the run was made with")
            )
        tensor = tensors[name].detach()
        check_kind(parameter, tensor.shape, dtype_name(tensor.dtype))
        for other in parameter.names:
            if other in tensors and tensors[other].data_ptr() != tensor.data_ptr():
                raise LedgerError(f"{name!r} and {other!r} are one tensor in the run and two here; tie them")
        weights.append(tensor)
    return weights


def check_kind(parameter: Parameter, shape: Iterable[int], dtype: str) -> None:
    """Refuses a tensor whose shape or dtype is not that of the run's parameter."""
    ours, theirs = (tuple(shape), dtype), (parameter.shape, parameter.dtype)
    if ours != theirs:
        raise LedgerError(
            f"{parameter.names[0]!r} is {list(ours[0])} of {ours[1]}, and in the ledger it is {list(theirs[0])} of "
            f"{theirs[1]}; use the model that the run was made with, in the same dtype"
        )


def _some(names: Iterable[str]) -> str:
    first = list(names)[:3]
    return ", ".join(first) + ", ..." if first else "none at all"
