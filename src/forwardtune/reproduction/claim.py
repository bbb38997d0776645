"""The first question: does VS2P need fewer queries than MeZO and STP?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from forwardtune.experiments.intervals import Paired
from forwardtune.experiments.report.tables import ratio_text
from forwardtune.experiments.scoring import Contest, MethodScore, WorkloadScore, acceleration, contest, seconds
from forwardtune.experiments.summary import count, number
from forwardtune.reproduction.comparisons import Comparison
from forwardtune.reproduction.words import ends, listed, loss_text, rate_text, table

FOLDERS = ("full", "decide", "reduced")
Kind = tuple[str, bool]
"""A method, and whether it finds its rate while training."""

VS2P, MEZO, STP, AUTO = KINDS = ("VS2P", False), ("MeZO", False), ("STP", False), ("VS2P", True)
PAIRS = ((VS2P, MEZO), (VS2P, STP), (AUTO, VS2P), (AUTO, MEZO), (AUTO, STP))
CLAIMED = PAIRS[:2]
"""What the paper claims."""
OUTCOMES = {
    "lower": "lower{}",
    "higher": "higher{}",
    "open": "not decided{}",
    "one seed": "not decided{} with one seed",
    "diverged": "not compared{} since runs diverged",
}
"""What may come of the first of a pair, in words around where that is so."""

QUESTION = "## Does VS2P need fewer queries than MeZO and STP\N{PRIME}?\n"
MEANING = "All have the same queries, so the one that ends lower would have needed fewer. Final training losses:"
NOTES = """
Each method is at its best rate, in parentheses, the one with the lowest mean final training loss; ◂ or ▸ marks the
smallest or largest of its grid, beyond which another might do better. Differences are paired by seed, with Student's
95% interval, and positive where the first method is worse. An interval that includes zero decides nothing, but its ends
tell how large a difference can be at most, in percent of the other's loss. The acceleration is the other's whole budget
divided by the queries after which the method is at the other's final loss (N/A: it never is; ∞: the other diverged),
with a 95% bootstrap interval over seeds, which of two or three is their range; by the clock it is the same in seconds,
those of a run spread evenly over its queries, evaluations included. Intervals are not corrected for choosing rates,
which `decide/` presets do on a pilot and the others on the same runs, nor for the number of comparisons.
"""


@dataclass(frozen=True)
class Pair:
    """Two methods on one workload, of a comparison."""

    comparison: Comparison
    workload: WorkloadScore
    contest: Contest

    @property
    def names(self) -> tuple[str, str]:
        return self.contest.a.method.title, self.contest.b.method.title

    @property
    def outcome(self) -> str:
        """What the interval of the difference says, one of OUTCOMES."""
        loss = self.contest.loss
        if loss is None:
            return "diverged"
        if loss.interval is None:
            return "one seed"
        return ("lower" if loss.mean < 0 else "higher") if loss.is_clear else "open"


def claim(made: Sequence[Comparison]) -> str:
    """The answer, and its tables."""
    every = [(entry, workload) for entry in made if entry.folder in FOLDERS for workload in entry.workloads]
    pairs = {kinds: [pair for one in every if (pair := _pair(*one, *kinds))] for kinds in PAIRS}
    claimed = [pair for kinds in CLAIMED for pair in pairs[kinds]]
    if not claimed:
        return f"{QUESTION}\nNo comparison of these methods has results of all its runs at some rate.\n"
    told = [f"- {_told(group)}" for group in pairs.values() if group]
    compared = [one for one in every if any(_pair(*one, *kinds) for kinds in PAIRS)]
    tables = _losses(compared), _differences([pair for group in pairs.values() for pair in group])
    return "\n".join([QUESTION, f"{_answer(claimed)} {MEANING}\n", *told, "", *tables, f"{NOTES.strip()}\n"])


def _find(workload: WorkloadScore, kind: Kind) -> MethodScore | None:
    return next((m for m in workload.methods if (m.method.method, m.method.is_auto) == kind), None)


def _pair(comparison: Comparison, workload: WorkloadScore, a: Kind, b: Kind) -> Pair | None:
    ours, other = _find(workload, a), _find(workload, b)
    between = contest(ours, other) if ours and other else None
    return Pair(comparison, workload, between) if between else None


def _answer(claimed: Sequence[Pair]) -> str:
    outcomes = [pair.outcome for pair in claimed]
    lower, higher = outcomes.count("lower"), outcomes.count("higher")
    if lower and higher:
        return "**Sometimes.**"
    if lower:
        return "**Yes.**" if lower == len(outcomes) else "**Where it is decided, yes.**"
    if higher:
        return "**No.**" if higher == len(outcomes) else "**Where it is decided, no.**"
    return "**Not decided.**"


def _told(group: Sequence[Pair]) -> str:
    """What came of one method against another on all workloads."""
    parts = []
    for outcome, words in OUTCOMES.items():
        having = [pair for pair in group if pair.outcome == outcome]
        where = f" on {len(having)}" if len(group) > 1 else ""
        if having:
            parts.append(words.format(where) + (_at_most(having) if outcome == "open" else ""))
    return f"{' against '.join(group[0].names)}, {count(len(group), 'workload')}: {listed(parts)}."


def _at_most(pairs: Sequence[Pair]) -> str:
    """How large differences that are not decided can be, in percent of the other's loss."""
    shares = [share for pair in pairs if (share := _shares(pair.contest))]
    if not shares:
        return ""
    return f" (at most {-min(low for low, _ in shares):.0%} lower or {max(high for _, high in shares):.0%} higher)"


def _shares(contest: Contest) -> tuple[float, float] | None:
    """The ends of the difference's interval, relative to the other's loss."""
    assert contest.loss is not None
    assert contest.b.best is not None
    of = contest.b.best.mean_loss
    interval = contest.loss.interval
    return (interval.low / of, interval.high / of) if interval and of > 0 else None


def _losses(every: Sequence[tuple[Comparison, WorkloadScore]]) -> str:
    rows = []
    for comparison, workload in every:
        scores = [_find(workload, kind) for kind in KINDS]
        seeds = max(len(score.best.results) for score in scores if score and score.best)
        cells = [_loss(score) for score in scores]
        rows.append([comparison.label(workload), f"{max(r.queries for r in workload.results):,}", str(seeds), *cells])
    return table(["final training loss", "queries", "seeds", "VS2P", "MeZO", "STP\N{PRIME}", "VS2P auto"], rows)


def _loss(score: MethodScore | None) -> str:
    if score is None:
        return ""
    if score.best is None:
        return "missing"
    return loss_text(score.best) + ("" if score.method.is_auto else f" ({rate_text(score)})")


def _differences(pairs: Sequence[Pair]) -> str:
    header = ["", "workload", "difference", "decided?", "acceleration", "paper", "by the clock"]
    return table(header, [[*_cells(pair)] for pair in pairs])


def _cells(pair: Pair) -> Iterator[str]:
    a, b = pair.contest.a, pair.contest.b
    yield " against ".join(pair.names)
    yield pair.comparison.label(pair.workload)
    yield _difference(pair.contest.loss)
    yield _verdict(pair)
    yield ratio_text(acceleration(a, b))
    yield "" if a.method.is_auto else pair.comparison.printed(pair.workload, "acceleration", b)
    yield ratio_text(acceleration(a, b, seconds))


def _difference(loss: Paired | None) -> str:
    return f"{_signed(loss.mean)}{ends(loss.interval, _signed)}" if loss else ""


def _signed(value: float) -> str:
    return ("+" if value > 0 else "") + number(value)


def _verdict(pair: Pair) -> str:
    outcome = pair.outcome
    if outcome == "diverged":
        both = [(score.method.title, score.best) for score in (pair.contest.a, pair.contest.b)]
        return ", ".join(f"{name}: {loss_text(best)}" for name, best in both if best and best.diverged)
    if outcome == "one seed":
        return "no: one seed"
    shares = _shares(pair.contest)
    if outcome == "open":
        return f"no: at most {-shares[0]:.0%} better or {shares[1]:.0%} worse" if shares else "no"
    way = "better" if outcome == "lower" else "worse"
    if not shares:
        return f"yes: {way}"
    low, high = sorted(map(abs, shares))
    return f"yes: {low:.0%} to {high:.0%} {way}"
