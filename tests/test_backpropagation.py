"""AdamW as a row of comparisons: the loop, its budget and its resume, what is refused, and what reports tell of it."""

import csv
import json
import math
from dataclasses import replace
from statistics import fmean

import pytest
import torch

from forwardtune.errors import ExperimentError
from forwardtune.experiments import provenance, report
from forwardtune.experiments.comparison import Machine, compare
from forwardtune.experiments.events import Evaluated, Noted, Progressed, Started
from forwardtune.experiments.evidence import Evidence
from forwardtune.experiments.plan import Run, plan
from forwardtune.experiments.result import RunResult
from forwardtune.experiments.runner import execute
from forwardtune.experiments.scoring import acceleration, chosen_rates, score
from forwardtune.experiments.spec import Backpropagation
from forwardtune.experiments.store import Store
from forwardtune.experiments.sweep import plan_sweep
from forwardtune.experiments.under_way import batch_indices
from forwardtune.tasks import Sources, Tasks, prepare
from tests.helpers.comparisons import TEXT, finished, make, outcomes, parse
from tests.helpers.texts import models_and_tables
from tests.helpers.texts import task_of as text_task
from tests.test_report import Tables
from tests.test_runner import StopError, Tricky, stop_at

ADAMW = TEXT.replace('"STP"', '"AdamW"').replace("[1e-3]", "[1e-3, 3e-3]")


def adamw_of(text=ADAMW):
    return next(run for run in plan(parse(text)) if run.method.method == "AdamW")


@pytest.mark.parametrize(
    ("settings", "given"), [("", {}), ("weight_decay = 1\nbetas = [0.5, 0.9]", {"betas": (0.5, 0.9)})]
)
def test_a_run_is_the_plain_loop(tmp_path, monkeypatch, settings, given):
    """With dropout and BatchNorm, whose mode is that of steps by forward passes."""
    monkeypatch.setattr("forwardtune.tasks.images.networks.cnn", Tricky)
    run, store = adamw_of(f"{ADAMW}\n{settings}"), Store(tmp_path / "store")
    task = prepare(run.workload, Sources(), "cpu")
    result, tuned = execute(run, store, task)
    model, losses, seen = task.start(store.base(result.base.id)), [], []
    decay = 1.0 if settings else 0.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=decay, **given)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: (1 + math.cos(math.pi * (k / 20))) / 2)
    torch.manual_seed(0)
    for step in range(20):
        if step % 5 == 0:
            losses.append(task.evaluate(model).train_loss)
        x, y = task.batch(batch_indices(1400, 8, 0, step))
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        seen.append(loss.item())
    final = task.evaluate(model)
    assert result.curve.column("train_loss") == [*losses, final.train_loss]
    assert result.final == final
    assert result.trace.loss == tuple(seen)
    for (name, ours), theirs in zip(tuned.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


def test_a_step_is_counted_as_three_queries(tmp_path):
    """So it gets a third of the budget in steps, evaluated at the same queries as the others."""
    spec, store = finished(tmp_path / "store", ADAMW)
    results = {run.title: store.result(run.id) for run in plan(spec)}
    ours = results["digits-cnn AdamW (backpropagation) lr 0.001 seed 0"]
    assert ours.queries == 60
    assert ours.curve.queries == (0, 15, 30, 45, 60)
    assert ours.trace.queries == tuple(range(3, 61, 3))
    assert (ours.trace.gamma, ours.trace.alpha, ours.plateaus) == ((), (), 0)
    other = results["digits-cnn VS2P lr 1 seed 0"]
    assert ours.curve.scores[0] == other.curve.scores[0]
    assert (ours.weights, ours.base, ours.data) == (other.weights, other.base, other.data)
    assert ours.final.train_loss < other.final.train_loss
    assert {file.suffix for file in store.runs.glob(f"{ours.id}*")} == {".json"}


def test_the_id_depends_on_what_decides_the_outcome():
    """That of others is what it is without AdamW, and nothing that they have in common reaches it."""
    ids = {run.id for run in plan(parse(ADAMW))}
    assert {run.id for run in plan(parse())} & ids == {r.id for r in plan(parse()) if r.method.method == "VS2P"}
    ours = adamw_of()
    assert ours.description.settings == {"weight_decay": 0.0, "betas": [0.9, 0.999]}
    for top in ('distribution = "rademacher"', "directions = 3", "rho = 1e-2", 'scale = "absolute"'):
        assert adamw_of(ADAMW.replace("batch = 8", f"batch = 8\n{top}")).id == ours.id
    assert adamw_of(f"{ADAMW}\nweight_decay = 0\nbetas = [0.9, 0.999]").id == ours.id
    assert adamw_of(f"{ADAMW}\nweight_decay = 0.1").id != ours.id
    assert adamw_of(ADAMW.replace("batch = 8", 'batch = 8\ndecay = "none"')).id != ours.id


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("[1e-3, 3e-3]", '"auto"', "the method 'AdamW': AdamW does not find its rate; give a list of rates for lr"),
        (
            '"AdamW"',
            '"AdamW"\nrho = 1e-3',
            "the method 'AdamW': the setting 'rho' is not known; choose one of betas, we",
        ),
        ('"AdamW"', '"AdamW"\ndirections = 2', "the setting 'directions' is not known"),
        ('"AdamW"', '"AdamW"\nweight_decay = -1', "the method 'AdamW': Invalid weight_decay value: -1"),
        ('"AdamW"', '"AdamW"\nbetas = [0.9]', r"betas must be two numbers, not \[0.9\]"),
        ('"AdamW"', '"AdamW"\nbetas = [0.9, 1.0]', "Invalid beta parameter at index 1: 1.0"),
        (
            "batch = 8",
            'batch = 8\nobjective = "accuracy"',
            "digits-cnn: accuracy has no gradient, which AdamW needs; set",
        ),
        ("queries = 60", "queries = 11", "11 queries are 3 steps of AdamW, too few for 4 evaluations"),
    ],
)
def test_what_has_no_gradient_or_no_such_setting_is_refused(old, new, complaint):
    assert old in ADAMW
    with pytest.raises(ExperimentError, match=complaint):
        parse(ADAMW.replace(old, new))


def test_a_sweep_is_refused():
    spec = parse(ADAMW)
    with pytest.raises(ExperimentError, match="AdamW has no ledger, by which a sweep judges and resumes; `forwardtune"):
        plan_sweep(spec, spec.workloads[0], spec.method("AdamW"), queries=900)


@pytest.mark.parametrize(
    "moment", [(Started, 1), (Evaluated, 1), (Evaluated, 2), (Progressed, 7), (Progressed, 19), (Evaluated, 5)]
)
def test_a_run_that_was_stopped_resumes(tmp_path, moment, monkeypatch):
    """From its last evaluation, with the same dropout, running statistics and averages of gradients."""
    monkeypatch.setattr("forwardtune.experiments.under_way.PAUSE", 0.0)
    monkeypatch.setattr("forwardtune.tasks.images.networks.cnn", Tricky)
    run = adamw_of()
    make(run, Store(tmp_path / "whole"))
    store = Store(tmp_path / "stopped")
    with pytest.raises(StopError):
        make(run, store, stop_at(*moment))
    begun = []
    result = make(run, store, lambda event: begun.append(event) if isinstance(event, Started) else None)
    assert begun[0].queries == {(Evaluated, 2): 15, (Progressed, 7): 15, (Progressed, 19): 45, (Evaluated, 5): 45}.get(
        moment, 0
    )
    assert result.circumstances.sessions == (2 if begun[0].queries else 1)
    assert outcomes(tmp_path / "stopped") == outcomes(tmp_path / "whole")
    assert not store.checkpoint(run.id).exists()


@pytest.mark.parametrize("damage", ["checkpoint", "other", "looks"])
def test_a_run_whose_files_were_damaged_starts_over_and_says_so(tmp_path, damage):
    run, store, seen = adamw_of(), Store(tmp_path / "store"), []

    def stop(event):
        seen.append(isinstance(event, Evaluated))
        if sum(seen) == 3:
            raise StopError

    with pytest.raises(StopError):
        make(run, store, stop)
    file = store.runs / f"{run.id}.{'looks' if damage == 'looks' else 'checkpoint'}"
    if damage == "other":
        torch.save({"moved": {}}, file)
    else:
        file.write_bytes(b"" if damage == "looks" else file.read_bytes()[:-1000])
    notes = []
    make(run, store, lambda event: notes.append(event.text) if isinstance(event, Noted) else None)
    (note,) = notes
    reason = "evaluations are missing" if damage == "looks" else f"{file} is damaged"
    assert note.startswith(f"digits-cnn AdamW (backpropagation) lr 0.001 seed 0 starts over: {reason}")
    assert (store.runs / f"damaged.{run.id}.checkpoint").exists()
    make(run, Store(tmp_path / "whole"))
    assert outcomes(tmp_path / "store") == outcomes(tmp_path / "whole")


def test_a_run_that_diverges_is_given_up(tmp_path):
    result = make(adamw_of(ADAMW.replace("[1e-3, 3e-3]", "[30.0]")), Store(tmp_path))
    assert result.diverged
    assert result.reason.startswith("the training loss is ")
    assert result.reason.endswith("at 15 queries")
    assert result.queries == 15


PILOT = """
title = "a test"
rates_from = "pilot"
queries = 60
batch = 8
evaluations = 4
train_examples = 40
test_examples = 40
network = "cnn"
weights = "random"

[[workloads]]
name = "pilot"
data = "digits"
seeds = [7]

[[workloads]]
name = "whole"
data = "digits"
seeds = [0, 1]

[[methods]]
method = "AdamW"
lr = [1e-3, 3e-3]

[[methods]]
method = "VS2P"
lr = [1]
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Rates are chosen on a pilot; AdamW comes first, so that its acceleration is told."""
    spec, store, tasks = parse(PILOT), Store(tmp_path_factory.mktemp("made") / "store"), Tasks(Sources(), "cpu")
    while left := [run for run in plan(spec, chosen_rates(spec, store)) if store.result(run.id) is None]:
        for run in left:
            execute(run, store, tasks[run.workload])
    return spec, store


def test_it_is_scored_and_kept_like_others(made, tmp_path):
    spec, store = made
    chosen = chosen_rates(spec, store)
    assert chosen.keys() == {"AdamW", "VS2P"}
    runs = plan(spec, chosen)
    assert len(runs) == 3 + 2 * 2
    evidence = Evidence(tmp_path / "kept.jsonl")
    evidence.keep(runs, store)
    scores = score(spec, Evidence(evidence.file))
    assert not scores.missing
    assert [entry.method.title for entry in scores.workloads[1].ranking] == ["AdamW (backpropagation)", "VS2P"]
    assert acceleration(*scores.workloads[1].methods).ratio == 4.0  # at the first of four evaluations
    assert evidence.give(runs, Store(tmp_path / "empty")) == 7


def test_the_report_tells_its_memory_and_pace(made):
    spec, store = made
    page = report.write(score(spec, store), store.folder).read_text()
    cells = Tables(page).tables["cost"]
    assert cells[0] == ["workload", "method", "seconds", "queries per second", "peak MB"]
    assert [row[:2] for row in cells[1:]] == [
        [workload, method] for workload in ("pilot", "whole") for method in ("AdamW (backpropagation)", "VS2P")
    ]
    results = [store.result(run.id) for run in plan(spec, chosen_rates(spec, store))]
    mine = [result for result in results if result.run.method == "VS2P" and result.run.seed < 7]
    with open(store.folder / "report" / "cost.csv", newline="") as file:
        row = list(csv.DictReader(file))[-1]
    assert float(row["peak_memory"]) == fmean(result.circumstances.peak_memory for result in mine)
    speeds = [60 / (r.circumstances.seconds - r.circumstances.evaluating) for r in mine]
    assert float(row["queries_per_second"]) == pytest.approx(fmean(speeds))
    assert all(0 < r.circumstances.evaluating < r.circumstances.seconds for r in results)


def test_results_that_do_not_tell_how_long_evaluations_took(made):
    spec, store = made
    result = store.result(plan(spec)[0].id)
    older = replace(result, circumstances=replace(result.circumstances, evaluating=None))
    assert "evaluating" not in older.to_json()["circumstances"]
    assert RunResult.from_json(json.loads(json.dumps(older.to_json()))) == older
    assert older.queries_per_second == 60 / result.circumstances.seconds < result.queries_per_second


def test_memory_that_a_run_has_left_is_not_counted_in_the_next():
    """What is freed in small pieces stays with the process until it is given back."""
    provenance.reset_peak_memory(torch.device("cpu"))
    before = provenance.peak_memory(torch.device("cpu"))
    pieces = [bytearray(100_000) for _ in range(3000)]
    assert provenance.peak_memory(torch.device("cpu")) > before + 250e6
    last = pieces[-1]  # keeps the heap from becoming shorter by itself
    del pieces
    provenance.reset_peak_memory(torch.device("cpu"))
    assert provenance.peak_memory(torch.device("cpu")) < before + 50e6
    assert last


def adamw_on(task, **settings):
    method = Backpropagation("AdamW", "AdamW", (1e-2,), {"weight_decay": 0.0, "betas": [0.9, 0.999], **settings})
    return Run(task.workload, method, 1e-2, 0, "none")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return models_and_tables(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_texts(home, tmp_path, adapter):
    """Of an adapter alone its weights are tuned."""
    task, store = text_task(home, "causal", queries=60, adapter=adapter, dtype="float32"), Store(tmp_path)
    result, tuned = execute(adamw_on(task), store, task)
    assert result.final.train_loss < result.curve.scores[0].train_loss - 0.1
    assert result.weights == sum(p.numel() for p in tuned.parameters() if p.requires_grad)
    base = task.start(store.base(task.base_id))
    for (name, ours), theirs in zip(tuned.named_parameters(), base.parameters(), strict=True):
        assert torch.equal(ours, theirs) != ours.requires_grad, name


def test_packed_weights(home, tmp_path):
    """They are left as they are under an adapter, and refused where they would be tuned themselves."""
    pytest.importorskip("bitsandbytes")
    task = text_task(home, "causal", queries=12, adapter="lora", dtype="int8")
    result = execute(adamw_on(task), Store(tmp_path / "lora"), task).result
    assert result.final.train_loss < result.curve.scores[0].train_loss
    bare = text_task(home, "causal", queries=12, dtype="int8")
    with pytest.raises(ExperimentError, match=r"cannot tune packed weights; set an adapter .*, or leave AdamW out"):
        execute(adamw_on(bare), Store(tmp_path / "bare"), bare)


def test_processes_that_compare_use_are_of_one_kind(tmp_path, monkeypatch):
    """What one kind of run loads is not counted in the memory of the other, whatever their order in the plan."""
    asked = []

    class Pool:
        def __init__(self, *_):
            pass

        def work(self, runs):
            asked.append([run.method.label for run in runs])

    monkeypatch.setattr("forwardtune.experiments.comparison._WorkerPool", Pool)
    compare(parse(ADAMW), Store(tmp_path), Tasks(Sources(), "cpu"), Machine())
    assert asked == [["VS2P"] * 4, ["AdamW"] * 4]
