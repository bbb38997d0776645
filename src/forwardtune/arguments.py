"""Checks of what users pass, with errors that say what to do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from numbers import Integral, Real
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from forwardtune.errors import InvalidArgumentError
from forwardtune.noise import NOISE_VERSION
from forwardtune.noise.mover import check_number

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]
Group = Mapping[str, Any]
"""A parameter group as torch has it; of a `state_dict`, with numbers in place of tensors."""
Probes = Literal["auto", "in-place", "layerwise"]
PROBES: tuple[Probes, ...] = get_args(Probes)
Rounding = Literal["stochastic", "nearest"]
ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)
Directions = int | Literal["per-example", "auto"]
"""How many lines a step searches; or each example of a batch one of its own, always or where it is worth it."""


def is_number(value: Any) -> bool:
    return (isinstance(value, Real) and not isinstance(value, bool)) or (
        isinstance(value, Tensor) and value.numel() == 1
    )


def plain(value: Any) -> Any:
    """A number as Python's int or float, since state must not hold numpy's or tensors; anything else unchanged."""
    if not is_number(value):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def check_positive(**settings: Any) -> None:
    """Refuses settings that are not finite and above zero."""
    for name, value in settings.items():
        if not is_number(value) or not 0 < value < math.inf:
            raise InvalidArgumentError(f"{name} must be a number above zero and finite, not {value!r}")


def check_integer(minimum: int, **settings: Any) -> None:
    """Refuses settings that are not integers of at least the minimum."""
    for name, value in settings.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise InvalidArgumentError(f"{name} must be an integer of at least {minimum}, not {value!r}")


def as_groups(params: Params) -> list[dict[str, Any]]:
    """What an optimizer was given to tune, as dicts of parameter groups."""
    if isinstance(params, Tensor | torch.nn.Module):
        raise InvalidArgumentError(
            f"pass a list of parameters, for instance model.parameters(), not a {type(params).__name__}"
        )
    if isinstance(params, Set):
        raise InvalidArgumentError("the noise depends on the order of the parameters; pass a list, not a set")
    items: list[Any] = list(params)
    if not items:
        raise InvalidArgumentError(
            "the list of parameters is empty; if you passed a generator, it may have been used up: pass a list"
        )
    return items if isinstance(items[0], dict) else [{"params": items}]


def tensors_of(params: Any) -> dict[str, Any]:
    """A group's tensors without duplicates, and their names if they came with names."""
    items = [params] if isinstance(params, Tensor) else list(params)
    if not items:
        raise InvalidArgumentError("a parameter group is empty; give it parameters or leave it out")
    named = isinstance(items[0], tuple)
    if any(isinstance(item, tuple) != named for item in items):
        raise InvalidArgumentError("some parameters of a group have names and some do not; name all of them or none")
    pairs = items if named else [("", item) for item in items]
    for _, tensor in pairs:
        if not isinstance(tensor, Tensor):
            raise InvalidArgumentError(f"only tensors can be tuned, not {type(tensor).__name__}; leave it out")
    names: dict[Tensor, str] = {}
    for name, tensor in pairs:
        names.setdefault(tensor, name)
    return {"params": list(names), "param_names": list(names.values())} if named else {"params": list(names)}


def names_of(group: Group) -> list[str]:
    """What a group's tensors are called in errors."""
    return list(group.get("param_names", [f"parameter {i} of its group" for i in range(len(group["params"]))]))


def count_elements(group: Group) -> int:
    """How many elements a group's parameters have, or had when its state was saved."""
    params = group["params"]
    if all(isinstance(p, Tensor) for p in params):
        return sum(p.numel() for p in params)
    return int(group.get("elements", -1))


def check_state_dict(state_dict: Any, groups: Sequence[Group], *, optional: Set[str]) -> Sequence[Group]:
    """The groups of a `state_dict`, checked to fit an optimizer's; their run may lack the `optional` keys."""
    run, method = groups[0]["run"], groups[0]["run"]["method"]
    loaded: Sequence[Group] = state_dict.get("param_groups", []) if isinstance(state_dict, dict) else []
    theirs = loaded[0].get("run") if loaded else None
    if not isinstance(theirs, dict) or not run.keys() - optional <= theirs.keys():
        raise InvalidArgumentError(f"this is not the state_dict of a {method}; load what its state_dict() returned")
    if theirs["method"] != method:
        raise InvalidArgumentError(
            f"this is the state of a {theirs['method']} and cannot be loaded into a {method}; "
            f"load it into a {theirs['method']}"
        )
    if theirs["noise"] != NOISE_VERSION:
        raise InvalidArgumentError(
            f"this state was made with noise version {theirs['noise']}, and this forwardtune makes version "
            f"{NOISE_VERSION}: the run would continue with other directions; install the release it was made with"
        )
    sizes, loaded_sizes = ([count_elements(group) for group in part] for part in (groups, loaded))
    if sizes != loaded_sizes:
        raise InvalidArgumentError(
            f"this is the state of a run over groups of {loaded_sizes} weights, not {sizes}; "
            "give the optimizer the same parameters in the same order"
        )
    return loaded


def probe_distance(lr: Any, rho: float | None, scale: str = "relative") -> float:
    """The distance of probes that is meant, which is not to be given together with an lr that finds it."""
    if isinstance(lr, str) and rho is not None:
        raise InvalidArgumentError("lr='auto' finds the distance of probes too; leave rho out, or give an lr")
    return (1e-3 if scale == "absolute" else 1e-2) if rho is None else rho


def check_choice(name: str, value: Any, known: Sequence[str]) -> None:
    """Refuses an option that is none of those known."""
    if value not in known:
        raise InvalidArgumentError(f"unknown {name} {value!r}; choose one of {', '.join(known)}")


def check_directions(directions: Any, distribution: str) -> None:
    """Refuses a number of directions that is none, and lines of their own whose signs would be something else."""
    if not isinstance(directions, str):
        check_integer(1, directions=directions)
        check_number("direction", directions - 1)
    elif directions not in ("per-example", "auto"):
        raise InvalidArgumentError(f'directions must be a whole number, "per-example" or "auto", not {directions!r}')
    elif distribution != "rademacher":
        raise InvalidArgumentError(
            f'the lines of examples are made of signs; leave the distribution at "rademacher", not {distribution!r}'
        )
