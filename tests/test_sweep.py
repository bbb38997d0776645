"""Sweeps: the budget to the last query, the winner as a run of its own, kills, rates that diverge, the command."""

import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import forwardtune as ft
from forwardtune import ledger
from forwardtune.cli import main
from forwardtune.cli.experiments import report
from forwardtune.cli.progress import Live
from forwardtune.cli.sweep import verdict
from forwardtune.errors import ExperimentError
from forwardtune.experiments.events import Evaluated, Judged, Paused, Progressed, Started
from forwardtune.experiments.runner import execute, execute_until
from forwardtune.experiments.scoring import score
from forwardtune.experiments.store import Store
from forwardtune.experiments.sweep import LEAST, plan_sweep, rungs, spaced, sweep
from forwardtune.experiments.under_way import batch_indices
from forwardtune.tasks import Sources, Tasks
from tests.helpers.comparisons import TEXT, finished, outcomes, parse
from tests.test_cli_experiments import forwardtune
from tests.test_runner import StopError, Tricky, stop_at

GRID = TEXT.replace("[1, 4]", "[4, 1, 64, 16]")


def planned(text=GRID, queries=400, label="VS2P", **options):
    spec = parse(text)
    return plan_sweep(spec, spec.workloads[0], spec.method(label), queries=queries, **{"eta": 2, **options})


def swept(folder, plan=None, tell=lambda event: None):
    return sweep(plan or planned(), Store(folder), Tasks(Sources(), "cpu"), tell)


def test_rungs_by_hand():
    # 10 * 45 + 3 * 90 + 280 = 1,000, and 4 * 12 + 2 * 12 + 28 = 100.
    assert rungs(10, 1000, 3) == ((10, 45), (3, 135), (1, 415))
    assert rungs(4, 100, 2) == ((4, 12), (2, 24), (1, 52))
    assert rungs(2, 40, 3) == ((2, 10), (1, 30))


@given(rates=st.integers(2, 60), steps=st.integers(1, 20_000), eta=st.integers(2, 7))
def test_rungs_use_the_budget_exactly(rates, steps, eta):
    try:
        ladder = rungs(rates, steps, eta)
    except ExperimentError:
        # Ten steps of every rate, and the further ones of those that are left, are more than the budget.
        counts, least, length = rates, rates * LEAST, LEAST
        while counts > 1:
            counts = max(1, counts // eta)
            least += counts * length * (eta - 1)
            length *= eta
        assert steps < least
        return
    spent, before = 0, 0
    for count, length in ladder:
        assert length > before
        spent += count * (length - before)
        before = length
    assert spent == steps
    assert (ladder[0].rates, ladder[-1].rates) == (rates, 1)


def test_every_query_is_counted(tmp_path, monkeypatch):
    tasks, plan = Tasks(Sources(), "cpu"), planned()
    task = tasks[plan.runs[0].workload]
    calls, real = [], task.loss
    monkeypatch.setattr(task, "loss", lambda *a: calls.append(1) or real(*a))
    outcome = sweep(plan, Store(tmp_path / "store"), tasks)
    assert plan.rungs == ((4, 25), (2, 50), (1, 100))
    assert len(calls) == outcome.queries == plan.budget == 400
    assert sorted(rate.queries for rate in outcome.rates) == [50, 50, 100, 200]
    assert [rate.queries for rate in outcome.rates if rate.status == "finished"] == [200]
    again = sweep(plan, Store(tmp_path / "store"), tasks)
    assert again == outcome
    assert len(calls) == 400
    (file,) = (tmp_path / "store" / "sweeps").iterdir()
    assert file.stem == plan.id
    assert json.loads(file.read_text()) == {"schema": 1, "id": plan.id, **outcome.to_json()}


@pytest.mark.parametrize(
    ("method", "steps", "budget"),
    [
        ('"STP"', 22, 198),  # 22 steps of the one rate, 44 of the other, three queries each
        ('"MeZO"', 33, 200),
        ('"S2P"\nstep_size = "dynamic"\nL = 10.0', 16, 200),
    ],
)
def test_every_method_keeps_to_the_budget(tmp_path, method, steps, budget):
    text = TEXT.replace("[1e-3]", "[1e-3, 2e-3]").replace('"STP"', f'{method}\nlabel = "this"')
    plan = planned(text, queries=200, label="this")
    outcome = swept(tmp_path / "store", plan)
    assert plan.rungs[0] == (2, steps)
    assert outcome.queries == plan.budget == budget


def plain_losses(run, task, base, steps):
    """The loss of each step of a rate, by a loop as a user would write it."""
    model = task.start(base)
    optimizer = ft.VS2P(model.named_parameters(), lr=run.lr, seed=run.seed, distribution="normal")
    losses = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = run.lr * (1 + math.cos(math.pi * step / 100)) / 2
        x, y = task.batch(batch_indices(1400, 8, run.seed, step))
        losses.append(float(optimizer.step(lambda x=x, y=y: torch.nn.functional.cross_entropy(model(x), y))))
    return losses


def test_rates_are_judged_by_the_losses_of_their_steps(tmp_path):
    plan, store = planned(seed=3), Store(tmp_path / "store")
    outcome = swept(store.folder, plan)
    task = Tasks(Sources(), "cpu")[plan.runs[0].workload]
    first = [plain_losses(run, task, store.base(task.base_id), 50) for run in plan.runs]
    at_25 = [fmean(losses[12:25]) for losses in first]
    at_50 = [fmean(losses[25:50]) for losses in first]
    left = sorted(range(4), key=at_25.__getitem__)[:2]
    best = min(left, key=at_50.__getitem__)
    assert [rate.lr for rate in outcome.rates] == [1, 4, 16, 64]
    expected = [(at_25[i], at_50[i]) if i in left else (at_25[i],) for i in range(4)]
    for rate, losses in zip(outcome.rates, expected, strict=True):
        assert rate.losses == pytest.approx(losses, rel=1e-6)
    assert outcome.winner.run.lr == plan.runs[best].lr


def test_the_winner_is_a_run_of_its_rate_alone(tmp_path, monkeypatch):
    """With dropout and BatchNorm, which leave random numbers and statistics behind from rung to rung."""
    monkeypatch.setattr("forwardtune.tasks.images.networks.cnn", Tricky)
    plan, store, tasks = planned(), Store(tmp_path / "alone"), Tasks(Sources(), "cpu")
    winner = swept(tmp_path / "swept", plan).winner
    (run,) = (run for run in plan.runs if run.id == winner.id)
    result, tuned = execute(run, store, tasks[run.workload])
    assert result.circumstances.sessions == 1
    assert winner.circumstances.sessions == 3
    assert outcomes(tmp_path / "swept") == outcomes(tmp_path / "alone")
    recorded = tmp_path / "swept" / "runs" / f"{run.id}.ledger"
    assert not ledger.diff(recorded, store.ledger(run.id))
    replayed = ft.replay(tasks[run.workload].start(store.base(result.base.id)), recorded)
    for ours, theirs in zip(replayed.state_dict().values(), tuned.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A sweep that nothing disturbed."""
    folder = tmp_path_factory.mktemp("sweep") / "whole"
    swept(folder)
    return saved(folder)


def saved(folder):
    (file,) = (folder / "sweeps").iterdir()
    return json.loads(file.read_text()), outcomes(folder)


@pytest.mark.parametrize(
    "moment",
    [(Started, 2), (Evaluated, 3), (Progressed, 25), (Paused, 3), (Judged, 1), (Paused, 5), (Judged, 2), (Started, 7)],
)
def test_a_sweep_that_was_stopped_resumes(tmp_path, whole, moment, monkeypatch):
    monkeypatch.setattr("forwardtune.experiments.under_way.PAUSE", 0.0)
    with pytest.raises(StopError):
        swept(tmp_path / "stopped", tell=stop_at(*moment))
    assert not (tmp_path / "stopped" / "sweeps").exists()
    swept(tmp_path / "stopped")
    assert saved(tmp_path / "stopped") == whole


@pytest.mark.parametrize("query", [1, 50, 51, 200, 201, 400])
def test_killed_in_the_middle_of_a_step(tmp_path, whole, query):
    child = os.fork()
    if child == 0:  # pragma: no cover
        tasks, plan = Tasks(Sources(), "cpu"), planned()
        task = tasks[plan.runs[0].workload]
        calls, real = iter(range(1, 1000)), task.loss
        task.loss = lambda *a: os._exit(9) if next(calls) == query else real(*a)
        sweep(plan, Store(tmp_path / "killed"), tasks)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    swept(tmp_path / "killed")
    assert saved(tmp_path / "killed") == whole


WILD = TEXT.replace("[1, 4]", "[1, 3e4, 1e5, 4]")


def test_rates_that_diverge_are_dropped(tmp_path):
    told = []
    outcome = swept(tmp_path / "store", planned(WILD), told.append)
    assert [rate.status == "diverged" for rate in outcome.rates] == [False, False, True, True]
    assert [rate.losses for rate in outcome.rates[2:]] == [(), ()]
    assert sorted(rate.queries for rate in outcome.rates) == [50, 50, 100, 200]  # given up at 25 steps, as evaluated
    judged = [event for event in told if isinstance(event, Judged)]
    assert [set(event.losses) for event in judged] == [{1, 4}, {1, 4}]
    assert [len(event.kept) for event in judged] == [2, 1]
    assert outcome.winner.status == "finished"
    gone = replace(outcome, winner=replace(outcome.winner, status="diverged", reason="its loss is high"))
    assert "won, and diverged (its loss is high); sweep lower ones. The sweep used 400 queries" in verdict(gone)


def test_one_that_diverges_where_it_was_to_pause_is_noticed_after_a_stop(tmp_path, monkeypatch):
    """It had made all its steps, and not the evaluation that tells."""
    monkeypatch.setattr("forwardtune.experiments.under_way.PAUSE", 0.0)
    plan = planned(WILD)
    swept(tmp_path / "whole", plan)

    def stop(event):
        if isinstance(event, Progressed) and event.run == plan.runs[2].id and event.queries == 50:
            raise StopError

    with pytest.raises(StopError):
        swept(tmp_path / "stopped", plan, stop)
    swept(tmp_path / "stopped", plan)
    assert saved(tmp_path / "stopped") == saved(tmp_path / "whole")


def test_a_rate_that_diverges_later_was_judged_before(tmp_path):
    """Also when the sweep is repeated, and its result is there from the start."""
    text = TEXT.replace("[1, 4]", "[3e4, 5e4, 1e5, 2e5]").replace("evaluations = 4", "evaluations = 2")
    first, again = (swept(tmp_path / "store", planned(text)) for _ in range(2))
    assert [len(rate.losses) for rate in first.rates] == [1, 1, 1, 1]
    by_loss = sorted(first.rates, key=lambda rate: rate.losses)
    assert [rate.status for rate in by_loss] == ["diverged", "diverged", "dropped", "dropped"]
    assert [rate.queries for rate in by_loss] == [100, 100, 50, 50]
    assert first.winner is None
    assert again == first
    assert "every rate that was left diverged; sweep lower ones. The sweep used 300 queries of 400." in verdict(first)


def test_a_run_pauses_once(tmp_path):
    plan, store, tasks = planned(), Store(tmp_path / "store"), Tasks(Sources(), "cpu")
    told, run = [], plan.runs[0]
    for step in (30, 20, 31):
        execute_until(step, run, store, tasks[run.workload], told.append)
    assert [event.queries for event in told if isinstance(event, Paused)] == [60, 62]
    assert ledger.read(store.ledger(run.id)).end == 31
    assert store.result(run.id) is None


def test_a_sweep_does_not_go_on_with_other_data(tmp_path, monkeypatch):
    def stop(event):
        if isinstance(event, Judged):
            raise StopError

    with pytest.raises(StopError):
        swept(tmp_path / "store", tell=stop)
    images = Sources().images("digits")
    other = replace(images, train_y=images.train_y.flip(0))
    monkeypatch.setattr(Sources, "images", lambda self, name: other)
    with pytest.raises(ExperimentError, match="was begun on other data or weights"):
        swept(tmp_path / "store")


def test_what_a_sweep_refuses():
    with pytest.raises(ExperimentError, match="79 steps are too few for 4 rates: at least 80 are needed, 10 of each"):
        planned(queries=158)
    with pytest.raises(ExperimentError, match="rates must be at least 2, not 1"):
        planned(label="STP")
    with pytest.raises(ExperimentError, match="eta must be at least 2, not 1"):
        planned(eta=1)
    with pytest.raises(ExperimentError, match="VS2P finds its rate while training; choose a method with a grid"):
        planned(TEXT.replace("lr = [1, 4]", 'lr = "auto"').replace("queries = 60", "queries = 120"))
    with pytest.raises(ExperimentError, match="104 queries are 52 steps of VS2P, too few for 60 evaluations"):
        planned(GRID.replace("evaluations = 4", "evaluations = 60").replace("queries = 60", "queries = 600"), 200)
    with pytest.raises(ExperimentError, match="not from 4 to 1"):
        spaced(4, 1, 10)
    with pytest.raises(ExperimentError, match="no 10 rates that differ"):
        spaced(1, 1.01, 10)
    with pytest.raises(ExperimentError, match="rates must be at least 2, not 1"):
        spaced(1, 2, 1)


def test_the_command(tmp_path, monkeypatch, capsys):
    spec = tmp_path / "mine.toml"
    spec.write_text(GRID.replace("queries = 60", "queries = 400"))
    arguments = ("sweep", spec, "--eta", 2, "--threads", 1)
    done = forwardtune(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    sentence, file, header, *rows = done.stdout.splitlines()
    assert sentence.startswith("digits-cnn VS2P seed 0: lr ")
    assert "The sweep used 400 queries of 400, 200 of them for this rate." in sentence
    assert file.removeprefix("outcome: ") == f"results/mine/sweeps/{planned().id}.json"
    assert header.split() == ["lr", "loss", "at", "50", "loss", "at", "100", "queries"]
    assert [row.split()[0] for row in rows] == ["1", "4", "16", "64"]
    assert "digits-cnn VS2P seed 0: 4 rates on 400 queries, of which the last one left gets 200" in done.stderr
    outcome = json.loads((tmp_path / file.removeprefix("outcome: ")).read_text())

    called(monkeypatch, *arguments, "--json", "--out", tmp_path / "other")
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["event"] for event in events if event["event"] not in ("progress", "look", "start", "pause")] == [
        "sweep", "base", "rung", "rung", "done", "outcome",
    ]  # fmt: skip
    assert [event["event"] for event in events].count("pause") == 6
    assert {key: events[0][key] for key in ("rates", "queries", "budget")} == {
        "rates": [4, 2, 1], "queries": [50, 100, 200], "budget": 400,
    }  # fmt: skip
    assert events[-1] == {"event": "outcome", **{k: v for k, v in outcome.items() if k not in ("schema", "id")}}

    monkeypatch.chdir(tmp_path)
    called(monkeypatch, *arguments, "--quiet")
    assert capsys.readouterr().out.splitlines() == [sentence, file]
    with pytest.raises(ExperimentError, match="results/mine has sweeps but no comparison to report"):
        report(Path("results/mine"))


def test_bars(tmp_path):
    """One for the run under way, gone when it pauses; none is left, also if all there was to do was done before."""
    for counts in (
        [2, 2, 2, 2, 1, 1, 2],
        [0, 0, 0],
    ):  # evaluations at 0, 25, 50, 75 and 100 steps; then none
        listener, titles, evaluations = Live(), [], []
        listener.console.width = 100

        def tell(event, listener=listener, titles=titles, evaluations=evaluations):
            listener(event)
            if isinstance(event, Started):
                (bar,) = listener.bars.tasks
                titles.append(bar.description)
                evaluations.append(event.evaluations)
            assert not (isinstance(event, Paused) and listener.bars.tasks)

        with listener:
            swept(tmp_path / "store", tell=tell)
        assert all(title.startswith("digits-cnn VS2P lr ") for title in titles)
        assert not listener.bars.live.is_started
        assert evaluations == counts


def called(monkeypatch, *arguments):
    """The command in this process, to its end without an error."""
    monkeypatch.setattr(sys, "argv", ["forwardtune", *map(str, arguments)])
    with pytest.raises(SystemExit, match=r"^0$"):
        main()


def test_a_range_of_rates_in_the_folder_of_a_comparison(tmp_path, monkeypatch, capsys):
    spec, store = finished(tmp_path / "out")
    scores = score(spec, store)
    file = tmp_path / "mine.toml"
    file.write_text(TEXT)
    ends = ("--rates", 1, 8, "--count", 4, "--queries", 200, "--method", "VS2P", "--seed", 7)
    called(monkeypatch, "sweep", file, "--out", store.folder, *ends, "--threads", 1, "--quiet")
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("digits-cnn VS2P seed 7: lr ")
    assert "lr 1 won" in said[0]
    assert said[0].endswith(
        "The sweep used 200 queries of 200, 104 of them for this rate. It is an end of the rates; a lower one might do "
        "better."
    )
    table = json.loads((tmp_path / said[1].removeprefix("outcome: ")).read_text())
    assert [rate["lr"] for rate in table["rates"]] == [1, 2, 4, 8]
    assert score(spec, store) == scores


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "name either a spec file or a preset"),
        (["--preset", "digits", "--count", "4"], "--count applies only with --rates"),
        (["--preset", "digits", "--method", "VSP"], "method 'VSP' is not known (did you mean 'VS2P'?)"),
        (["--preset", "digits", "--method", "VS2P auto"], "VS2P auto finds its rate while training"),
        (["--preset", "digits", "--method", "VS2P auto", "--rates", "1", "9"], "VS2P auto finds its rate"),
        (["--preset", "digits", "--rates", "0", "9"], "not from 0 to 9"),
        (["--preset", "digits", "--workload", "mnist"], "workload 'mnist' is not known"),
        (["--preset", "digits", "--queries", "50"], "25 steps are too few for 3 rates"),
    ],
)
def test_bad_input_is_one_paragraph(arguments, complaint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["forwardtune", "sweep", *arguments])
    with pytest.raises(SystemExit, match=r"^1$"):
        main()
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert complaint in said
    assert said.count("\n") == 1
    assert not (tmp_path / "results").exists()
