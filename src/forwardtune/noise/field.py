"""The random directions of a run, as a field over its parameters.

`s[i] = noise(seed, step, direction, parameter, i)`: nothing is stored and nothing is drawn. The field only knows which
tensors move, and hands out the mover that moves them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from forwardtune.errors import InvalidArgumentError, warn_deprecated
from forwardtune.noise.backends import reference
from forwardtune.noise.backends.chunks import DTYPES
from forwardtune.noise.distributions import Distribution
from forwardtune.noise.mover import Mover
from forwardtune.noise.outer import Factors, OuterMover, mover_of
from forwardtune.noise.types import Key, Slot, Term


class View(NamedTuple):
    """The memory that a tensor covers. Tensors with equal views are one parameter."""

    address: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> View:
        return cls(tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


class Field:
    """The directions of a run over groups of tensors.

    >>> x = torch.zeros(3)
    >>> field = Field([[x]], seed=0, distribution="rademacher")
    >>> field.mover.move(step=0, terms=[Term(direction=0, back=[0.0], forth=[0.5])])
    >>> x
    tensor([-0.5000,  0.5000, -0.5000])

    `scales` has a number for each tensor, which its directions are multiplied by; they are all 1 by default. `names`
    are for errors. With `products` directions are those of :mod:`forwardtune.noise.outer`. With `stochastic` sums of
    16-bit weights are rounded stochastically.
    `dimension` is the number of elements that move. `reach`, one over the square root of the coarsest dtype's
    precision, is a rough limit for offsets: beyond it, rounding would swallow weights of ordinary size.
    """

    def __init__(
        self,
        groups: Iterable[Iterable[Tensor]],
        *,
        seed: int = 0,
        distribution: Distribution = "rademacher",
        backend: str = "auto",
        scales: Iterable[Iterable[float]] | None = None,
        names: Iterable[Iterable[str]] | None = None,
        products: bool = False,
        stochastic: bool = False,
    ) -> None:
        self.seed, self.distribution, self.backend = seed, distribution, backend
        self.products, self.stochastic = products, stochastic
        members = list(groups)
        self.groups = len(members)
        self._tensors = _numbered(members)
        self._scales = [1.0] * len(self._tensors) if scales is None else [scale for group in scales for scale in group]
        self._names = [f"parameter {number}" for number in range(len(self._tensors))]
        if names is not None:
            self._names = [name for group in names for name in group]
        self._plan()

    def _plan(self) -> None:
        for name, (_, tensor), moves in zip(self._names, self._tensors, _which_move(self._tensors), strict=True):
            if moves or torch.nn.parameter.is_lazy(tensor):
                check_tensor(tensor, name)
        slots = _distinct(self._tensors, self._scales)
        self._mover = mover_of(
            slots,
            self.groups,
            seed=self.seed,
            distribution=self.distribution,
            backend=self.backend,
            products=self.products,
            stochastic=self.stochastic,
        )
        self.dimension = self._mover.dimension
        self._moving = [slot.tensor for slot in slots if not slot.tensor.is_inference()]
        self.devices = {slot.tensor.device for slot in slots}
        self.storages = frozenset(slot.tensor.untyped_storage().data_ptr() for slot in slots)
        self.reach = reach_of(slot.tensor.dtype for slot in slots)
        self._views, self._require_grad = self._observe()

    def _observe(self) -> tuple[list[View], list[bool]]:
        """Where the tensors are, and which of them require a gradient."""
        return [View.of(tensor) for _, tensor in self._tensors], [tensor.requires_grad for _, tensor in self._tensors]

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The tensors that move, each with its number and group; a new tuple whenever any of that has changed."""
        return self._mover.slots

    @property
    def backends(self) -> str:
        """The backends that move the tensors, by name."""
        return "+".join(self._mover.names)

    @property
    def mover(self) -> Mover | OuterMover:
        """Moves the tensors, wherever their memory is by now; see :class:`Term`, and `touch` afterwards."""
        if any(tensor.data_ptr() != view.address for (_, tensor), view in zip(self._tensors, self._views, strict=True)):
            self._plan()
        return self._mover

    def factors(self, step: int, lines: int) -> list[Factors]:
        """Of directions that are products: their factors in every slot."""
        assert isinstance(self._mover, OuterMover)
        return self._mover.factors(step, lines)

    def refresh(self) -> None:
        """Notices tensors whose memory, dtype or layout has changed, or that were frozen or unfrozen."""
        if (self._views, self._require_grad) != self._observe():
            self._plan()

    def touch(self) -> None:
        """Tells autograd that the tensors have changed, as an in-place operation of torch does."""
        for tensor in self._moving:
            increment_version(tensor)

    def covers(self, groups: Iterable[Iterable[Tensor]]) -> bool:
        """Whether it was made for these very tensors in these groups."""
        theirs = _numbered(groups)
        return [(group, id(tensor)) for group, tensor in self._tensors] == [(group, id(t)) for group, t in theirs]

    def walk(self, step: int, terms: Sequence[Term]) -> None:
        """Deprecated: use `mover.move`."""
        warn_deprecated("Field.walk", "Field.mover.move")
        self.mover.move(step, terms)

    def values(self, step: int, direction: int, parameter: int, start: int, stop: int) -> Tensor:
        """Elements `start` to `stop` of the direction in one parameter, as float64 on the CPU."""
        if isinstance(self._mover, OuterMover):
            return self._mover.values(step, direction, parameter)[start:stop]
        key = Key(self.seed, step, self.distribution)
        scale = next((slot.scale for slot in self.slots if slot.parameter == parameter), 1.0)
        noise = reference.values(key, direction, parameter, start, stop, torch.device("cpu")).to(torch.float64)
        return noise * scale * self._mover.length(step, direction)


def reach_of(dtypes: Iterable[torch.dtype]) -> float:
    """The largest offset of weights of these dtypes."""
    return 1 / math.sqrt(max((torch.finfo(dtype).eps for dtype in dtypes), default=1.0))


def _numbered(groups: Iterable[Iterable[Tensor]]) -> list[tuple[int, Tensor]]:
    """All tensors, each with the number of its group."""
    return [(number, tensor) for number, group in enumerate(groups) for tensor in group]


def check_tensor(tensor: Tensor, name: str) -> None:
    """Refuses a tensor that cannot be moved along a line, and says why."""
    if torch.nn.parameter.is_lazy(tensor):
        raise InvalidArgumentError(f"{name} is not initialised yet; run the model once before making the optimizer")
    if tensor.dtype not in DTYPES:
        raise InvalidArgumentError(
            f"{name} has dtype {tensor.dtype} and cannot be tuned: only float64, float32, bfloat16 and float16 can; "
            "leave it out of the optimizer"
        )
    if not _has_memory(tensor):
        raise InvalidArgumentError(
            f"{name} ({type(tensor).__name__}, {tensor.layout}, on {tensor.device}) has no dense memory of its own to "
            "move; materialise it first (module.to_empty, tensor.to_dense, or bring back what was offloaded)"
        )


def _has_memory(tensor: Tensor) -> bool:
    if tensor.device.type == "meta" or tensor.layout != torch.strided or tensor.is_neg():
        return False
    try:
        storage = tensor.untyped_storage()
        last = tensor.storage_offset() + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        return not tensor.numel() or (
            storage.data_ptr() != 0 and (last + 1) * tensor.element_size() <= storage.nbytes()
        )
    except RuntimeError:  # a wrapper around other tensors
        return False


def _which_move(tensors: Sequence[tuple[int, Tensor]]) -> list[bool]:
    """As everywhere in torch, frozen tensors stay as they are; but if none requires a gradient, all move."""
    require_grad = [tensor.requires_grad for _, tensor in tensors]
    return require_grad if any(require_grad) else [True] * len(tensors)


def _distinct(tensors: Sequence[tuple[int, Tensor]], scales: Sequence[float]) -> list[Slot]:
    """Numbers the tensors and picks those that move.

    Tensors with equal views are one parameter; memory that is partly shared is an error.
    """
    slots: list[Slot] = []
    aliases: dict[object, list[tuple[int, Tensor, float, bool]]] = {}
    for (group, tensor), scale, moves in zip(tensors, scales, _which_move(tensors), strict=True):
        alike = View.of(tensor) if tensor.numel() and tensor.data_ptr() else object()
        aliases.setdefault(alike, []).append((group, tensor, scale, moves))
    for number, tied in enumerate(aliases.values()):
        moving = [entry for entry in tied if entry[3]]
        if moving:
            group, tensor, scale, _ = moving[0]
            slots.append(Slot(tensor.detach(), number, group, scale))
    _refuse_overlap([slot.tensor for slot in slots])
    return slots


def _refuse_overlap(tensors: Sequence[Tensor]) -> None:
    """Refuses tensors that share any element of memory with another tensor, or with themselves."""
    by_storage: dict[tuple[torch.device, int], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            key = tensor.device, tensor.untyped_storage().data_ptr()
            by_storage.setdefault(key, []).append(tensor)
    for members in by_storage.values():
        members.sort(key=Tensor.data_ptr)
        ends = [tensor.data_ptr() + tensor.nbytes for tensor in members]
        apart = all(end <= after.data_ptr() for end, after in zip(ends, members[1:], strict=False))
        if apart and all(_is_dense(tensor) for tensor in members):
            continue
        _mark_elements(members)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their stretch of memory, each once, in any order of axes."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _mark_elements(members: Sequence[Tensor]) -> None:
    """The slow and certain check for strided tensors of one storage: marks the memory of each element as taken."""
    size = min(tensor.element_size() for tensor in members)
    taken = torch.zeros(members[0].untyped_storage().nbytes() // size, dtype=torch.bool)
    for tensor in members:
        step = tensor.element_size() // size
        strides = (*(s * step for s in tensor.stride()), 1)
        before = int(taken.count_nonzero())
        taken.as_strided((*tensor.shape, step), strides, tensor.storage_offset() * step).fill_(True)
        if int(taken.count_nonzero()) - before != tensor.numel() * step:
            raise InvalidArgumentError(
                f"a parameter of shape {tuple(tensor.shape)} shares part of its memory with another or with itself "
                "(a view or an expanded tensor); give the optimizer the underlying tensor, or a clone"
            )
