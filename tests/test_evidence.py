"""Results that stay: compact, checked, and never made twice."""

import json
import shutil
from pathlib import Path

import pytest

from forwardtune import presets
from forwardtune.errors import ExperimentError
from forwardtune.experiments.comparison import Machine, compare
from forwardtune.experiments.evidence import Evidence
from forwardtune.experiments.plan import plan
from forwardtune.experiments.result import Trace
from forwardtune.experiments.scoring import chosen_rates, extended, score
from forwardtune.experiments.store import Store
from forwardtune.tasks import Sources, Tasks
from tests.helpers.comparisons import TEXT, finished, parse


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    spec, store = finished(folder / "store")
    evidence = Evidence(folder / "evidence" / "auto" / "test.jsonl")
    evidence.keep(plan(spec), store)
    return spec, store, evidence.file


def test_scores_of_evidence_are_those_of_the_store(made):
    spec, store, file = made
    kept, whole = score(spec, Evidence(file)), score(spec, store)
    assert not kept.missing
    for ours, theirs in zip(kept.workloads[0].methods, whole.workloads[0].methods, strict=True):
        assert ours.best.losses == theirs.best.losses
        assert ours.best.accuracies == theirs.best.accuracies
    for run in plan(spec):
        result, original = Evidence(file).result(run.id), store.result(run.id)
        assert result.trace == Trace()
        assert result.curve == original.curve
        assert result.circumstances == original.circumstances
    assert file.stat().st_size < 3000 * len(plan(spec))


def test_only_what_is_missing_is_made(made, tmp_path, monkeypatch):
    """A seed more, in an empty store: the runs of the other seeds come from the file."""
    spec, store, file = made
    more, evidence = parse(TEXT.replace("[0, 1]", "[0, 1, 2]")), tmp_path / "kept.jsonl"
    evidence.write_bytes(file.read_bytes())
    elsewhere = Store(tmp_path / "store")
    shutil.copytree(file.parent / "bases", tmp_path / "bases")
    asked = []

    class Pool:
        def __init__(self, store, tasks, machine, tell):
            pass

        def work(self, runs):
            asked.extend(runs)

    monkeypatch.setattr("forwardtune.experiments.comparison._WorkerPool", Pool)
    compare(more, elsewhere, Tasks(Sources(), "cpu"), Machine(), evidence=Evidence(evidence))
    assert [run.seed for run in asked] == [2, 2, 2]
    assert evidence.read_bytes() == file.read_bytes()
    assert all(elsewhere.result(run.id) for run in plan(spec))
    for base in store.bases.iterdir():
        assert (elsewhere.bases / base.name).read_bytes() == base.read_bytes()


def test_runs_are_kept_even_if_the_comparison_is_interrupted(made, tmp_path, monkeypatch):
    spec, store, file = made

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("forwardtune.experiments.comparison._compare", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compare(spec, store, Tasks(Sources(), "cpu"), Machine(), evidence=Evidence(tmp_path / "a" / "b.jsonl"))
    assert (tmp_path / "a" / "b.jsonl").read_bytes() == file.read_bytes()


def changed(**changes):
    return lambda table: json.dumps({**table, **changes})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (changed(id="0" * 16), " is not the run that its id says"),
        (lambda table: json.dumps({**table, "run": {**table["run"], "seed": 7}}), " is not the run that its id says"),
        (changed(schema=9), " has format 9, not 1"),
        (changed(curve=None), ": curve must be a table, not None"),
        (changed(final={}), ": final has no 'train_loss'"),
        (lambda table: json.dumps(table)[:-5], " is not JSON"),
        (lambda table: "[" * 100_000, " is not JSON .it is nested too deeply"),
        (lambda table: "3", " is not the result of a run, but 3"),
    ],
)
def test_a_line_that_is_no_result_is_named(made, tmp_path, damage, message):
    lines = made[2].read_text().splitlines()
    lines[1] = damage(json.loads(lines[1]))
    (tmp_path / "bad.jsonl").write_text("\n".join(lines))
    with pytest.raises(ExperimentError, match=f"line 2 of .*bad.jsonl{message}.*; remove it, and the run will be made"):
        Evidence(tmp_path / "bad.jsonl")


def test_what_is_kept_here_is_what_its_presets_ask_for():
    """A change of how runs are described would orphan all evidence."""
    for file in sorted(Path(__file__).parents[1].glob("evidence/*/*.jsonl")):
        evidence = Evidence(file)
        spec = extended(presets.load(f"{file.parent.name}/{file.stem}"), evidence)
        ids = {run.id for run in plan(spec, chosen_rates(spec, evidence))}
        kept = {json.loads(line)["id"] for line in file.read_text().splitlines()}
        assert kept <= ids
        assert len(kept) > len(ids) / 2
