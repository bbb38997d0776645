"""Plain steps taken up by an optimizer, hundreds at a time: what `LineSearch.fast_forward` does with each, in short.

Every search is run again with the recorded losses, and must probe and decide as recorded, to the last bit. What is
spared are the records of steps, and counters that only the last step of all leaves behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from forwardtune.auto import after_review, after_step, is_review_due, trail_of
from forwardtune.ledger.format import Header, like
from forwardtune.ledger.plain import PlainSteps
from forwardtune.optimizer import LineSearch
from forwardtune.record import Decision, LineRecord, Review, StepRecord
from forwardtune.search import Search


def fast_forward_plain(optimizer: LineSearch, steps: PlainSteps, header: Header) -> bool:
    """Takes up all of the steps; or none, if a search decides otherwise than recorded or something else is unusual.

    `last_step` and the counters of steps that were not taken are left to the step that comes next.
    """
    groups, auto, d = optimizer.param_groups, optimizer.auto, optimizer.field.dimension
    if steps.first != optimizer.steps or optimizer.field.reach != header.reach or optimizer.shares_lines:
        return False
    memories = [group["memory"] for group in groups]
    same = (steps.settings == steps.settings[0]).all()
    settings = _settings(optimizer, header, steps.settings[0].tolist(), d)
    starts = optimizer._starts(None, settings) if auto is None else []
    plateaus = 0
    rows = zip(
        steps.settings.tolist(),
        steps.queries.tolist(),
        steps.visited.tolist(),
        steps.losses.tolist(),
        steps.offsets.transpose(0, 2, 1).tolist(),
        steps.t.tolist(),
        steps.reviewed.tolist(),
        strict=True,
    )
    for i, (numbers, queries, visited, losses, offsets, t, reviewed) in enumerate(rows):
        review = None
        if not same:
            settings = _settings(optimizer, header, numbers, d)
        if visited < len(losses):
            losses, offsets = losses[:visited], [own[:visited] for own in offsets]
        if auto is not None:
            if reviewed != (len(trail_of(auto)) if is_review_due(auto) else 0):
                return False
            if reviewed:
                review = Review(reviewed, float(steps.before[i]), float(steps.beyond[i]), bool(steps.back[i]))
            starts = optimizer._starts(after_review(auto, review), settings)
        elif reviewed:
            return False
        elif not same:
            starts = optimizer._starts(None, settings)
        memories = [dict(memory) for memory in memories]
        for start, memory, own, decided in zip(starts, memories, offsets, t, strict=True):
            if not _follows(start(memory), own, losses, decided):
                return False
        plateaus += visited > 1 and losses.count(losses[0]) == visited
        if auto is not None:
            pairs = zip(offsets, t, strict=True)
            line = tuple(LineRecord(tuple(own), tuple(losses), decided) for own, decided in pairs)
            record = StepRecord.of(steps.first + i, (line,), queries=queries, taken=True, review=review)
            auto = after_step(auto, record)
    for group, memory in zip(groups, memories, strict=True):
        group["memory"] = memory
    run, step = optimizer._run, steps.first + len(steps.t)
    counters = {"queries": int(steps.queries[-1]), "nonfinite": 0, "plateaus": run["plateaus"] + plateaus}
    optimizer._run = {**run, "step": step, **counters, "auto": auto}
    return True


def _settings(optimizer: LineSearch, header: Header, numbers: Sequence[float], d: int) -> list[dict[str, Any]]:
    """Gives the groups the numeric settings that they had, and returns those of their searches."""
    ends = accumulate((len(group.numbers) for group in header.groups), initial=0)
    for group, recorded, (low, high) in zip(optimizer.param_groups, header.groups, pairwise(ends), strict=True):
        for name, value in zip(recorded.numbers, numbers[low:high], strict=True):
            group[name] = like(recorded.settings[name], value)
    return [optimizer._settings_of(group, d) for group in optimizer.param_groups]


def _follows(search: Search, offsets: Sequence[float], losses: Sequence[float], t: float) -> bool:
    """Whether a search that is sent these losses probes at these offsets and decides on `t`."""
    if next(search) != offsets[0]:
        return False
    try:
        for loss, offset in zip(losses, (*offsets[1:], None), strict=True):
            if search.send(loss) != offset:
                return False
    except StopIteration as end:
        decision: Decision = end.value
        return offset is None and decision.t == t
    return False
