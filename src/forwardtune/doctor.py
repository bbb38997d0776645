"""What tuning would do to a model, before any of it is done: its probes, its lines, its memory.

For every kind of layer, how many weights a probe in place, rounded to nearest, would not move at all, how many it would
leave changed after they returned, and whether examples can have lines of their own there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from forwardtune.layers.layerwise import usual_probes
from forwardtune.layers.rules import rule_of
from forwardtune.layers.usage import Usage, numbered, tuned_in
from forwardtune.noise import Field, Mover, Slot, Term
from forwardtune.noise.outer import factor_sizes
from forwardtune.scales import relative_scales

SAMPLE = 1 << 18
"""Weights of a tensor that are tried."""


@dataclass(frozen=True)
class Finding:
    """Parameters that are alike: the same in all layers.

    name: with `*` for the number of the layer; `layer` is its type, `tensors` how many there are.
    scale: the smallest and the largest of their scales, which a probe's distance is multiplied by.
    still, changed: of a probe in place, the part of the weights that it does not move since the sum is rounded, and the
        part that is not what it was once the weights have returned.
    no_own_lines: why examples cannot have lines of their own here; empty if they can.
    """

    name: str
    layer: str
    tensors: int
    weights: int
    dtype: str
    scale: tuple[float, float]
    still: float
    changed: float
    no_own_lines: str = ""


@dataclass(frozen=True)
class Examination:
    """Of a model; bytes are of all weights, of the copy of a layer, and of one example's own line.

    probes: how they are made unless that is chosen; see :class:`forwardtune.RunOptions`.
    """

    rho: float
    findings: tuple[Finding, ...]
    probes: str
    weights: int
    copy: int
    line: int

    @property
    def uncovered(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.no_own_lines)


def examine(model: nn.Module, rho: float = 1e-2, query: Callable[[], Any] | None = None) -> Examination:
    """Examines what is tuned in a model, for probes at a relative distance `rho`.

    A `query`, any forward pass, shows parameters that are used outside their layers. No weight is changed.

    >>> examination = examine(nn.Sequential(nn.Linear(30, 40), nn.PReLU()).bfloat16())
    >>> examination.probes, [finding.no_own_lines for finding in examination.findings]
    ('layerwise', ['', '', 'PReLU is not known'])
    """
    named = dict(model.named_parameters())
    field = Field([list(named.values())], names=[list(named)])
    slots, numbers = field.slots, numbered(field.slots)
    names = [next(name for name, p in named.items() if p.data_ptr() == slot.tensor.data_ptr()) for slot in slots]
    owners: list[list[nn.Module]] = [[] for _ in slots]
    for layer in model.modules():
        for number in set(tuned_in(layer, numbers).values()):
            owners[number].append(layer)
    outside: set[int] = set()
    if query:
        with torch.no_grad(), Usage(slots, outside.add).watching():
            query()
    scales = relative_scales([slot.tensor for slot in slots])
    alike: dict[tuple[str, str, str, str], list[tuple[Slot, float]]] = {}
    for number, (slot, name, scale) in enumerate(zip(slots, names, scales, strict=True)):
        kind = type(owners[number][0]).__name__ if owners[number] else "none"
        pattern = re.sub(r"\b\d+\b", "*", name)
        dtype = str(slot.tensor.dtype).removeprefix("torch.")
        why = _why_not(owners[number], number in outside)
        alike.setdefault((pattern, kind, dtype, why), []).append((slot, scale))
    held = [sum(slots[n].tensor.nbytes for n in set(tuned_in(layer, numbers).values())) for layer in model.modules()]
    return Examination(
        rho=rho,
        findings=tuple(_finding(*key, members, rho) for key, members in alike.items()),
        probes=usual_probes(slots),
        weights=sum(slot.tensor.nbytes for slot in slots),
        copy=max(held) + sum(slots[n].tensor.nbytes for n in outside),
        line=4 * sum(sum(factor_sizes(slot.tensor.shape)) for slot in slots),
    )


def _why_not(owners: Sequence[nn.Module], outside: bool) -> str:
    strange = [type(layer).__name__ for layer in owners if rule_of(layer) is None]
    if strange:
        return f"{strange[0]} is not known"
    return "used outside its layer" if outside or not owners else ""


def _finding(name: str, layer: str, dtype: str, why: str, members: Sequence[tuple[Slot, float]], rho: float) -> Finding:
    tried = [_tried(slot.tensor, rho * scale) for slot, scale in members]
    scales = [scale for _, scale in members]
    return Finding(
        name=name,
        layer=layer,
        tensors=len(members),
        weights=sum(slot.tensor.numel() for slot, _ in members),
        dtype=dtype,
        scale=(min(scales), max(scales)),
        still=fmean(still for still, _ in tried),
        changed=fmean(changed for _, changed in tried),
        no_own_lines=why,
    )


def _tried(tensor: Tensor, distance: float) -> tuple[float, float]:
    """The parts of the weights that a probe in place does not move, and that are changed once they have returned."""
    before = tensor.detach().flatten()[:SAMPLE].clone()
    if not before.numel():
        return 0.0, 0.0
    there = before.clone()
    mover = Mover([Slot(there, 0, 0)], 1, seed=0, distribution="rademacher")
    mover.move(0, [Term(0, [0.0], [distance])])
    still = (there == before).float().mean().item()
    mover.move(0, [Term(0, [distance], [0.0])])
    return still, (there != before).float().mean().item()
