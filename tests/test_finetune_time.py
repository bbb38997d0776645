"""How long `forwardtune finetune` takes: what is measured, planned and told."""

import io
import json
import math
import time
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from forwardtune.cli.main import app
from forwardtune.cli.progress import Live
from forwardtune.cli.remaining import Remaining, clock_time
from forwardtune.cli.tuning import Tuning, outcome, told_estimate
from forwardtune.errors import ExperimentError
from forwardtune.experiments import cores, runner
from forwardtune.experiments.events import Estimated, Evaluated, Planned, Progressed, Started
from forwardtune.experiments.plan import Run
from forwardtune.experiments.result import Curve, Evaluation
from forwardtune.experiments.spec import Method
from forwardtune.experiments.store import Store
from forwardtune.finetuning import pace as paces
from forwardtune.finetuning.budget import Budget, BudgetFile, fitted
from forwardtune.finetuning.kept import kept
from forwardtune.finetuning.pace import Pace, measure, seconds_per_move
from forwardtune.noise import Mover
from forwardtune.tasks.task import Scores
from tests.helpers import tiny
from tests.helpers.texts import models_and_tables, task_of, write_jsonl

SETTINGS = {"directions": 1, "distribution": "rademacher"}


@pytest.fixture
def tables(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny.causal(tmp_path / "model")
    rows = tiny.reviews(60)
    write_jsonl(tmp_path / "train.jsonl", rows[:40])
    write_jsonl(tmp_path / "test.jsonl", rows[40:])
    return tmp_path


COMMAND = [
    "finetune",
    "--model",
    "model",
    "--train",
    "train.jsonl",
    "--test",
    "test.jsonl",
    "--word",
    "bad",
    "--word",
    "good",
    "--threads",
    "1",
    "--evaluations",
    "3",
]


def run(*more):
    done = CliRunner().invoke(app, [*COMMAND, *more])
    if done.exception:
        raise done.exception
    return done.stdout


def run_of(task, lr="auto"):
    return Run(task.workload, Method("VS2P", "VS2P", (lr,), SETTINGS), lr, 0, "none")


# Cores


def write(file, text):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_the_quota_is_the_least_of_the_groups_around_us(tmp_path):
    member = write(tmp_path / "cgroup", "0::/a/b\n")
    groups = tmp_path / "groups"
    assert cores.quota(groups, member) == math.inf
    write(groups / "cpu.max", "max 100000\n")
    write(groups / "a" / "b" / "cpu.max", "350000 100000\n")
    assert cores.quota(groups, member) == 3.5
    write(groups / "a" / "cpu.max", "150000 100000\n")
    assert cores.quota(groups, member) == 1.5
    write(groups / "c" / "cpu.max", "50000 100000\n")  # not ours
    assert cores.quota(groups, member) == 1.5


def test_the_quota_of_version_1(tmp_path):
    member = write(tmp_path / "cgroup", "7:memory:/x\n3:cpu,cpuacct:/x/y\n1:name=systemd:/\n")
    top = tmp_path / "groups" / "cpu,cpuacct"
    write(top / "cpu.cfs_quota_us", "-1\n")
    write(top / "cpu.cfs_period_us", "100000\n")
    assert cores.quota(tmp_path / "groups", member) == math.inf
    write(top / "x" / "y" / "cpu.cfs_quota_us", "250000\n")
    write(top / "x" / "y" / "cpu.cfs_period_us", "100000\n")
    assert cores.quota(tmp_path / "groups", member) == 2.5


def test_cores_that_are_free(tmp_path, monkeypatch):
    load = tmp_path / "loadavg"
    load.write_text("6.13 4.46 2.71 3/125 15594\n")
    assert cores.busy(load) == 2  # the load of the last minute is over
    load.write_text("0.40 4.46 2.71 9/125 15594\n")
    assert cores.busy(load) == 0.4  # nine run for a moment
    monkeypatch.setattr(cores.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda pid: set(range(4)), raising=False)
    for quota, busy, allowed, free in (
        (math.inf, 0.2, 4, 4),
        (2.9, 0.2, 2, 2),
        (0.5, 0, 1, 1),
        (math.inf, 5.8, 4, 2),
        (3, 99, 3, 1),
    ):
        monkeypatch.setattr(cores, "quota", lambda quota=quota: quota)
        monkeypatch.setattr(cores, "busy", lambda busy=busy: busy)
        assert (cores.allowed(), cores.free()) == (allowed, free)


# What is measured


@pytest.fixture
def task(tmp_path):
    yield task_of(models_and_tables(tmp_path), "causal", dtype="float32", queries=100)
    torch.set_num_threads(1)


def test_measuring_touches_neither_weights_nor_generators(task, tmp_path):
    model = task.make_base(tmp_path / "base.safetensors")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    pace, evaluation = measure(run_of(task), task, model, [1])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert evaluation.scores == task.evaluate(model)
    assert pace.threads == torch.get_num_threads() == 1
    assert pace.tried == {}


@pytest.mark.parametrize(
    ("seconds", "best"), [({1: 0.01, 2: 0.02}, 1), ({1: 0.02, 2: 0.01}, 2), ({1: 0.05, 2: 0.05}, 1)]
)
def test_the_number_of_threads_is_the_faster_one(task, tmp_path, monkeypatch, seconds, best):
    model = task.make_base(tmp_path / "base.safetensors")

    def slow(self, *others):
        time.sleep(seconds[torch.get_num_threads()])
        return torch.tensor(1.0)

    monkeypatch.setattr(type(task), "loss", slow)
    monkeypatch.setattr(paces, "MOST", 5)
    pace, _ = measure(run_of(task, lr=1.0), task, model, [1, 2])
    assert pace.threads == torch.get_num_threads() == best
    assert pace.tried.keys() == {1, 2}
    assert seconds[best] < pace.query < 5 * seconds[best]


def test_a_move_is_timed_on_all_weights_in_portions(task, tmp_path, monkeypatch):
    model = task.make_base(tmp_path / "base.safetensors")
    optimizer = run_of(task).method.optimizer(model.named_parameters(), "auto")
    moved, move = [], Mover.move

    def counted(self, step, terms):
        moved.append((step, self.dimension, sum(slot.tensor.nbytes for slot in self.slots)))
        move(self, step, terms)

    monkeypatch.setattr(Mover, "move", counted)
    monkeypatch.setattr(paces, "PORTION", 5000)
    assert 0 < seconds_per_move(optimizer, 8) < 1
    timed = [(weights, size) for step, weights, size in moved if step == 1]
    assert sum(weights for weights, _ in timed) == optimizer.field.dimension == 6224
    assert len(timed) > 3
    assert all(size <= 5000 for _, size in timed)


# What is planned

PACE = Pace(1, query=0.5, evaluation=6.0, tried={})


def test_a_budget_that_fits(task):
    chosen = run_of(task)
    assert fitted(chosen, PACE, 10, 60, 4) == Budget((540 - 24) * 2, 4, PACE, 10)
    assert fitted(chosen, PACE, 10, 60, None).evaluations == 10
    few = fitted(chosen, PACE, 2, 20, None)  # 100 s, of which evaluations take a quarter
    assert (few.evaluations, few.queries) == (4, 152)
    assert few.estimate.seconds == 100
    with pytest.raises(
        ExperimentError, match=r"1 minutes are too few: the run needs 60 queries of 0\.5 s and 5 evaluat"
    ):
        fitted(chosen, PACE, 1, 20, 5)
    with pytest.raises(ExperimentError, match=r"Give --minutes 1\.4 or more"):
        fitted(chosen, PACE, 1, 20, 5)
    assert fitted(chosen, PACE, 1.4, 20, 5).queries == 68


def test_a_budget_is_found_again_by_all_but_its_length(task, tmp_path):
    chosen = run_of(task)
    longer = replace(chosen, workload=replace(chosen.workload, queries=777, evaluations=7))
    budget = Budget(300, 3, replace(PACE, tried={1: 0.5, 2: 0.75}), 5.0)
    BudgetFile(tmp_path / "budgets", chosen, 5.0, None).write(budget)
    assert BudgetFile(tmp_path / "budgets", longer, 5.0, None).read() == budget
    assert budget.of(chosen).id == budget.of(longer).id
    assert budget.of(chosen).workload.queries == 300
    assert BudgetFile(tmp_path / "budgets", chosen, 6.0, None).read() is None
    assert BudgetFile(tmp_path / "budgets", replace(chosen, seed=1), 5.0, None).read() is None
    given = BudgetFile(tmp_path / "budgets", chosen, None, None)
    assert given.path.stem == chosen.id
    assert given.path != BudgetFile(tmp_path / "budgets", longer, None, None).path
    given.path.write_text("{}")
    with pytest.raises(ExperimentError, match="is not a budget of forwardtune; move it away"):
        given.read()


@pytest.mark.parametrize("rate", [[], ["--lr", "20"]])
def test_a_run_of_some_minutes_resumes_as_it_was_planned(tables, monkeypatch, rate):
    step, made = runner._LineSearchUnderWay._step, []

    def interrupted(self, *others):
        made.append(1)
        if len(made) == 17:
            raise KeyboardInterrupt
        return step(self, *others)

    monkeypatch.setattr(runner._LineSearchUnderWay, "_step", interrupted)
    stopped = CliRunner().invoke(app, [*COMMAND, *rate, "--minutes", "0.1"])
    assert stopped.exit_code == 130, stopped.exception
    assert "planned for 0.1 minutes, of which the run takes about" in stopped.stdout
    (file,) = (tables / "tuned" / "run" / "budgets").iterdir()
    plan = file.read_text()
    queries = json.loads(plan)["queries"]
    assert 60 <= queries < 6 / json.loads(plan)["pace"]["query"]
    said = run(*rate, "--minutes", "0.1")
    assert f"resumes after 32 of {queries // 2 * 2 if rate else queries:,} queries" in said or not rate
    assert file.read_text() == plan
    (result,) = (tables / "tuned" / "run" / "runs").glob("*.json")
    outcome = json.loads(result.read_text())
    assert outcome["circumstances"]["sessions"] == 2
    assert queries - 5 < outcome["queries"] <= queries
    assert outcome["circumstances"]["seconds"] < 60
    # Its length is all that was planned.
    run(*rate, "--queries", str(queries), "--out", "given")
    assert json.loads(next((tables / "given" / "run" / "runs").glob("*.json")).read_text())["final"] == outcome["final"]
    assert (tables / "given" / "model.safetensors").read_bytes() == (
        tables / "tuned" / "model.safetensors"
    ).read_bytes()
    # Another length is another run.
    with pytest.raises(ExperimentError, match="tuned holds the result of another run"):
        run(*rate, "--minutes", "0.2")


def test_a_run_is_evaluated_before_it_begins_but_once(tables, monkeypatch):
    from forwardtune.tasks.texts.task import TextTask

    made, evaluate = [], TextTask.evaluate
    monkeypatch.setattr(TextTask, "evaluate", lambda *a: made.append(1) or evaluate(*a))
    run("--steps", "30")
    assert len(made) == 1 + 4  # before how answers are read is fitted, and those of the run
    (result,) = (tables / "tuned" / "run" / "runs").glob("*.json")
    table = json.loads(result.read_text())
    assert len(table["curve"]["queries"]) == 4
    assert 0 < table["circumstances"]["seconds"] < 60


@pytest.mark.parametrize("other", [["--steps", "100"], ["--queries", "100"]])
def test_one_length_is_enough(tables, other):
    with pytest.raises(ExperimentError, match="each say how long the run is; give one of them"):
        run("--minutes", "1", *other)
    with pytest.raises(ExperimentError, match="--minutes must be above zero and finite, not -1"):
        run("--minutes", "-1")
    assert not (tables / "tuned").exists()


def test_threads_of_a_resumed_run(tables, monkeypatch):
    """Those of its first session, unless others are given or there are not that many cores any more."""
    step, seen = runner._LineSearchUnderWay._step, []

    def noted(self, *others):
        seen.append(torch.get_num_threads())
        if len(seen) % 6 == 0:
            raise KeyboardInterrupt
        return step(self, *others)

    monkeypatch.setattr(runner._LineSearchUnderWay, "_step", noted)
    monkeypatch.setattr(cores, "free", lambda: 1)
    monkeypatch.setattr(cores, "allowed", lambda: 8)
    without = [word for word in COMMAND if word not in ("--threads", "1")]
    try:
        for more, expected in (([], 1), (["--threads", "2"], 2), ([], 1)):
            done = CliRunner().invoke(app, [*without, *more])
            assert done.exit_code == 130, done.exception
            assert seen[-1] == expected
        plan = next((tables / "tuned" / "run" / "budgets").iterdir())
        plan.write_text(plan.read_text().replace('"threads": 1', '"threads": 4'))
        monkeypatch.setattr(cores, "allowed", lambda: 2)
        assert CliRunner().invoke(app, without).exit_code == 130
        assert seen[-1] == 2
    finally:
        torch.set_num_threads(1)


# What is told


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize("estimate", [None, Estimated(2000, 10, 0.2, 30.0, 1, {})])
def test_the_time_that_is_left_does_not_swing(estimate):
    """Queries of 0.2 s, the first ten five times as long, and evaluations of 30 s in between."""
    clock = Clock()
    left = Remaining(2000, 10, estimate, clock)
    truth, told = 10 * 1.0 + 1990 * 0.2 + 10 * 30.0, []
    for query in range(1, 2001):
        clock.now += 1.0 if query <= 10 else 0.2
        left.progressed(1)
        if query % 200 == 0:
            clock.now += 30.0
            left.evaluated(30.0)
        told.append((clock.now + left.seconds) / truth)
    # Evaluations are not known before the first one is made, unless they were measured.
    steady = told[200:] if estimate is None else told[20:]
    assert max(steady) < 1.35
    assert min(steady) > 0.95
    assert told[-1] == pytest.approx(1)
    assert all(abs(b - a) < 0.05 for a, b in pairwise(steady))


def test_the_first_evaluation_may_come_before_the_run():
    clock = Clock()
    left = Remaining(100, 3, None, clock)
    assert left.seconds is None
    left.evaluated(50.0)  # made before
    clock.now = 10.0
    left.progressed(10)
    assert left.seconds == pytest.approx(90 + 2 * 50)
    clock.now = 25.0
    assert left.seconds == pytest.approx(90 + 2 * 50 - 15)


def test_times():
    assert [clock_time(t) for t in (None, 0.4, 59.6, 3725)] == ["-:--:--", "0:00:00", "0:01:00", "1:02:05"]
    told = told_estimate(Estimated(1000, 10, 0.7, 3, 1, {1: 0.69, 2: 0.93}))
    assert told == (
        "about 12 minutes: 1,000 queries of 0.7 s, 10 evaluations of 3 s, with 1 thread (a query takes 0.93 s with 2)"
    )
    told = told_estimate(Estimated(60, 1, 0.0123, 0.04, 2, {}, 2.5))
    assert told == (
        "planned for 2.5 minutes, of which the run takes about 1 seconds: 60 queries of 12 ms, 1 evaluation of 40 ms, "
        "with 2 threads"
    )


def rendered(listener, width):
    """What the bars look like in a terminal of that width."""
    told = io.StringIO()
    listener.console.width = width
    Console(file=told, width=width, force_terminal=True, color_system=None).print(listener.bars.get_renderable())
    return [line.rstrip() for line in told.getvalue().splitlines()]


@pytest.mark.parametrize("width", [80, 100, 200])
def test_bars_are_not_cut(width):
    listener = Live()
    listener.console = Console(file=io.StringIO(), width=width)
    title = "a-workload-of-a-long-name VS2P lr 0.0003 seed 12"
    listener(Planned("spec", 120, 0, 12_000_000))
    listener(Started("a", title, 0, 100_000, "", 10))
    listener.begun -= 30
    listener(Progressed("a", 36_123, 0.693147))
    total, one = rendered(listener, width)
    assert "36,123/12,000,000 queries, 1,2" in total
    assert total.startswith("0 of 120 runs ")
    assert "36,123/100,000 queries, loss 0.693 0:00:00, " in " ".join(one.split())
    assert "\N{BOX DRAWINGS HEAVY HORIZONTAL}" in one
    assert one.endswith(" left")
    assert total.endswith(" left")
    assert max(len(total), len(one)) <= width
    assert one.startswith(title if width == 200 else title[:10])
    assert "\N{HORIZONTAL ELLIPSIS}" not in one[40:]
    listener.__exit__(None, None, None)


def test_the_bar_of_a_single_run_is_not_cut(capsys):
    listener = Tuning()
    listener(Estimated(2000, 10, 0.7, 3.0, 1, {}))
    listener(Started("a", "sst2 VS2P lr auto seed 0", 0, 2000, "about", 10))
    listener(Progressed("a", 36, 0.693147))
    (line,) = rendered(listener, 80)
    assert "36/2,000 queries, loss 0.693 0:00:00, " in line
    assert line.endswith(" left")
    assert len(line) <= 80


def test_without_a_terminal_every_evaluation_is_a_line(tables):
    lines = run("--steps", "60").splitlines()
    (file,) = (tables / "tuned" / "run" / "runs").glob("*.json")
    curve = json.loads(file.read_text())["curve"]
    about = [i for i, line in enumerate(lines) if line.startswith("about ")]
    assert lines[0].startswith("tunes 6,224")
    assert len(about) == 1
    before, *others = lines[about[0] + 1 : about[0] + 5]
    assert before == (
        f"before tuning: training loss {curve['train_loss'][0]:.4g}, test accuracy {100 * curve['accuracy'][0]:.1f}, "
        f"f1 {100 * curve['f1'][0]:.1f}"
    )
    for i, line in enumerate(others, 1):
        assert line.startswith(
            f"{curve['queries'][i]}/120 queries: training loss {curve['train_loss'][i]:.4g}, test accuracy "
            f"{100 * curve['accuracy'][i]:.1f}, f1 {100 * curve['f1'][i]:.1f}, 0:0"
        )
        assert line.endswith(" left")
    assert others[-1].endswith("0:00:00 left")


def test_what_a_run_came_to(tables):
    run("--steps", "30")
    (file,) = (tables / "tuned" / "run" / "runs").glob("*.json")
    made = Store(tables / "tuned" / "run").result(file.stem)

    def told(losses, accuracies):
        scores = [Scores(loss, loss, {"accuracy": a, "f1": a}) for loss, a in zip(losses, accuracies, strict=True)]
        result = replace(made, curve=Curve((0, 60), tuple(scores)), final=scores[-1], plateaus=0)
        return [(line, style) for line, style in outcome(result, kept(result, "last"), 2)][1:]

    assert told([0.7, 0.6], [0.5, 0.5]) == []
    flat, advice = told([0.7, 0.7], [0.5, 0.6])
    assert flat == ("the training loss has not fallen: 0.7 to 0.7", "yellow")
    assert all(flag in advice[0] for flag in ("--steps", "--batch", "--lr", "--scale", "--template", "--setup"))
    assert told([0.7, 0.696], [0.5, 0.6])[0][0] == "the training loss has hardly fallen: 0.7 to 0.696"
    assert told([0.7, math.nan], [0.5, 0.6])[0][0] == "the training loss has not fallen: 0.7 to nan"
    worse, advice = told([0.7, 0.5], [0.6, 0.5])
    assert worse == ("the test accuracy ended below where it began: 60.0 to 50.0", "red")
    assert advice[0].startswith("try more steps")
    assert [style for _, style in told([0.7, 0.9], [0.6, 0.5])] == ["red", "yellow", "yellow"]


def test_events_of_an_evaluation(task, tmp_path):
    """The seconds that it took are told, and are not part of its JSON."""
    event = Evaluated("a", Evaluation(3, 6, 12.5, Scores(0.5, 0.5, {"accuracy": 1.0})), 2.5)
    assert event.to_json() == {
        "event": "look", "run": "a", "step": 3, "queries": 6, "seconds": 12.5, "train_loss": 0.5, "test_loss": 0.5,
        "accuracy": 1.0,
    }  # fmt: skip
