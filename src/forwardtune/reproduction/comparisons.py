"""What a folder has of the presets that ship, and what the paper has of the same."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from forwardtune import presets
from forwardtune.experiments.evidence import Evidence
from forwardtune.experiments.result import Json, Results
from forwardtune.experiments.scoring import ComparisonScore, MethodScore, WorkloadScore, score
from forwardtune.experiments.spec import Spec
from forwardtune.experiments.store import Store
from forwardtune.experiments.summary import count
from forwardtune.markup import markdown as plain

PRINTED = tomllib.loads((Path(__file__).parent / "paper.toml").read_text("utf-8"))
"""The numbers that the paper prints."""
FOLDERS = ("full", "decide", "gains", "reduced")
"""Of the presets that the page is about, in its order."""


@dataclass(frozen=True)
class Comparison:
    """A preset with its results; `full` has the paper's settings, if the paper has made it."""

    name: str
    scores: ComparisonScore
    full: Spec | None

    @property
    def folder(self) -> str:
        return self.name.partition("/")[0]

    @cached_property
    def workloads(self) -> list[WorkloadScore]:
        """Those with results, but for a pilot that only chooses rates for another one on the same data."""
        spec = self.scores.spec
        return [
            entry
            for entry in self.scores.workloads
            if entry.results
            and not (
                entry.workload.name == spec.rates_from
                and any(w.data == entry.workload.data and w is not entry.workload for w in spec.workloads)
            )
        ]

    def label(self, workload: WorkloadScore) -> str:
        """The preset, and which of its workloads if it has several."""
        return self.name if len(self.workloads) == 1 else f"{self.name}, {workload.workload.subject}"

    def printed(self, workload: WorkloadScore, what: str, method: MethodScore) -> str:
        """What the paper prints of a method on a workload; of most it prints nothing."""
        table: Json = PRINTED.get(self.full.name, {}) if self.full and not method.method.is_auto else {}
        value = table.get(workload.workload.network, {}).get(what, {}).get(method.method.method, "")
        return "{:.1f} ± {:.1f}".format(*value) if isinstance(value, list) else str(value)


def names() -> list[str]:
    """The presets that the page is about, in its order."""
    return sorted((name for name in presets.files() if name.startswith(tuple(f"{f}/" for f in FOLDERS))), key=_order)


def comparisons(folder: Path) -> list[Comparison]:
    """Those of which a folder has results."""
    made = {name: results for name in names() if (results := results_of(folder, name))}
    specs = {name: presets.load(name) for name in made}
    return [Comparison(name, score(specs[name], results), _in_full(name)) for name, results in made.items()]


def results_of(folder: Path, name: str) -> Results | None:
    """What a folder has of a preset: evidence, or else a store."""
    file = folder / f"{name}.jsonl"
    if file.exists():
        return Evidence(file)
    return Store(folder / name, create=False) if (folder / name / "store.json").exists() else None


def _order(name: str) -> tuple[int, bool, bool, bool, bool, str]:
    """By folder; images first, MNIST before CIFAR-10, 200 epochs before 100, the failure study last of them."""
    folder, _, stem = name.partition("/")
    images = stem.startswith(("mnist", "cifar10", "vgg11"))
    failure, short = "failure" in stem, stem.endswith("100")
    return FOLDERS.index(folder), not images, failure, short, not stem.startswith("mnist"), stem


def _in_full(name: str) -> Spec | None:
    """The paper's settings of a comparison: those of the same name, or the first that have all its workloads."""
    folder, _, stem = name.partition("/")
    if folder == "gains":
        return None
    if f"full/{stem}" in presets.files():
        return presets.load(f"full/{stem}")
    ours = _subjects(presets.load(name))
    return next(
        (full for other in names() if other.startswith("full/") and ours <= _subjects(full := presets.load(other))),
        None,
    )


def _subjects(spec: Spec) -> set[tuple[str, str, str]]:
    return {(workload.data, workload.network, workload.objective) for workload in spec.workloads}


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
        f"{count(len(results), 'run')}, {hours:.1f} hours in all if made one after the other, on {', '.join(hosts)}, "
        f"torch {', '.join(torch)}, forwardtune at {', '.join(commits)}, "
        f"{' to '.join(dict.fromkeys((days[0], days[-1])))}."
    )
