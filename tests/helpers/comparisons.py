"""Helpers for tests of comparisons."""

import json
import os
from pathlib import Path

import pytest

from forwardtune.experiments import spec as specs
from forwardtune.experiments.plan import plan
from forwardtune.experiments.runner import execute
from forwardtune.experiments.store import Store
from forwardtune.tasks import Sources

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
    spec, store = parse(text), Store(folder)
    for run in plan(spec):
        execute(run, store, Sources(data))
    store.spec_file.write_text(text)
    return spec, store


def outcomes(folder):
    """All results in a store, without what is different every time."""
    found = {}
    for file in sorted((folder / "runs").glob("*.json")):
        result = json.loads(file.read_text())
        assert result.pop("circumstances")["seconds"] > 0
        found[file.name] = result
    return found
