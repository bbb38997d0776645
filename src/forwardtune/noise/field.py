"""The random directions of a run, as a field over its parameters.

`s[i] = noise(seed, step, direction, parameter, i)`: nothing is stored and nothing is drawn, the field only knows which
tensors it covers and moves them along its directions, in place, in one pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import count

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from forwardtune.errors import InvalidArgumentError
from forwardtune.noise.backends import reference
from forwardtune.noise.backends.chunks import DTYPES
from forwardtune.noise.distributions import Distribution
from forwardtune.noise.mover import Mover
from forwardtune.noise.types import Key, Slot, Term


class Field:
    """The directions of a run over groups of tensors.

    >>> x = torch.zeros(3)
    >>> field = Field([[x]], seed=0, distribution="rademacher")
    >>> field.move(step=0, terms=[Term(direction=0, back=[0.0], forth=[0.5])])
    >>> x
    tensor([-0.5000,  0.5000, -0.5000])

    `dimension` is the number of elements that move. `reach`, one over the root of the coarsest dtype's precision, is a
    crude limit for offsets: from further away, rounding would swallow weights of ordinary size.
    """

    def __init__(
        self,
        groups: Iterable[Iterable[Tensor]],
        *,
        seed: int = 0,
        distribution: Distribution = "rademacher",
        backend: str = "auto",
    ) -> None:
        self.seed, self.distribution, self.backend = seed, distribution, backend
        members = [list(group) for group in groups]
        self.groups = len(members)
        self._tensors = [(g, tensor) for g, group in enumerate(members) for tensor in group]
        self._plan()

    def _plan(self) -> None:
        for number, (_, tensor) in enumerate(self._tensors):
            check_tensor(tensor, f"parameter {number}")
        slots = _distinct(self._tensors)
        self._mover = Mover(slots, self.groups, seed=self.seed, distribution=self.distribution, backend=self.backend)
        self.dimension = self._mover.dimension
        self._moving = [slot.tensor for slot in slots if not slot.tensor.is_inference()]
        self.devices = {slot.tensor.device for slot in slots}
        self.storages = frozenset(slot.tensor.untyped_storage().data_ptr() for slot in slots)
        coarsest = max((torch.finfo(slot.tensor.dtype).eps for slot in slots), default=1.0)
        self.reach = 1 / math.sqrt(coarsest)
        self._addresses = [tensor.data_ptr() for _, tensor in self._tensors]
        self._layout = [_layout(tensor) for _, tensor in self._tensors]

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The tensors that move, each with its number and group; another tuple whenever any of that has changed."""
        return self._mover.slots

    @property
    def backends(self) -> str:
        """The backends that move the tensors, by name."""
        return "+".join(backend.name for backend in self._mover.backends)

    def refresh(self) -> None:
        """Notices tensors whose memory, dtype or layout has changed."""
        if self._layout != [_layout(tensor) for _, tensor in self._tensors]:
            self._plan()

    def touch(self) -> None:
        """Tells autograd that the tensors have changed, as an in-place operation of torch does."""
        for tensor in self._moving:
            increment_version(tensor)

    def covers(self, groups: Iterable[Iterable[Tensor]]) -> bool:
        """Whether these are the tensors it was made for."""
        theirs = [(g, tensor) for g, group in enumerate(groups) for tensor in group]
        return len(theirs) == len(self._tensors) and all(
            ours[0] == other[0] and ours[1] is other[1] for ours, other in zip(self._tensors, theirs, strict=True)
        )

    def move(self, step: int, terms: Sequence[Term]) -> None:
        """Moves all tensors along directions of a step, in one pass; see :class:`Term`, and `touch` afterwards."""
        if self._addresses != [tensor.data_ptr() for _, tensor in self._tensors]:
            self._plan()
        self._mover.move(step, terms)

    def values(self, step: int, direction: int, parameter: int, start: int, stop: int) -> Tensor:
        """Elements `start` to `stop` of the direction in one parameter, as float64 on the CPU."""
        key = Key(self.seed, step, self.distribution)
        noise = reference.values(key, direction, parameter, start, stop, torch.device("cpu")).to(torch.float64)
        return noise * self._mover.length(step, direction) if self.distribution == "sphere" else noise


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def check_tensor(tensor: Tensor, name: str) -> None:
    """Refuses what cannot be moved along a line, and says why."""
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


def _distinct(tensors: Sequence[tuple[int, Tensor]]) -> list[Slot]:
    """Numbers the tensors and picks those that move.

    The same memory seen twice is one parameter, and memory that is partly shared is an error. As everywhere in torch, a
    tensor that is frozen among others that are not stays where it is; if none requires a gradient, all move.
    """
    slots: list[Slot] = []
    numbers = count()
    some_require_grad = any(tensor.requires_grad for _, tensor in tensors)
    aliases: dict[object, list[tuple[int, Tensor]]] = {}
    for group, tensor in tensors:
        memory = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        aliases.setdefault(memory if tensor.numel() else object(), []).append((group, tensor))
    for same in aliases.values():
        number = next(numbers)
        moving = [(group, t) for group, t in same if t.requires_grad or not some_require_grad]
        if moving:
            group, tensor = moving[0]
            slots.append(Slot(tensor.detach(), number, group))
    _refuse_overlap([slot.tensor for slot in slots])
    return slots


def _refuse_overlap(tensors: Sequence[Tensor]) -> None:
    """Raises if any element of memory belongs to two tensors, or twice to one."""
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
    """Whether the elements fill their stretch of memory, each once, in whatever order of axes."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _mark_elements(members: Sequence[Tensor]) -> None:
    """The slow and certain check for strided views of one storage: marks each element's memory as taken."""
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
