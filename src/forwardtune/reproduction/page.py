"""The page that sets our numbers beside the paper's, made from the results and nothing else."""

from __future__ import annotations

import tomllib
from pathlib import Path

from forwardtune import presets
from forwardtune.errors import ExperimentError
from forwardtune.experiments.evidence import Evidence
from forwardtune.experiments.intervals import paired
from forwardtune.experiments.report.tables import markdown, mean_and_deviation, ratio_text
from forwardtune.experiments.result import Json, Results, rate_name
from forwardtune.experiments.scoring import ComparisonScore, MethodScore, WorkloadScore, acceleration, accuracy, score
from forwardtune.experiments.spec import Spec
from forwardtune.experiments.store import Store
from forwardtune.experiments.summary import count, number, sentence
from forwardtune.markup import markdown as plain
from forwardtune.metrics import shown
from forwardtune.tasks import ImageWorkload, TextWorkload, Workload

PRINTED = Path(__file__).parent / "paper.toml"
"""The numbers that the paper prints."""
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

and the results by `forwardtune compare --preset PRESET --data DIR --out {folder}/PRESET`, with the presets named below;
`full/` ones are the paper's settings, `reduced/` ones fit two cores. All methods get the same number of queries;
the rate of each is the one with the lowest mean final training loss. STP{prime} is STP at equal queries: it asks for
three a step where the others ask for two, so it gets two thirds of the steps, and its rate decays over those (the paper
cuts a longer run off there). In parentheses after accuracies on texts: how far they are above always answering
the majority class, with Student's 95% interval over seeds.
"""


def page(folder: Path) -> str:
    """The page, from a folder that has results of presets under their names."""
    printed = tomllib.loads(PRINTED.read_text("utf-8"))
    names = sorted((name for name in presets.files() if name.startswith(("full/", "reduced/"))), key=_order)
    made = {name: results for name in names if (results := results_of(folder, name))}
    if not made:
        raise ExperimentError(
            f"{folder} holds no results of the paper's presets; make some by `forwardtune compare --preset "
            f"reduced/mnist-200 --data DIR --out {folder}/reduced/mnist-200`"
        )
    parts = [INTRODUCTION.format(folder=folder, prime="\N{PRIME}")]
    for name, results in made.items():
        spec = presets.load(name)
        scores = score(spec, results)
        parts.append(_section(name, scores, _in_full(spec), printed.get(spec.name, {})))
    missing = [f"- `{name}`: {presets.load(name).title}" for name in names if name not in made]
    if missing:
        parts.append("## Not run\n\n" + "\n".join(missing) + "\n")
    return "\n".join(parts)


def results_of(folder: Path, name: str) -> Results | None:
    """What a folder has of a preset: evidence, or else a store."""
    file = folder / f"{name}.jsonl"
    if file.exists():
        return Evidence(file)
    return Store(folder / name, create=False) if (folder / name / "store.json").exists() else None


def _order(name: str) -> tuple[bool, bool, bool, bool, bool, str]:
    """Full ones first; images first, MNIST before CIFAR-10, 200 epochs before 100, the failure study last of them."""
    size, _, stem = name.partition("/")
    images = stem.startswith(("mnist", "cifar10", "vgg11"))
    return size != "full", not images, "failure" in stem, stem.endswith("100"), not stem.startswith("mnist"), stem


def _in_full(spec: Spec) -> Spec | None:
    """The paper's settings of a comparison; all its language tasks are in one."""
    first = spec.workloads[0]
    by_loss = isinstance(first, TextWorkload) and first.objective == "loss"
    for name in (f"full/{spec.name}", *(["full/glue"] if by_loss else [])):
        if name in presets.files():
            return presets.load(name)
    return None


def _kind(scores: ComparisonScore) -> str:
    return "task" if isinstance(scores.workloads[0].workload, TextWorkload) else "network"


def _section(name: str, scores: ComparisonScore, full: Spec | None, printed: Json) -> str:
    spec = scores.spec
    blocks = [f"## {spec.title}\n\nPreset `{name}`. {' '.join(spec.description.split())}\n"]
    if scores.missing:
        blocks.append(f"{count(scores.missing, 'run')} missing.\n")
    blocks += [f"- {plain(sentence(workload))}" for workload in scores.workloads]
    blocks.append(f"\n### Test {plain(scores.metric_title())}\n\n" + _accuracy(scores, printed))
    blocks.append("\n### Training loss\n\n" + _losses(scores))
    if len(spec.methods) > 1:
        blocks.append(f"\n### Acceleration of {spec.methods[0].title}\n\n" + _accelerations(scores, printed))
    if full and spec.text != full.text:
        blocks.append("\n### What differs from the paper's settings\n\n" + _differences(scores, full))
    blocks.append(f"\n{origin(scores)}\n")
    return "\n".join(blocks)


def _accuracy(scores: ComparisonScore, printed: Json) -> str:
    header = [_kind(scores), "at the start"]
    majorities = [_majority(workload) for workload in scores.workloads]
    if any(majorities):
        header.append("majority class")
    for method in scores.spec.methods:
        header += [method.title, *(["paper"] if printed else [])]
    rows = []
    for workload, majority in zip(scores.workloads, majorities, strict=True):
        first = _start(workload, workload.metric)
        row = [workload.workload.subject, "missing" if first is None else shown(workload.metric, first)]
        if any(majorities):
            row.append("" if majority is None else f"{100 * majority:.1f}")
        for method_score in workload.methods:
            row.append(_mean_and_deviation(method_score) + _margin(method_score, majority))
            if printed:
                mean, deviation = printed[workload.workload.network]["accuracy"][method_score.method.method]
                row.append(f"{mean:.1f} ± {deviation:.1f}")
        rows.append(row)
    return markdown(header, rows)


def _mean_and_deviation(score: MethodScore) -> str:
    reached = accuracy(score)
    if reached is None or score.best is None:
        return "missing"
    diverged = f", {reached.diverged} of {len(score.best.results)} diverged" if reached.diverged else ""
    return f"{mean_and_deviation(reached)}{diverged}"


def _majority(workload: WorkloadScore) -> float | None:
    """The accuracy of always answering the same, where it is known."""
    known = next((result.data.majority for result in workload.results), None)
    return known if workload.metric == "accuracy" else None


def _margin(score: MethodScore, majority: float | None) -> str:
    """How far above it, with Student's interval over seeds."""
    if majority is None or score.best is None:
        return ""
    above = paired(score.best.accuracies, [majority] * len(score.best.accuracies))
    ends = f" [{100 * above.interval.low:+.1f}, {100 * above.interval.high:+.1f}]" if above.interval else ""
    return f" ({100 * above.mean:+.1f}{ends})"


def _start(workload: WorkloadScore, column: str) -> float | None:
    """What all runs of the workload began with."""
    return next((result.curve.column(column)[0] for result in workload.results), None)


def _losses(scores: ComparisonScore) -> str:
    rows = []
    for workload in scores.workloads:
        cells = []
        for method_score in workload.methods:
            if method_score.best is None:
                cells.append("missing")
                continue
            edge = ", an end of its grid" if method_score.at_edge else ""
            loss = "diverged" if method_score.best.diverged else number(method_score.best.mean_loss)
            cells.append(f"{loss} (lr {rate_name(method_score.best.lr)}{edge})")
        first = _start(workload, "train_loss")
        rows.append([workload.workload.subject, "missing" if first is None else number(first), *cells])
    return markdown([_kind(scores), "at the start", *(method.title for method in scores.spec.methods)], rows)


def _accelerations(scores: ComparisonScore, printed: Json) -> str:
    header = [_kind(scores)]
    for method in scores.spec.methods[1:]:
        header += [f"over {method.title}", *(["paper"] if printed else [])]
    rows = []
    for workload in scores.workloads:
        row = [workload.workload.subject]
        for other in workload.methods[1:]:
            row.append(ratio_text(acceleration(workload.methods[0], other)))
            if printed:
                row.append(str(printed[workload.workload.network]["acceleration"][other.method.method]))
        rows.append(row)
    return markdown(header, rows)


def _differences(scores: ComparisonScore, full: Spec) -> str:
    rows = []
    for ours in scores.workloads:
        theirs = next(w for w in full.workloads if w.subject == ours.workload.subject)
        data = ours.results[0].data if ours.results else None
        w = ours.workload
        sizes = f"{data.train:,} / {data.test:,} (paper {SIZES[w.data]})" if data else "unknown"
        evaluated = f"{w.train_examples or 'all'} / {w.test_examples or 'all'}"
        pairs = zip(_settings(w), _settings(theirs), strict=True)
        rows.append([w.subject, *(f"{a} (paper {b})" for a, b in pairs), sizes, evaluated])
    header = [_kind(scores), "budget", "batch", "seeds", "starts from", "examples, train / test", "evaluated on"]
    lines = [markdown(header, rows), "", "Rates:", ""]
    for method in scores.spec.methods:
        rates = ", ".join(map(rate_name, method.lr))
        lines.append(f"- {method.title}: {rates} (paper {', '.join(map(rate_name, full.method(method.label).lr))})")
    lines += [
        "",
        "Accuracy on n examples has an error of its own: at 50%, 3.5 points on 200 and 1.6 on 1,000 examples.",
    ]
    return "\n".join(lines)


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


def origin(scores: ComparisonScore) -> str:
    """Where the numbers come from, in a sentence."""
    results = scores.results
    if not results:
        return ""
    commits = sorted({(r.code.commit or "no commit")[:10] + ("+" if r.code.dirty else "") for r in results})
    hosts = sorted({f"{r.circumstances.host.cores} cores of {r.circumstances.host.cpu}" for r in results})
    torch = sorted({r.code.versions["torch"] for r in results})
    hours = sum(r.circumstances.seconds for r in results) / 3600
    days = sorted({r.circumstances.finished[:10] for r in results})
    return plain(
        f"{len(results)} runs, {hours:.1f} hours in all if made one after the other, on {', '.join(hosts)}, torch "
        f"{', '.join(torch)}, forwardtune at {', '.join(commits)}, {' to '.join(dict.fromkeys((days[0], days[-1])))}."
    )
