"""The page that sets our numbers beside the paper's, made from the results and nothing else.

It begins with three questions and their answers, has a section for every comparison, and ends with what was not run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from forwardtune import presets
from forwardtune.errors import ExperimentError
from forwardtune.experiments.intervals import paired
from forwardtune.experiments.result import Rate, rate_name
from forwardtune.experiments.scoring import WorkloadScore
from forwardtune.experiments.spec import Spec
from forwardtune.experiments.summary import count, number
from forwardtune.metrics import shown
from forwardtune.reproduction.claim import claim
from forwardtune.reproduction.comparisons import Comparison, comparisons, names, origin
from forwardtune.reproduction.cost import cost, pace_text
from forwardtune.reproduction.gains import gains
from forwardtune.reproduction.words import ends, loss_text, rate_text, score_text, starts, table
from forwardtune.tasks import ImageWorkload, TextWorkload, Workload

SIZES = {
    "mnist": "60,000 / 10,000",
    "cifar10": "50,000 / 10,000",
    "sst2": "67,349 / 872",
    "mrpc": "3,668 / 408",
    "qnli": "104,743 / 5,463",
    "rte": "2,490 / 277",
    "stsb": "5,749 / 1,500",
}

INTRODUCTION = """# The paper's experiments

Our numbers beside those that the paper prints. This page is made from the results of runs by

```
forwardtune reproduction {folder} --out docs/reproduction.md
```

and the results by `forwardtune compare --preset PRESET --data DIR --keep {folder}`, with the presets named below.
`full/` ones have the paper's settings, `decide/` ones a budget that is to decide a comparison, `gains/` ones show what
tuning brings, `reduced/` ones are the paper's experiments cut down to two cores. All methods of a comparison get the
same number of queries. STP{prime} is STP at equal queries: it asks for three a step where the others ask for two, so it
gets two thirds of the steps. Numbers are means over seeds, ± their standard deviation.
"""


def page(folder: Path) -> str:
    """The page, from a folder that has results of presets under their names."""
    made = comparisons(folder)
    if not made:
        raise ExperimentError(
            f"{folder} holds no results of the paper's presets; make some by `forwardtune compare --preset "
            f"decide/mnist-resnet18 --data DIR --keep {folder}`"
        )
    parts = [INTRODUCTION.format(folder=folder, prime="\N{PRIME}"), claim(made), gains(made), cost(made)]
    parts += map(_section, made)
    missing = [name for name in names() if name not in {comparison.name for comparison in made}]
    if missing:
        parts.append("## Not run\n")
        parts.append("\n".join(f"- `{name}`: {presets.load(name).title}" for name in missing) + "\n")
    return "\n".join(parts)


def _section(comparison: Comparison) -> str:
    scores, full = comparison.scores, comparison.full
    spec = scores.spec
    blocks = [f"## {spec.title}\n", " ".join([f"Preset `{comparison.name}`.", *spec.description.split()]) + "\n"]
    if scores.missing:
        blocks.append(f"{count(scores.missing, 'run')} missing.\n")
    header = [
        _kind(comparison),
        "method",
        "lr",
        "training loss",
        f"test {scores.metric_title()}",
        "paper",
        "above the majority class",
        "queries/s",
    ]
    if comparison.workloads:
        blocks.append(table(header, [row for workload in comparison.workloads for row in _rows(comparison, workload)]))
    if full and comparison.workloads and spec.text != full.text:
        blocks += ["What differs from the paper's settings:\n", _differences(comparison, full)]
    blocks.append(f"{origin(scores)}\n")
    return "\n".join(blocks)


def _kind(comparison: Comparison) -> str:
    return "task" if isinstance(comparison.scores.spec.workloads[0], TextWorkload) else "network"


def _rows(comparison: Comparison, workload: WorkloadScore) -> Iterator[list[str]]:
    """What all runs begin with, and what each method comes to."""
    subject, metric = workload.workload.subject, workload.metric
    first = fmean(starts(workload, "train_loss")), fmean(starts(workload, metric))
    majority = next((result.data.majority for result in workload.results), None) if metric == "accuracy" else None
    yield [subject, "at the start", "", number(first[0]), shown(metric, first[1]), "", _above(majority, [first[1]]), ""]
    for score in workload.methods:
        best = score.best
        if best is None:
            yield [subject, score.method.title, "", "missing", "missing", "", "", ""]
            continue
        printed = comparison.printed(workload, "accuracy", score)
        cells = [rate_text(score), loss_text(best), score_text(best), printed, _above(majority, best.accuracies)]
        yield [subject, score.method.title, *cells, pace_text(best)]


def _above(majority: float | None, accuracies: list[float]) -> str:
    """How far accuracies are above that of always answering the same, with Student's interval over seeds."""
    if majority is None or not all(map(math.isfinite, accuracies)):
        return ""
    above = paired(accuracies, [majority] * len(accuracies))

    def points(value: float) -> str:
        return f"{100 * value:+.1f}"

    return points(above.mean) + ends(above.interval, points)


def _differences(comparison: Comparison, full: Spec) -> str:
    rows = []
    for ours in comparison.workloads:
        w, data = ours.workload, ours.results[0].data
        theirs = next(other for other in full.workloads if (other.data, other.network) == (w.data, w.network))
        evaluated = f"{w.train_examples or 'all'} / {w.test_examples or 'all'}"
        sizes = f"{data.train:,} / {data.test:,}"
        pairs = [*zip(_settings(w), _settings(theirs), strict=True), (sizes, SIZES[w.data])]
        rows.append([w.subject, *(a if a == b else f"{a} (paper {b})" for a, b in pairs), evaluated])
    header = [_kind(comparison), "budget", "batch", "seeds", "starts from", "examples, train / test", "evaluated on"]
    lines = [table(header, rows)]
    for method in comparison.scores.spec.methods:
        theirs_too = next((other for other in full.methods if other.label == method.label), None)
        paper = f" (paper {_rates(theirs_too.lr)})" if theirs_too else ""
        if not method.is_auto:
            lines.append(f"- Rates of {method.title}: {_rates(method.lr)}{paper}")
    return "\n".join(lines) + "\n"


def _rates(grid: tuple[Rate, ...]) -> str:
    return ", ".join(map(rate_name, grid))


def _settings(workload: Workload) -> list[str]:
    budget = f"{workload.epochs} epochs" if workload.epochs else f"{workload.queries:,} queries"
    if isinstance(workload, TextWorkload):
        adapter = "all weights" if workload.adapter == "none" else workload.adapter
        start = f"{workload.weights.removesuffix('/model')}, {workload.setup}, {adapter}"
        return [budget, str(workload.batch), str(len(workload.seeds)), start]
    start = {"torchvision": "ImageNet weights", "random": "random weights"}.get(
        workload.weights, "ImageNet weights (file)"
    )
    if isinstance(workload, ImageWorkload) and workload.pretrain:
        change = ", inverted" if workload.pretrain.invert else ""
        start += f", then {workload.pretrain.steps} steps of Adam on {workload.pretrain.data}{change}"
    return [budget, str(workload.batch), str(len(workload.seeds)), start]
