"""Helpers for tests of comparisons."""

import json
import os
from pathlib import Path

import pytest

from forwardtune.experiments import spec as specs
from forwardtune.experiments.events import ignore
from forwardtune.experiments.plan import plan
from forwardtune.experiments.result import Base, Circumstances, Code, Description, Host, RunResult, Trace
from forwardtune.experiments.runner import execute
from forwardtune.experiments.store import Store
from forwardtune.tasks import Sources, Tasks, prepare
from forwardtune.tasks.task import DataFacts

DATA = Path(os.environ.get("FORWARDTUNE_DATA", Path(__file__).parents[3] / "shared" / "data"))
needs_data = pytest.mark.skipif(
    not (DATA / "mnist").is_dir(),
    reason=f"needs MNIST, CIFAR-10 and ResNet18's weights in {DATA} (or FORWARDTUNE_DATA)",
)

TEXT = """
title = "a test"
queries = 60
batch = 8
seeds = [0, 1]
evaluations = 4
train_examples = 40
test_examples = 40

[[workloads]]
data = "digits"
network = "cnn"
weights = "random"

[[methods]]
method = "VS2P"
lr = [1, 4]

[[methods]]
method = "STP"
lr = [1e-3]
"""


def parse(text=TEXT, folder=Path()):
    return specs.parse(text, "test", folder)


def finished(folder, text=TEXT, data=None):
    """A store with all runs of a comparison, made in this process."""
    spec, store, tasks = parse(text), Store(folder), Tasks(Sources(data), "cpu")
    for run in plan(spec):
        execute(run, store, tasks[run.workload])
    store.spec_file.write_text(text)
    return spec, store


def make(run, store, tell=ignore, sources=None):
    """One run, as a process of its own would make it."""
    return execute(run, store, prepare(run.workload, sources or Sources(), "cpu"), tell).result


def made_up(curve, **fields):
    """A result that nobody computed: of the fields that are not given it has what a finished run may have."""
    usual = {
        "id": "0",
        "title": "made up",
        "run": Description({}, "VS2P", {}, 1.0, 0, "cosine", 1, 1),
        "status": "finished",
        "reason": "",
        "queries": curve.queries[-1],
        "final": curve.scores[-1],
        "trace": Trace(),
        "weights": 1,
        "data": DataFacts("digits", 1400, 397, ""),
        "base": Base("0", "0"),
        "code": Code({"torch": "2.0"}, None, None),
        "device": "cpu",
        "threads": 1,
        "circumstances": Circumstances(Host("a host", "a CPU", 2, "Linux"), "", "", 1, 1.0, 1),
    }
    return RunResult(curve=curve, **{**usual, **fields})


def outcomes(folder):
    """All results in a store, without what is different every time."""
    results = {}
    for file in sorted((folder / "runs").glob("*.json")):
        results[file.name] = json.loads(file.read_text())
        assert results[file.name].pop("circumstances")["seconds"] > 0
    return results
