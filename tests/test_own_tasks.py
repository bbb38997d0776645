"""Workloads of the user's own: a function that a spec names gives the model, the data and the loss."""

import json
import math
import os
import signal
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import forwardtune as ft
from forwardtune.errors import ExperimentError
from forwardtune.experiments import report
from forwardtune.experiments import spec as specs
from forwardtune.experiments.comparison import Machine, compare
from forwardtune.experiments.evidence import Evidence
from forwardtune.experiments.plan import plan
from forwardtune.experiments.runner import execute
from forwardtune.experiments.scoring import score
from forwardtune.experiments.store import Store
from forwardtune.experiments.summary import sentence
from forwardtune.experiments.sweep import plan_sweep, sweep
from forwardtune.experiments.under_way import batch_indices
from forwardtune.metrics import is_better, own_name, shown, titled, unit
from forwardtune.tasks import Sources, Tasks, prepare
from tests.helpers.comparisons import outcomes
from tests.test_cli_experiments import forwardtune
from tests.test_runner import stopped

DOCUMENT = Path(__file__).parents[1] / "docs" / "experiments.md"

CODE = """
import torch
from torch import nn
from helper_of_mine import Net
from forwardtune.tasks import OwnTask


def errors(model, batch):
    x, y = batch
    return (model(x) - y).abs().mean(1)


def loss(model, batch):
    x, y = batch
    noise = 0.01 * torch.randn_like(y)  # of torch, so the same for all queries of a step
    return (model(x) + noise - y).square().mean(1)


def make(hidden=4, noisy: bool = False) -> OwnTask:
    model = Net(hidden)
    teacher = nn.Linear(3, 2)
    x = torch.randn(100, 3)
    examples = torch.utils.data.TensorDataset(x, teacher(x).detach())
    train, test = torch.utils.data.random_split(examples, [70, 30])
    metrics = {"mae": ("lowest", errors), "fit": ("highest", lambda *a: -errors(*a))}
    return OwnTask(model, train, test, loss, metrics)


def elsewhere():
    pass
"""

HELPER = """
from torch import nn


class Net(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, hidden), nn.BatchNorm1d(hidden), nn.Dropout(0.2), nn.Linear(hidden, 2))
        self.body[1].eval()

    def forward(self, x):
        return self.body(x)
"""

SPEC = """
title = "a task of one's own"
queries = 60
batch = 8
seeds = [0, 1]
evaluations = 4
train_examples = 20

[[workloads]]
task = "mine_to_tune:make"

[[methods]]
method = "VS2P"
lr = [0.3, 1]

[[methods]]
method = "STP"
lr = [0.01]
"""


@pytest.fixture(autouse=True)
def _paths(monkeypatch):
    """The folders of specs go as they came."""
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def folder(tmp_path):
    return written(tmp_path)


def written(folder, code=CODE, spec=SPEC):
    (folder / "mine_to_tune.py").write_text(code)
    (folder / "helper_of_mine.py").write_text(HELPER)
    (folder / "mine.toml").write_text(spec)
    return folder


def loaded(folder):
    spec = specs.load(folder / "mine.toml")
    return spec, Tasks(Sources(folder=folder), "cpu")


def task_in(folder, code=CODE, **changes):
    written(folder, code)
    return prepare(replace(specs.load(folder / "mine.toml").workloads[0], **changes), Sources(folder=folder), "cpu")


def made(run, folder, store):
    return execute(run, store, prepare(run.workload, Sources(folder=folder), "cpu")).result


def test_a_run_is_the_plain_loop(folder):
    spec, tasks = loaded(folder)
    run, store = plan(spec)[1], Store(folder / "store")
    result, tuned = execute(run, store, tasks[run.workload])

    torch.manual_seed(0)  # what `make` finds
    body = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 2)
    )
    body[1].eval()
    teacher, x = torch.nn.Linear(3, 2), torch.randn(100, 3)
    y = teacher(x).detach()
    train, test = torch.utils.data.random_split(range(100), [70, 30])

    def measured(indices, function):
        modes = [module.training for module in body.modules()]
        body.eval()
        with torch.no_grad():
            parts = [function(torch.tensor(some)) for some in indices]
        for module, mode in zip(body.modules(), modes, strict=True):
            module.training = mode
        return sum(part.double().sum().item() for part in parts) / sum(map(len, parts))

    order = [test.indices[i] for i in torch.randperm(30, generator=torch.Generator().manual_seed(0))]
    chunks = [order[i : i + 8] for i in range(0, 30, 8)]
    torch.manual_seed(0)  # where the run begins
    optimizer, errors = ft.VS2P(body.named_parameters(), lr=1.0, seed=0, distribution="normal"), []
    for step in range(30):
        if step in (0, 8, 15, 22):
            errors.append(measured(chunks, lambda i: (body(x[i]) - y[i]).abs().mean(1)))
        chosen = torch.tensor([train.indices[i] for i in batch_indices(70, 8, 0, step)])
        for group in optimizer.param_groups:
            group["lr"] = (1 + math.cos(math.pi * (step / 30))) / 2

        def closure(chosen=chosen):
            noise = 0.01 * torch.randn(8, 2)
            return (body(x[chosen]) + noise - y[chosen]).square().mean(1).mean()

        optimizer.step(closure)
    errors.append(measured(chunks, lambda i: (body(x[i]) - y[i]).abs().mean(1)))
    assert result.curve.column("mae ↓") == errors
    assert result.curve.column("fit ↑") == pytest.approx([-error for error in errors])
    assert errors[-1] < errors[0]
    assert all(torch.equal(a, b) for a, b in zip(tuned.parameters(), body.parameters(), strict=True))
    assert (result.metrics, result.score) == (("mae ↓", "fit ↑"), errors[-1])
    assert (result.weights, result.data.name, result.data.train, result.data.test) == (34, "mine_to_tune:make", 70, 30)
    replayed = ft.replay(tasks[run.workload].start(store.base(result.base.id)), store.ledger(run.id))
    assert tasks[run.workload].evaluate(replayed) == result.final  # with the same noise in the loss


def test_two_workers_make_what_one_process_makes_and_all_pages_show_it(folder):
    spec, tasks = loaded(folder)
    alone, store = Store(folder / "alone"), Store(folder / "store")
    evidence = Evidence(folder / "kept" / "mine.jsonl")
    compare(spec, store, tasks, Machine(workers=2), evidence=evidence)
    for run in plan(spec):
        made(run, folder, alone)
    assert outcomes(store.folder) == outcomes(alone.folder)
    assert len(outcomes(store.folder)) == 6
    scores = score(spec, Evidence(evidence.file))
    assert not scores.missing
    assert scores.metric_title() == "mae ↓"
    (_, stp), *_ = [workload.methods for workload in scores.workloads]
    assert stp.best.accuracies == [store.result(run.id).final.metrics["mae ↓"] for run in plan(spec) if run.lr == 0.01]
    assert sentence(scores.workloads[0]).startswith("mine_to_tune-make: after 60 queries ")
    page = report.write(score(spec, store), store.folder)
    assert "Test mae ↓" in page.read_text()


def test_the_command_compares_runs_sweeps_and_reports(folder):
    (folder / "elsewhere").mkdir()
    out = ("--out", folder / "out", "--threads", "1")
    done = forwardtune("compare", folder / "mine.toml", *out, "--workers", "2", "--no-report", cwd=folder / "elsewhere")
    assert done.returncode == 0, done.stderr
    assert "Test mae ↓" in done.stdout
    done = forwardtune("run", folder / "mine.toml", "--method", "VS2P", "--lr", "0.5", *out)
    assert done.returncode == 0, done.stderr
    assert "test mae 0." in done.stdout
    swept = ("--rates", "0.1", "3", "--count", "3", "--queries", "200", *out)
    done = forwardtune("sweep", folder / "mine.toml", *swept)
    assert done.returncode == 0, done.stderr
    assert "won: training loss 0." in done.stdout
    (folder / "mine_to_tune.py").unlink()  # a report runs nothing
    done = forwardtune("report", folder / "out")
    assert done.returncode == 0, done.stderr
    assert "Test mae ↓" in done.stdout


def test_a_run_that_was_stopped_resumes(folder, monkeypatch):
    monkeypatch.chdir(folder)  # where `stopped` looks for the module
    run = plan(specs.load("mine.toml"))[0]
    made(run, folder, Store(folder / "whole"))
    for evaluations in (1, 3, 5):
        store = Store(folder / f"stopped{evaluations}")
        stopped(run, store, evaluations)
        assert store.result(run.id) is None
        made(run, folder, store)
        assert outcomes(store.folder) == outcomes(folder / "whole")


def test_a_killed_run_resumes(folder):
    """In the middle of a step, and of an evaluation."""
    run = plan(specs.load(folder / "mine.toml"))[0]
    made(run, folder, Store(folder / "whole"))
    for call in (1, 12, 40, 70):
        store = Store(folder / f"killed{call}")
        child = os.fork()
        if child == 0:  # pragma: no cover
            killed_at(call, run, store, folder)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        made(run, folder, store)
        assert outcomes(store.folder) == outcomes(folder / "whole")


def killed_at(call, run, store, folder):  # pragma: no cover
    """Makes a run up to the call of one of the user's functions."""
    task = prepare(run.workload, Sources(folder=folder), "cpu")
    calls, real = iter(range(1, 1000)), task._values
    task._values = lambda *a: os.kill(os.getpid(), signal.SIGKILL) if next(calls) == call else real(*a)
    execute(run, store, task)
    os._exit(0)


def test_a_sweep(folder):
    spec, tasks = loaded(folder)
    planned = plan_sweep(spec, spec.workloads[0], spec.methods[0], queries=200, eta=2)
    outcome = sweep(planned, Store(folder / "store"), tasks)
    assert outcome.queries == outcome.sweep.budget <= 200
    assert outcome.winner.told_score.startswith("test mae 0.")


# What a run is known by


def test_ids_have_the_task_and_its_options_and_bases_all_that_they_give(folder):
    spec, tasks = loaded(folder)
    workload = spec.workloads[0]
    (one, *_), wider = plan(spec), replace(workload, options={"hidden": 5})
    assert asdict(one.description)["workload"] == {
        "task": "mine_to_tune:make", "batch": 8, "queries": 60, "evaluations": 4, "train_examples": 20,
    }  # fmt: skip
    assert len({replace(one, workload=w).id for w in (workload, wider, replace(workload, task="mine_to_tune:b"))}) == 3
    assert replace(one, workload=replace(workload, name="mine")).id == one.id
    base = tasks[workload].base_id
    assert base == prepare(workload, Sources(folder=folder), "cpu").base_id
    others = [tasks[wider].base_id]
    for old, new in (
        ("0.01 *", "0.02 *"),  # the loss
        ("torch.randn(100, 3)", "torch.randn(100, 3) + 1"),  # the data
        ("[70, 30]", "[80, 20]"),
        ("nn.Linear(3, 2)", "nn.Linear(3, 2, False)"),
    ):
        assert old in CODE
        others.append(task_in(folder, CODE.replace(old, new)).base_id)
    written(folder)
    (folder / "helper_of_mine.py").write_text(HELPER.replace("0.2", "0.3"))  # seen, and imported anew
    changed = prepare(workload, Sources(folder=folder), "cpu")
    assert changed.own.model.body[2].p == 0.3
    assert len({base, changed.base_id, *others}) == 7
    assert task_in(folder).base_id == base


def test_data_of_the_same_code_are_known_too(tmp_path):
    code = CODE.replace("torch.randn(100, 3)", f"torch.load({str(tmp_path / 'x.pt')!r})")
    torch.save(torch.randn(100, 3, generator=torch.Generator().manual_seed(0)), tmp_path / "x.pt")
    base = task_in(tmp_path, code).base_id
    torch.save(torch.randn(100, 3, generator=torch.Generator().manual_seed(1)), tmp_path / "x.pt")
    assert task_in(tmp_path, code).base_id != base


def test_runs_of_other_code_are_refused(folder, monkeypatch):
    spec, _ = loaded(folder)
    store = Store(folder / "store")
    for run in plan(spec)[:3]:
        made(run, folder, store)
    begun = plan(spec)[3]
    monkeypatch.chdir(folder)  # where `stopped` looks for the module
    stopped(begun, store)
    written(folder, CODE.replace("0.01", "0.02"))
    complaint = "were made on other data or from other weights, or by other code of a task; use those"
    with pytest.raises(ExperimentError, match=complaint):
        compare(spec, store, loaded(folder)[1], Machine())
    with pytest.raises(ExperimentError, match="was begun on other data or weights, or by other code of a task"):
        made(begun, folder, store)
    done = forwardtune("run", "mine.toml", "--method", "VS2P", "--seed", "7", "--out", "store", cwd=folder)
    assert done.returncode == 1
    assert "by other code of a task" in done.stderr


def test_a_task_that_is_another_in_each_process(folder):
    code = CODE.replace("torch.randn(100, 3)", "torch.tensor(numpy.random.default_rng().random((100, 3))).float()")
    written(folder, f"import numpy\n{code}")
    spec, tasks = loaded(folder)
    with pytest.raises(ExperimentError, match="its code or data are not what they were when the comparison began; lea"):
        compare(spec, Store(folder / "store"), tasks, Machine())


# What is refused


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("def make(", "def mak(", r"mine_to_tune\.py has no function 'make' \(did you mean 'mak'\?\)"),
        (" -> OwnTask:", ":", r"make in .*mine_to_tune\.py is not declared to return an OwnTask; write `def make\("),
        ("import torch\n", "import torhc\n", r"its import failed with ModuleNotFoundError: No module named 'torhc' \(.*mine_to_tune\.py, line 2: import torhc\)"),  # noqa: E501
        ("def make(", "def make(:", r"its import failed with SyntaxError: invalid syntax \(.*mine_to_tune\.py, line 19\)"),  # noqa: E501
        ("import torch\n", "import sys; sys.exit('bye')\n", "its import failed with SystemExit: bye"),
        ("return OwnTask(", "return (lambda *a: 1 / 0)(", r"make failed with ZeroDivisionError: division by zero \(.*, line 26: return"),  # noqa: E501
        ("return OwnTask(", "return (", "its function must return an OwnTask, not tuple"),
        ("(model, train,", "('a model', train,", "model must be a torch.nn.Module, not str"),
        ("(model, train,", "(model, iter(train),", "train must have a length and give examples by index, .* which generator does not|which iterator"),  # noqa: E501
        ("train, test, loss", "train, [], loss", "test has no examples"),
        ("test, loss", "test, 3", "loss must be a function, not int"),
        ('("lowest", errors)', "errors", "the metric 'mae' must be a pair"),
        ('"lowest"', '"low"', "the best value of 'mae' 'low' is not known .did you mean 'lowest'"),
        ('{"mae"', '{"m|e"', "a metric's name must be text without any of"),
        ("x = torch.randn(100, 3)", "x = torch.randn(100, 3) @ model", r"make failed with TypeError: .* \(.*mine_to_tune\.py, line 22: x = torch"),  # noqa: E501
    ],
)  # fmt: skip
def test_what_is_no_task_is_told(tmp_path, old, new, complaint):
    assert old in CODE
    with pytest.raises(ExperimentError, match=f"^the task mine_to_tune:make: .*({complaint})") as caught:
        task_in(tmp_path, CODE.replace(old, new))
    assert "Traceback" not in str(caught.value)


LOSS = "    return (model(x) + noise - y).square().mean(1)"


@pytest.mark.parametrize(
    ("new", "complaint"),
    [
        ("return 3.0", r"loss must return a tensor, of one number or one per example \(8 here\), not float"),
        ("return nn.LazyLinear(2)", "loss must return a tensor, .*not LazyLinear"),
        ("return (model(x) - y)", r"not a tensor of shape \(8, 2\)"),
        ("return (model(x) - y).log().mean()", "its loss is nan before any step; it must be finite"),
        ("return model(x, 1)", r"loss failed with TypeError: .*\(.*mine_to_tune\.py, line 16: return model\(x, 1\)\)"),
        ("return model(x[:, :2])", r"loss failed with RuntimeError: mat1 and mat2 .*helper_of_mine\.py, line "),
    ],
)
def test_a_loss_that_is_none_is_told_before_anything_is_done(tmp_path, new, complaint):
    written(tmp_path, CODE.replace(LOSS, f"    {new}"))
    spec, tasks = loaded(tmp_path)
    with pytest.raises(ExperimentError, match=f"^the task mine_to_tune:make: .*{complaint}"):
        compare(spec, Store(tmp_path / "store"), tasks, Machine())
    assert not (tmp_path / "store" / "spec.toml").exists()


def test_a_model_without_shapes_is_told(tmp_path):
    task = task_in(tmp_path, CODE.replace("Net(hidden)", "nn.LazyLinear(2)"))
    with pytest.raises(ExperimentError, match=r"the state of its model failed with ValueError: .*uninitialized"):
        _ = task.base_id


def test_metrics_are_tried_before_anything_is_done(tmp_path):
    with pytest.raises(ExperimentError, match=r"mae ↓ must return a tensor, .*not list"):
        task_in(tmp_path, CODE.replace(".abs().mean(1)", ".abs().mean(1).tolist()")).check()


def test_a_failure_in_a_worker_is_told_with_its_line(folder):
    code = CODE.replace(LOSS, "    CALLS.append(1)\n"
                        "    if len(CALLS) > 20: raise ValueError('too many')\n" + LOSS)  # fmt: skip
    written(folder, code + "\nCALLS = []\n")
    done = forwardtune("compare", "mine.toml", "--workers", "1", "--no-report", cwd=folder)
    assert done.returncode == 1
    told = done.stderr.replace("\n", " ")
    assert (
        "mine_to_tune-make VS2P lr 0.3 seed 0: the task mine_to_tune:make: loss failed with ValueError: too many"
        in told
    )
    assert "mine_to_tune.py, line 17: if len(CALLS) > 20: raise ValueError('too many'))" in told
    assert "Traceback" not in told


def test_options_are_keywords(tmp_path):
    assert task_in(tmp_path, options={"hidden": 7}).own.model.body[0].out_features == 7
    with pytest.raises(ExperimentError, match=r"got an unexpected keyword argument 'hiden'; .* takes hidden, noisy"):
        task_in(tmp_path, options={"hiden": 7})


def test_a_module_that_is_nowhere(tmp_path):
    written(tmp_path)
    with pytest.raises(ExperimentError, match=r"there is no file .*nobody\.py, and no module 'nobody' is installed"):
        task_in(tmp_path, task="nobody:make")
    (tmp_path / "json.py").write_text(CODE)
    with pytest.raises(ExperimentError, match=r"there is another module 'json' .*; give .*json\.py another name"):
        task_in(tmp_path, task="json:make")


def test_what_is_installed_is_called_only_if_it_is_declared(tmp_path):
    for task in ("os:system", "subprocess:run", "builtins:exec", "forwardtune.tasks:OwnTask"):
        with pytest.raises(ExperimentError, match="is not declared to return an OwnTask"):
            task_in(tmp_path, task=task, options={"command": f"touch {tmp_path / 'owned'}"})
    assert not (tmp_path / "owned").exists()


def test_a_module_that_is_installed(tmp_path, monkeypatch):
    package = tmp_path / "site" / "package_of_mine"
    package.mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path / "site")
    (package / "__init__.py").touch()
    (package / "net.py").write_text(HELPER)
    (package / "tasks.py").write_text(CODE.replace("from helper_of_mine", "from .net"))
    task = task_in(tmp_path, task="package_of_mine.tasks:make")
    assert {file.name for file in task._code.files} == {"tasks.py", "net.py"}
    assert task.examples == 70
    (tmp_path / "site" / "installed_of_mine.py").write_text(CODE.replace("helper_of_mine", "package_of_mine.net"))
    (tmp_path / "site" / "torch.py").write_text("raise RuntimeError('a neighbour')")
    task = task_in(tmp_path, task="installed_of_mine:make")
    assert {file.name for file in task._code.files} == {"installed_of_mine.py"}


def test_examples_that_change_are_refused(tmp_path):
    code = CODE.replace("train, test, loss", "Rolled(train), test, loss") + (
        "\nclass Rolled(list):\n    def __getitem__(self, i): return torch.randn(3), super().__getitem__(i)[1]\n"
    )
    with pytest.raises(ExperimentError, match=r"train\[0\] is another each time; an example must stay the same"):
        _ = task_in(tmp_path, code).base_id


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ('network = "cnn"', "the workload 'mine_to_tune-make': network does not apply to mine_to_tune:make; leave it"),
        ('data = "digits"', "data does not apply to mine_to_tune:make; leave it out"),
        ("fit = 32", "fit does not apply"),
        ('compute = "bfloat16"', "compute does not apply"),
        ('objective = "accuracy"', "objective does not apply"),
        ("options = {a = nan}", "options must be texts, finite numbers"),
        ("options = {a = 1979-05-27}", "options must be texts, finite numbers"),
        ("options = 3", "options must be a table, not 3"),
        ("hidden = 3", "the key 'hidden' is not known"),
    ],
)
def test_keys_that_do_not_apply(change, complaint):
    with pytest.raises(ExperimentError, match=complaint):
        specs.parse(SPEC.replace("[[methods]]", f"{change}\n\n[[methods]]", 1), "test", Path())


@pytest.mark.parametrize("task", ["mine", "mine:", ":make", "a/b:make", "..a:make", "a:b.c"])
def test_names_of_tasks(task):
    with pytest.raises(ExperimentError, match='task must be "MODULE:FUNCTION"'):
        specs.parse(SPEC.replace("mine_to_tune:make", task).replace("task =", 'name = "a"\ntask ='), "test", Path())
    with pytest.raises(ExperimentError, match="has no 'data'; give it, or a 'task' of your own"):
        specs.parse(SPEC.replace('task = "mine_to_tune:make"', ""), "test", Path())


# What a task may be


def test_without_metrics_the_loss_is_the_score(tmp_path):
    code = CODE.replace("loss, metrics)", "loss)")
    task = task_in(tmp_path, code)
    assert task.metrics == ("loss",)
    scores = task.evaluate(task.make_base(tmp_path / "base.safetensors"))
    assert scores.metrics == {"loss": scores.test_loss}


def test_lines_of_examples_own_need_a_loss_per_example(tmp_path):
    task = task_in(tmp_path)
    model, batch = task._copy(), task.batch(torch.arange(6))
    torch.manual_seed(0)
    each = task.losses(model, batch)
    torch.manual_seed(0)
    assert each.shape == (6,)
    assert task.loss(model, batch) == each.mean()
    scalar = task_in(tmp_path, CODE.replace(".square().mean(1)", ".square().mean()"))
    with pytest.raises(
        ExperimentError, match=r"lines of examples' own need a loss that returns one number per example"
    ):
        scalar.losses(model, scalar.batch(torch.arange(6)))
    assert scalar.loss(model, batch).shape == ()


def test_own_lines_in_a_comparison(tmp_path):
    text = SPEC.replace("batch = 8", 'batch = 8\ndistribution = "rademacher"').replace("[0, 1]", "[0]")
    methods = '[[methods]]\nmethod = "VS2P"\nlr = [0.3]\ndirections = "per-example"\n'
    plain = HELPER.replace("nn.BatchNorm1d(hidden), nn.Dropout(0.2)", "nn.Identity(), nn.Tanh()")
    written(tmp_path, spec=text.partition("[[methods]]")[0] + methods)
    (tmp_path / "helper_of_mine.py").write_text(plain)
    (run,) = plan(specs.load(tmp_path / "mine.toml"))
    result = made(run, tmp_path, Store(tmp_path / "store"))
    assert result.status == "finished"
    assert result.curve.column("train_loss")[-1] < result.curve.column("train_loss")[0]


def test_any_examples_and_tied_and_frozen_weights(tmp_path):
    """Dicts of texts and numbers, a collate, weights that are one and the same, 0-1 losses."""
    code = """
import torch
from torch import nn
from forwardtune.tasks import OwnTask


def make() -> "OwnTask":
    model = nn.Sequential(nn.Embedding(26, 5), nn.Linear(5, 26, bias=False))
    model[1].weight = model[0].weight
    model.register_parameter("frozen", nn.Parameter(torch.ones(2), requires_grad=False))
    words = [{"word": 3 * chr(97 + i), "next": (i + 1) % 26} for i in range(26)]

    def collate(words):
        return torch.tensor([ord(w["word"][0]) - 97 for w in words]), torch.tensor([w["next"] for w in words])

    def wrong(model, batch):
        return model(batch[0]).argmax(1) != batch[1]

    return OwnTask(model, words, words, wrong, {"accuracy": ("highest", lambda m, b: ~wrong(m, b))}, collate)
"""
    written(tmp_path, code, SPEC.replace("train_examples = 20", ""))
    run = plan(specs.load(tmp_path / "mine.toml"))[0]
    result = made(run, tmp_path, Store(tmp_path / "store"))
    assert (result.weights, result.metrics) == (130, ("accuracy",))
    assert result.final.metrics["accuracy"] == pytest.approx(1 - result.final.train_loss)
    assert result.told_score.endswith("%")


def test_a_loss_may_have_gradients_of_its_own(tmp_path):
    """As of a differential equation: in steps and in evaluations."""
    slopes = """    with torch.enable_grad():
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x)
    return (slope.detach() - y.sum(1, keepdim=True)).square().mean(1)"""
    task = task_in(tmp_path, CODE.replace(LOSS, slopes))
    result = execute(plan(specs.load(tmp_path / "mine.toml"))[0], Store(tmp_path / "store"), task).result
    assert result.status == "finished"
    assert result.final.train_loss != result.curve.column("train_loss")[0]


def test_a_loss_below_zero_does_not_diverge(tmp_path):
    written(tmp_path, CODE.replace(LOSS, LOSS + " - 100"))
    run = plan(specs.load(tmp_path / "mine.toml"))[0]
    result = made(run, tmp_path, Store(tmp_path / "store"))
    assert result.status == "finished"
    assert result.final.train_loss < -90


def test_names_of_metrics_tell_which_way_is_better():
    mae, r2 = own_name("mae", "lowest"), own_name("R2", "highest")
    assert is_better(mae, 1.0, 2.0)
    assert is_better(r2, 2.0, 1.0)
    assert [shown(name, 0.5) + unit(name) for name in (mae, r2, "accuracy")] == ["0.5", "0.5", "50.0%"]
    assert titled("accuracy", mae, r2) == "accuracy (%) or mae ↓ or R2 ↑"
    assert own_name("accuracy", "lowest") == "accuracy ↓"


# The documentation


def test_the_example_of_the_documentation(tmp_path):
    text = DOCUMENT.read_text("utf-8").partition("## A task of your own")[2].partition("\n## ")[0]
    blocks = {kind: text.partition(f"```{kind}\n")[2].partition("```")[0] for kind in ("toml", "python")}
    (tmp_path / "waves.toml").write_text(blocks["toml"])
    (tmp_path / "waves.py").write_text(blocks["python"])
    done = forwardtune("compare", "waves.toml", "--json", "--no-report", "--workers", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    results = [event["result"] for event in map(json.loads, done.stdout.splitlines()) if event["event"] == "done"]
    assert len(results) == 4
    assert {tuple(result["metrics"]) for result in results} == {("mae ↓",)}
    assert all(result["final"]["mae ↓"] < 0.6 for result in results)
