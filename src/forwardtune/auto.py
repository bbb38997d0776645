"""The size of steps, found while training: what ``lr="auto"`` does. `docs/auto.md` has the derivation.

One number, `r`, is how far a step probes and how far it moves at most. A run first surveys, then reviews.

*Survey.* The first steps probe at `+r`, `-r` and 0 and do not move. Along a parabola with slope `gamma` and curvature
`h`, half the difference of the outer losses is `L = r abs(gamma)`, and what their mean lies above the middle one is
`Q = r^2 h/2`. The best step is `abs(gamma)/h = r L/(2 Q)`. Of sums over a few steps this is the size to begin with,
halved, since each slope is that of one batch; if the curvatures differ so much that their mean is within its standard
error, it is no further out than was surveyed. Where `Q` is negligible compared with `L`, or most probes see no
difference at all, the survey goes on ten times further out; after a loss that is not finite, ten times nearer.

*Review.* Every `SPAN` steps the loss of a new batch is queried where the last `SPAN` steps began, and where they would
have led had they been twice as long. If it still falls between the two, the steps were too short; if it rises, they
were too long; on a parabola the two are equal exactly if the steps had the best length. So `r` follows

    r *= exp(gain * clip(u/median(abs(u)), -1, 1)),    u = f(before) - f(beyond)

with a gain that falls. As training goes on and slopes drown in the noise of batches the best step becomes smaller, and
`r` with it: no schedule is needed, and no length of the run. A step that is not taken halves `r`, and one whose probes
all see the same loss, as those of an accuracy may, makes it a little larger.

*Lines.* With ``directions="auto"`` all examples share a line at first, and the products of their slopes tell how their
gradients agree. Where that promises enough, lines of their own are tried for as many steps. The noise of a step is in
proportion to `B gamma^2` of the mean loss along a shared line, and to `gamma_i^2` of the examples along their own: if
the former is `WORTH` times the latter, each example has its own line from then on, else they share one for good, as
they do where a layer turns out not to know lines of their own.

*Retreat.* Where the losses of the steps have risen by far more than batches differ, and the review finds that they
rise beyond by as much, the steps did damage: the weights stay where they began, and `r` is cut.

Everything here is plain floats. The state is a dictionary of plain values that is never modified in place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median, stdev
from typing import Any, cast

from forwardtune.arguments import Directions
from forwardtune.line import Trail
from forwardtune.noise.types import COMMON
from forwardtune.record import Decision, Review, StepRecord
from forwardtune.search import Memory, Search

START = 1e-2
"""Where the survey begins: one per cent of the weights' size."""
SURVEYS = 4
"""Directions at each distance of the survey."""
FELT = 0.05
"""The curvature counts where Q is so large a part of L."""
SPAN = 10
"""Steps from review to review, and in each review: two queries in ten steps."""
GAIN, LEAST_GAIN, FADE = 0.3, 0.1, 10
"""A review changes log(r) by at most GAIN/sqrt(1 + reviews/FADE), but at least by LEAST_GAIN."""
SURVEY_QUERIES, REVIEW_QUERIES = 3, 2
"""Of a survey along one direction, and of a review, beside those of the step that makes it."""
FLAT = 1.05
"""What `r` is multiplied by after a step whose probes all saw the same loss."""
RECENT = 30
"""Reviews whose size a new one is compared with, and losses that tell how much batches differ."""
FAR = 4
"""Times the usual difference between the losses of consecutive steps is far beyond the noise."""
CUT = 4
"""What `r` is divided by after damage."""
WORTH = 1.5
"""Lines of their own are taken where they have less noise than a shared one by this factor in variance."""
ENOUGH = 16
"""Steps along lines of either kind that it takes to tell."""

Auto = dict[str, Any]


def start(directions: Directions = 1) -> Auto:
    """The state of a run that begins.

    `surveyed` has (L, Q) of the surveys at `r` so far; it is None when they are done. `ceiling` is a size at which a
    loss was not finite. `trail` has the destinations of the last steps (offsets, and the number of the first
    direction), of which `since` came after the last review; `losses` has those of the last steps, infinite where a step
    was not taken. `slope` is the mean size of the slopes that were surveyed, of one line. Where lines are `by_example`,
    `agreement` has sums over the surveys: of products of the slopes of two examples, and of squares; while a line is
    `shared`, over the last `asked` steps. `trial` has the sum of `B gamma^2` over those steps and, of steps that try
    lines of their own, their number, sums of `gamma_i^2` and of the part of slopes that are zero, and the `slope`
    before them; None where there is nothing to be found out.
    """
    return {
        "r": START,
        "slope": 0.0,
        "surveyed": (),
        "ceiling": None,
        "reviews": 0,
        "sizes": (),
        "since": 0,
        "trail": (),
        "losses": (),
        "by_example": not isinstance(directions, int),
        "agreement": (0.0, 0.0),
        "shared": directions == "auto",
        "asked": 0,
        "trial": (0.0, 0, 0.0, 0.0, 0.0) if directions == "auto" else None,
    }


def is_plain(value: Any, *kinds: type) -> bool:
    """Whether it is None, true or false, a number that a float can hold, or of other kinds; of a tuple all entries."""
    if isinstance(value, tuple):
        return tuple in kinds and all(is_plain(entry, *kinds) for entry in value)
    is_number = isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**1000)
    return value is None or is_number or isinstance(value, kinds)


def is_state(auto: Any, groups: int, reach: float) -> bool:
    """Whether this, which may come from anyone, is the state of a run over so many groups; see `start`."""

    def numbers(values: Any, count: int | None = None) -> bool:
        right = isinstance(values, tuple) and all(isinstance(value, int | float) for value in values)
        return right and is_plain(values, tuple) and count in (None, len(values))

    def counts(*values: Any) -> bool:
        return all(type(value) is int and 0 <= value < 2**53 for value in values)

    if not isinstance(auto, dict) or auto.keys() != start().keys() or not isinstance(auto["trail"], tuple):
        return False
    surveyed, ceiling, trial = auto["surveyed"], auto["ceiling"], auto["trial"]
    return (
        numbers((auto["r"], auto["slope"]))
        and 0 < auto["r"] < math.inf
        and 0 <= auto["slope"] < math.inf
        and (surveyed is None or (isinstance(surveyed, tuple) and all(numbers(pair, 2) for pair in surveyed)))
        and (ceiling is None or numbers((ceiling,)))
        and counts(auto["reviews"], auto["since"], auto["asked"])
        and numbers(auto["sizes"])
        and numbers(auto["losses"])
        and numbers(auto["agreement"], 2)
        and isinstance(auto["by_example"], bool)
        and isinstance(auto["shared"], bool)
        and (trial is None or numbers(trial, 5))
        and all(
            isinstance(entry, tuple)
            and len(entry) in (2, 3)
            and counts(entry[0])
            and isinstance(entry[1], tuple)
            and all(numbers(own, groups) and all(abs(t) <= reach for t in own) for own in entry[1])
            and (len(entry) == 2 or (type(entry[2]) is int and COMMON <= entry[2] < 2**16))
            for entry in auto["trail"]
        )
    )


def survey(memory: Memory, *, r: float) -> Search:
    """The search of a step that surveys; it does not move."""
    plus, minus, _ = (yield +r), (yield -r), (yield 0.0)
    return Decision(0.0, gamma=(plus - minus) / (2 * r))


def is_surveying(auto: Auto) -> bool:
    return auto["surveyed"] is not None


def is_review_due(auto: Auto) -> bool:
    return auto["since"] >= SPAN and any(position for _, position in trail_of(auto))


def trail_of(auto: Mapping[str, Any]) -> Trail:
    """The steps that a review would be about; older states lack the number of the first direction, which was 0."""
    return [
        (step, {sum(first) + j: tuple(own) for j, own in enumerate(offsets)}) for step, offsets, *first in auto["trail"]
    ]


def is_damage(auto: Auto, before: float, beyond: float) -> bool:
    """Whether a review shows that the steps it covers are better undone."""
    differences = [abs(b - a) for a, b in pairwise(loss for loss in auto["losses"] if math.isfinite(loss))]
    reviewed = auto["losses"][-len(auto["trail"]) :]
    if not differences or not math.isfinite(reviewed[0]) or not math.isfinite(before):
        return False
    far = FAR * fmean(differences)
    return median(reviewed[-3:]) - reviewed[0] > far and not beyond - before <= far


def after_review(auto: Auto, review: Review | None) -> Auto:
    """The state after a review, or unchanged if there was none."""
    if review is None:
        return auto
    if review.back:
        return {**without_trail(auto), "r": auto["r"] / CUT, "reviews": auto["reviews"] + 1, "losses": ()}
    reviews, r, sizes = auto["reviews"], auto["r"], auto["sizes"]
    if math.isfinite(review.before):
        u = review.before - review.beyond if math.isfinite(review.beyond) else -math.inf
        if math.isfinite(u):
            sizes = (*sizes, abs(u))[-RECENT:]
        usual = median(sizes) if sizes else 0.0
        gain = max(LEAST_GAIN, GAIN / math.sqrt(1 + reviews / FADE))
        r *= math.exp(gain * (max(-1.0, min(1.0, u / usual)) if usual else math.copysign(1.0, u) if u else 0.0))
        reviews += 1
    return {**auto, "r": r, "reviews": reviews, "sizes": sizes, "since": 0}


def after_step(auto: Auto, record: StepRecord) -> Auto:
    """The state after a step that made this record."""
    auto = after_review(auto, record.review)
    if not record.raised:
        auto = {**auto, "losses": (*auto["losses"], record.loss if record.taken else math.inf)[-RECENT:]}
    if is_surveying(auto):
        return auto if record.raised else _after_survey(auto, record)
    auto = _trailing(auto, record)
    if auto["trial"] and record.taken and len(record.lines) > 1 and record.offsets[0]:
        auto = _after_shared(auto, record) if record.shared else _after_trial(auto, record)
    if not record.taken and not record.raised:  # perhaps the weights are to blame: review at once
        return {**auto, "r": auto["r"] / 2, "since": SPAN}
    return {**auto, "r": auto["r"] * FLAT} if record.is_flat else auto


def without_trail(auto: Auto) -> Auto:
    """The state of a run whose tensors have changed, so that earlier steps are not to be reviewed."""
    return {**auto, "trail": (), "since": 0}


def _trailing(auto: Auto, record: StepRecord) -> Auto:
    there = record.destination()
    trail = (*auto["trail"], (record.step, tuple(there.values()), min(there, default=0)))[-SPAN:]
    return {**auto, "trail": trail, "since": auto["since"] + 1}


def _after_survey(auto: Auto, record: StepRecord) -> Auto:
    r = auto["r"]
    if not record.taken:  # a loss was not finite: nearer
        return {**auto, "r": r / 10, "surveyed": (), "ceiling": r}
    surveyed, lines = auto["surveyed"], [groups[0].losses for groups in record.lines]
    if auto["by_example"]:
        auto = {**auto, "agreement": _agreeing(auto, [plus - minus for plus, minus, _ in lines])}
        lines = [tuple(map(fmean, zip(*lines, strict=True)))]
    for plus, minus, here in lines:
        surveyed = (*surveyed, (abs(plus - minus) / 2, (plus + minus - 2 * here) / 2))
    if len(surveyed) < SURVEYS:
        return {**auto, "surveyed": surveyed}
    linear, curved = (math.fsum(column) for column in zip(*surveyed, strict=True))
    felt = curved > FELT * linear and 2 * sum(slope > 0 for slope, _ in surveyed) > len(surveyed)
    further = min(1.0, 10 * r)
    if not felt and further > r and (auto["ceiling"] is None or further < auto["ceiling"]):
        return {**auto, "r": further, "surveyed": ()}
    if linear == 0:  # a plateau as far as one can see
        return {**auto, "r": START, "surveyed": None}
    best = r * linear / (2 * curved) if felt else r
    if not _is_clear([curvature for _, curvature in surveyed]):  # no further than was surveyed
        best = min(best, 2 * r)
    slope = linear / len(surveyed) / r * _steeper(auto, len(record.lines))
    return {**auto, "r": best / 2 * _gain(auto, len(record.lines)), "slope": slope, "surveyed": None}


def _is_clear(curvatures: Sequence[float]) -> bool:
    """Whether their mean is above its standard error."""
    return len(curvatures) < 2 or fmean(curvatures) > stdev(curvatures) / math.sqrt(len(curvatures))


def _after_shared(auto: Auto, record: StepRecord) -> Auto:
    """The state after a step along a shared line, if it is not known yet whether lines of their own are better."""
    common, *tried = auto["trial"]
    if auto["asked"] in (0, ENOUGH):  # a new window, without the surveys or the window before
        auto, common = {**auto, "asked": 0, "agreement": (0.0, 0.0)}, 0.0
    slopes, n = _slopes(record), len(record.lines)
    common += n * fmean(slopes) ** 2
    agreed = _agreeing(auto, slopes)
    auto = {**auto, "asked": auto["asked"] + 1, "agreement": agreed, "trial": (common, *tried)}
    if auto["asked"] < ENOUGH or not common > WORTH * agreed[1]:
        return auto
    steeper = math.sqrt(n * agreed[1] / common)
    return {**auto, "shared": False, "trial": (common, 0, 0.0, 0.0, auto["slope"]), "slope": auto["slope"] * steeper}


def _after_trial(auto: Auto, record: StepRecord) -> Auto:
    """The state after a step that tries lines of their own."""
    common, steps, squares, zeros, slope = auto["trial"]
    slopes = _slopes(record)
    steps, squares = steps + 1, squares + fmean(own * own for own in slopes)
    zeros += fmean(own == 0 for own in slopes)
    if steps < ENOUGH:
        return {**auto, "trial": (common, steps, squares, zeros, slope)}
    if common >= WORTH * squares and 2 * zeros < steps:
        return {**auto, "trial": None}
    return {**auto, "trial": None, "shared": True, "slope": slope}


def without_own_lines(auto: Auto) -> Auto:
    """The state of a run in which examples turn out not to be able to have lines of their own."""
    slope = auto["trial"][-1] if auto["trial"] else auto["slope"]
    return {**auto, "trial": None, "shared": True, "slope": slope}


def _slopes(record: StepRecord) -> list[float]:
    """Of all examples, by their first two probes."""
    lines = [groups[0] for groups in record.lines]
    return [(line.losses[0] - line.losses[1]) / (line.offsets[0] - line.offsets[1]) for line in lines]


def agreement(auto: Auto) -> float | None:
    """The mean cosine between the gradients of two examples, as far as it was measured; None where it was not."""
    products, squares = auto["agreement"]
    return products / squares if squares else None


def _agreeing(auto: Auto, slopes: Sequence[float]) -> tuple[float, float]:
    """With the slopes of examples along a line that they share, whose products are those of their gradients."""
    n = len(slopes)
    if n == 1:  # which tells nothing
        return cast("tuple[float, float]", auto["agreement"])
    squares = math.fsum(slope * slope for slope in slopes) / n
    products = (n * fmean(slopes) ** 2 - squares) / (n - 1)
    return auto["agreement"][0] + products, auto["agreement"][1] + squares


def _gain(auto: Auto, examples: int) -> float:
    """How much longer steps along lines of their own are best than along one.

    A step of the same length gains as much along either if examples do not agree. If they do, the slopes of single
    examples have less noise than that of their mean by a factor of `1 + (B - 1) a` in variance, and the best length
    grows with its root.
    """
    return math.sqrt(_agreed(auto, examples)) if _has_own_lines(auto) else 1.0


def _steeper(auto: Auto, examples: int) -> float:
    """How much larger the slopes of single examples are than that of their mean."""
    return math.sqrt(examples / _agreed(auto, examples)) if _has_own_lines(auto) else 1.0


def _has_own_lines(auto: Auto) -> bool:
    return auto["by_example"] and not auto["shared"]


def _agreed(auto: Auto, examples: int) -> float:
    return max(1.0, 1 + (examples - 1) * (agreement(auto) or 0.0))
