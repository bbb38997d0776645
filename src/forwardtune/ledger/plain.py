"""Plain steps as arrays, hundreds at a time: record by record, a run of a million steps would take minutes to resume.

A step is plain if it searched a single direction and was taken, as nearly all are. Steps of which one is not plain, or
not sound, have no arrays; they go the slow way, record by record, which is the reference and knows what to complain of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from forwardtune.auto import SPAN
from forwardtune.ledger.format import MOST_QUERIES, NEW_STATE, REVIEWED, SHARED, WENT_BACK, Header, Row
from forwardtune.line import ENDS, REVIEWED_AT
from forwardtune.noise.backends.arrays import Terms

MOST_PROBES = 16
"""Of a plain step; no method that ships makes more than four."""

Array = np.ndarray[Any, Any]


class PlainSteps(NamedTuple):
    """Steps from `first` on, one row each. The probes beyond the first `visited` do not count.

    reviewed, before, beyond, back: of a step's review; without one `reviewed` is 0.
    settings: the numeric settings of all groups, one after the other.
    losses, offsets: of each probe, the latter in each group; `t` has the decisions.
    """

    first: int
    queries: Array
    reviewed: Array
    before: Array
    beyond: Array
    back: Array
    settings: Array
    visited: Array
    losses: Array
    offsets: Array
    t: Array


def plain_steps(first: int, rows: Sequence[Row], header: Header) -> PlainSteps | None:
    """The steps of these rows, if they are plain and sound, and no settings changed but numeric ones."""
    groups, width = len(header.groups), sum(len(group.numbers) for group in header.groups)
    if header.directions != 1 or not rows or any(row.settings for row in rows):
        return None
    packed = [row.numbers for row in rows]
    sizes = np.fromiter(map(len, packed), np.int64, len(packed))
    if (sizes % 8).any() or sizes.min() < 8 * (2 + 3 + width + groups):
        return None
    flat = np.frombuffer(b"".join(packed), "<f8")
    ends = np.cumsum(sizes // 8)
    starts = ends - sizes // 8
    kinds, queries = flat[starts], flat[starts + 1]
    if (
        not np.isfinite([kinds, queries]).all()
        or not ((kinds >= 0) & (kinds < SHARED) & (kinds % NEW_STATE == 0)).all()
    ):  # taken, with flags
        return None
    flags = kinds.astype(np.int64)
    has_review = flags & REVIEWED > 0
    reviewed, before, beyond = (np.where(has_review, flat[starts + i], 0.0) for i in (2, 3, 4))
    body = starts + np.where(has_review, 5, 2)
    own = 2 + groups
    visited, rest = np.divmod(ends - groups - width - body, own)
    if rest.any() or visited.min() < 1 or visited.max() > MOST_PROBES or not np.isfinite(reviewed).all():
        return None
    probe = np.arange(visited.max())
    made = probe < visited[:, None]
    place = np.where(made, (body + width)[:, None] + own * probe, 0)
    losses = flat[place + 1]
    offsets = flat[place[:, :, None] + 2 + np.arange(groups)]
    t = flat[(ends - groups)[:, None] + np.arange(groups)]
    sound = (
        np.isfinite(losses[made]).all()
        and (flat[place][made] == 0).all()
        and (np.abs(offsets[made]) <= header.reach).all()
        and (np.abs(t) <= header.reach).all()
        and ((queries >= header.queries) & (queries < MOST_QUERIES) & (queries % 1 == 0)).all()
        and (np.diff(queries) > 0).all()
        and ((reviewed % 1 == 0) & (reviewed <= SPAN) & ((reviewed > 0) == has_review)).all()
    )
    if not sound:
        return None
    settings = flat[(body[:, None] + np.arange(width))]
    back = has_review & (flags & WENT_BACK > 0)
    whole = queries.astype(np.int64), reviewed.astype(np.int64)
    return PlainSteps(first, *whole, before, beyond, back, settings, visited, losses, offsets, t)


def terms_of(steps: PlainSteps, low: int, *, layerwise: bool) -> Terms | None:
    """All moves of the steps from `low` on; None if one of them reviews steps that are not here."""
    at = low - steps.first
    reviews = at + np.flatnonzero(steps.reviewed[at:])
    if (steps.reviewed[reviews] > reviews).any():
        return None
    t = steps.t[:, None]
    probes = steps.offsets[:, : 0 if layerwise else None]
    made = np.arange(probes.shape[1]) < steps.visited[:, None]
    there = np.concatenate([np.where(made[:, :, None], probes, t), t], 1)  # what is no probe is the destination
    here = np.concatenate([np.zeros_like(t), there[:, :-1]], 1)
    numbers = np.broadcast_to(steps.first + np.arange(len(t))[:, None], there.shape[:2])
    parts = []
    for start, end in pairwise([at, *reviews, len(t)]):
        parts += [(numbers[start:end].ravel(), *(x[start:end].reshape(-1, x.shape[2]) for x in (here, there)))]
        if end < len(t):
            parts += _reviewing(steps, end, layerwise)
    step, back, forth = (np.concatenate(column) for column in zip(*parts, strict=True))
    moves = (back != forth).any(1)
    step, offsets = step[moves], np.stack([back, forth], 1)[moves]
    return Terms(step, np.zeros_like(step), np.ones(len(step)), np.ascontiguousarray(offsets))


def _reviewing(steps: PlainSteps, at: int, layerwise: bool) -> Iterator[tuple[Array, Array, Array]]:
    """The moves of a review: along the steps before it, as in `line.moves_along`."""
    trail = slice(at - steps.reviewed[at], at)
    numbers, t = steps.first + np.arange(trail.start, trail.stop), steps.t[trail]
    zero = np.zeros_like(t)
    for here, there in pairwise((1.0, *(() if layerwise else REVIEWED_AT), ENDS[bool(steps.back[at])])):
        if here != there:
            yield numbers[::-1], here * t[::-1], zero
            yield numbers, zero, there * t
