"""One run: what it does, how it is given up, how it goes on after a stop; and the store it goes to."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import forwardtune as ft
from forwardtune.errors import ExperimentError
from forwardtune.experiments.comparison import Machine, compare, unfinished
from forwardtune.experiments.events import Evaluated, Noted, Planned, Progressed, Started
from forwardtune.experiments.plan import plan
from forwardtune.experiments.result import Base, RunResult
from forwardtune.experiments.runner import execute
from forwardtune.experiments.scoring import score
from forwardtune.experiments.store import Store
from forwardtune.experiments.under_way import batch_indices, decay_factor
from forwardtune.files import translated, write_json
from forwardtune.tasks import Sources, Tasks, prepare
from tests.helpers.comparisons import TEXT, finished, make, outcomes, parse


def test_a_run_is_the_plain_loop(tmp_path):
    """The result equals that of a loop as a user would write it."""
    run, store = plan(parse())[1], Store(tmp_path / "store")
    task = prepare(run.workload, Sources(), "cpu")
    result, tuned = execute(run, store, task)
    model = task.start(store.base(result.base.id))
    optimizer = ft.VS2P(model.named_parameters(), lr=4.0, seed=0, distribution="normal")
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: (1 + math.cos(math.pi * (k / 30))) / 2)
    losses, steps = [], []
    for step in range(30):
        if step in (0, 8, 15, 22):
            losses.append(task.evaluate(model).train_loss)
        x, y = task.batch(batch_indices(1400, 8, 0, step))
        optimizer.step(lambda x=x, y=y: torch.nn.functional.cross_entropy(model(x), y))
        steps.append(optimizer.last_step)
        scheduler.step()
    final = task.evaluate(model)
    assert result.curve.column("train_loss") == [*losses, final.train_loss]
    assert result.curve.queries == (0, 16, 30, 44, 60)
    assert result.final == final
    assert result.trace.gamma == tuple(abs(step.gamma) for step in steps)
    assert result.trace.sigma == tuple(step.sigma for step in steps)
    assert result.trace.alpha == tuple(abs(step.t) for step in steps)
    assert result.trace.loss == tuple(step.loss for step in steps)
    replayed = ft.replay(task.start(store.base(result.base.id)), store.ledger(run.id))
    for other in (tuned, replayed):
        assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))


def test_batches_are_a_function_of_seed_and_step():
    epoch = torch.cat([batch_indices(20, 6, 3, step) for step in range(3)])
    assert len(set(epoch.tolist())) == 18
    again = torch.cat([batch_indices(20, 6, 3, step) for step in range(3, 6)])
    assert not torch.equal(epoch, again)
    assert torch.equal(batch_indices(20, 6, 3, 1), epoch[6:12])
    assert not torch.equal(batch_indices(20, 6, 4, 1), epoch[6:12])


def test_decays():
    assert [decay_factor("cosine", part) for part in (0, 0.5, 1)] == pytest.approx([1, 0.5, 0])
    assert [decay_factor("linear", part) for part in (0, 0.25, 1)] == [1, 0.75, 0]
    assert decay_factor("none", 0.9) == 1


def test_methods_share_batches_and_queries(tmp_path):
    _, store = finished(tmp_path / "store")
    for result in outcomes(store.folder).values():
        assert result["queries"] == 60
        assert result["curve"]["queries"][-1] == 60
        assert len(result["curve"]["queries"]) == 5
    starts = {result["curve"]["train_loss"][0] for result in outcomes(store.folder).values()}
    assert len(starts) == 1


def test_a_finished_run_is_not_run_again(tmp_path):
    _, store = finished(tmp_path / "store")
    times = {file: file.stat().st_mtime_ns for file in store.runs.iterdir()}
    finished(tmp_path / "store")
    assert {file: file.stat().st_mtime_ns for file in store.runs.iterdir()} == times


def test_a_diverged_run_is_given_up_with_the_reason(tmp_path):
    wild = TEXT.replace("[1, 4]", "[3e4]").replace("seeds = [0, 1]", "seeds = [0]")
    _, store = finished(tmp_path / "store", wild)
    by_method = {result["run"]["method"]: result for result in outcomes(store.folder).values()}
    assert (by_method["STP"]["status"], by_method["STP"]["reason"]) == ("finished", "")
    gone = by_method["VS2P"]
    assert gone["status"] == "diverged"
    assert gone["reason"].startswith("the training loss is ")
    assert gone["reason"].endswith("at 16 queries")
    assert gone["queries"] == 16
    assert gone["curve"]["queries"] == [0, 16]
    assert 0 <= gone["final"]["accuracy"] <= 1


def test_losses_that_are_not_finite_end_a_run(tmp_path, monkeypatch):
    run, store = plan(parse())[0], Store(tmp_path / "store")
    task = prepare(run.workload, Sources(), "cpu")
    calls = iter(range(10**6))
    real = task.loss
    monkeypatch.setattr(task, "loss", lambda *a: real(*a) if next(calls) < 20 else torch.tensor(math.nan))
    result = execute(run, store, task).result
    assert result.status == "diverged"
    assert result.reason.startswith("10 steps in a row met a loss that is not finite or would have gone too far")
    assert result.reason.endswith("at 30 queries")
    assert len(result.trace.queries) == 20
    assert result.trace.gamma[10:] == (None,) * 10


def stop_at(kind, number):
    """A listener that stops a run at an event of this kind, the first, second or so."""
    seen = []

    def stop(event):
        seen.append(type(event))
        if type(event) is kind and seen.count(kind) == number:
            raise StopError

    return stop


class StopError(Exception):
    pass


AUTO = TEXT.replace("lr = [1, 4]", 'lr = "auto"').replace("queries = 60", "queries = 120")


@pytest.mark.parametrize("text", [TEXT, AUTO], ids=["a rate", "auto"])
@pytest.mark.parametrize(
    "moment", [(Started, 1), (Evaluated, 1), (Evaluated, 3), (Progressed, 2), (Progressed, 29), (Evaluated, 5)]
)
def test_a_run_that_was_stopped_resumes(tmp_path, text, moment, monkeypatch):
    monkeypatch.setattr("forwardtune.experiments.under_way.PAUSE", 0.0)
    run = plan(parse(text))[0]
    make(run, Store(tmp_path / "whole"))
    store = Store(tmp_path / "stopped")
    with pytest.raises(StopError):
        make(run, store, stop_at(*moment))
    assert store.result(run.id) is None
    result = make(run, store)
    assert result.circumstances.sessions == (1 if moment[1] == 1 else 2)  # before the first step nothing is lost
    assert outcomes(tmp_path / "stopped") == outcomes(tmp_path / "whole")


def stopped(run, store, evaluations=3):
    """A run that was stopped after some evaluations."""
    seen = []

    def stop(event):
        seen.append(isinstance(event, Evaluated))
        if sum(seen) == evaluations:
            raise StopError

    with pytest.raises(StopError):
        make(run, store, stop)


@pytest.mark.parametrize("damage", ["step", "looks", "torn"])
def test_a_run_whose_files_were_damaged_starts_over_and_says_so(tmp_path, damage):
    run, store = plan(parse())[0], Store(tmp_path / "store")
    stopped(run, store)
    file = store.runs / f"{run.id}.{'ledger' if damage == 'step' else 'looks'}"
    content = file.read_bytes()
    if damage == "step":
        file.write_bytes(content[:-300] + b"damage" + content[-294:])
    elif damage == "looks":
        file.write_bytes(b"")
    else:  # killed while writing a line: that is no damage
        file.write_bytes(content + b'{"step": 15, "que')
    notes = []
    make(run, store, lambda event: notes.append(event.text) if isinstance(event, Noted) else None)
    assert len(notes) == (damage != "torn")
    assert all("VS2P lr 1 seed 0 starts over" in note for note in notes)
    assert (store.runs / f"damaged.{file.name}").exists() == (damage != "torn")
    make(run, Store(tmp_path / "whole"))
    assert outcomes(tmp_path / "store") == outcomes(tmp_path / "whole")


def test_a_ledger_that_cannot_be_resumed_is_left_alone(tmp_path):
    run, store = plan(parse())[0], Store(tmp_path / "store")
    stopped(run, store)
    file = store.runs / f"{run.id}.ledger"
    content = file.read_bytes()
    file.write_bytes(b"something else")
    with pytest.raises(
        ExperimentError, match=r"VS2P lr 1 seed 0 cannot be resumed: .* To make it anew, move .*ledger away"
    ):
        make(run, store)
    assert file.read_bytes() == b"something else"
    file.write_bytes(content)
    make(run, store)


class Tricky(torch.nn.Module):
    """A network whose steps leave behind random numbers and running statistics."""

    def __init__(self, channels, size, classes):
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Flatten(),
            torch.nn.Linear(channels * size * size, 16),
            torch.nn.BatchNorm1d(16),
            torch.nn.Dropout(0.5),
        )
        self.head = torch.nn.Linear(16, classes)

    def forward(self, x):
        return self.head(self.body(x))


@pytest.mark.parametrize("query", [1, 2, 3, 4, 17, 18, 60])
def test_killed_in_the_middle_of_a_step(tmp_path, monkeypatch, query):
    """Dropout and BatchNorm go on as if the process had not been killed, also in the first step."""
    monkeypatch.setattr("forwardtune.tasks.images.networks.cnn", Tricky)
    run = plan(parse())[0]
    make(run, Store(tmp_path / "whole"))
    store = Store(tmp_path / "killed")
    child = os.fork()
    if child == 0:  # pragma: no cover
        task = prepare(run.workload, Sources(), "cpu")
        calls, real = iter(range(1, 1000)), task.loss
        task.loss = lambda *a: os._exit(9) if next(calls) == query else real(*a)
        execute(run, store, task)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    make(run, store)
    assert outcomes(tmp_path / "killed") == outcomes(tmp_path / "whole")


def test_a_run_does_not_go_on_with_other_data(tmp_path, monkeypatch):
    run, store = plan(parse())[0], Store(tmp_path / "store")
    stopped(run, store)
    images = Sources().images("digits")
    other = replace(images, train_y=images.train_y.flip(0))
    monkeypatch.setattr(Sources, "images", lambda self, name: other)
    with pytest.raises(ExperimentError, match="was begun on other data or weights"):
        make(run, store)
    assert store.result(run.id) is None


def test_a_base_that_is_not_whole_is_made_again(tmp_path):
    run, store = plan(parse())[0], Store(tmp_path / "store")
    first = make(run, store)
    (file,) = store.bases.iterdir()
    content = file.read_bytes()
    file.write_bytes(content[:1000])
    (store.runs / f"{run.id}.json").unlink()
    for left in store.runs.glob(f"{run.id}.*"):
        left.unlink()
    again = make(run, store)
    assert file.read_bytes() == content
    assert again.curve == first.curve


def test_a_base_that_was_changed_is_refused(tmp_path):
    spec, store = finished(tmp_path / "store", TEXT.replace("[0, 1]", "[0]"))
    (file,) = store.bases.iterdir()
    content = bytearray(file.read_bytes())
    content[-8] ^= 1
    file.write_bytes(content)
    (store.runs / f"{plan(spec)[0].id}.json").unlink()
    with pytest.raises(ExperimentError, match=r"is not the file that the finished runs in .* started from"):
        compare(spec, store, Tasks(Sources(), "cpu"), Machine())


def test_a_checkpoint_that_was_replaced_is_another_base(tmp_path):
    """Also one of the same name and size."""
    from safetensors.torch import save_file

    from forwardtune.tasks.images import networks

    text = TEXT.replace('"random"', '"base.safetensors"').replace("[0, 1]", "[0]").replace("[1, 4]", "[1]")
    sources, store = Sources(None, tmp_path), Store(tmp_path / "store")
    bases = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        save_file(networks.build("cnn", sources.images("digits")).state_dict(), tmp_path / "base.safetensors")
        bases.append(prepare(parse(text).workloads[0], sources, "cpu").base_id)
        if seed == 1:
            for run in plan(parse(text)):
                make(run, store, sources=sources)
    assert bases[0] != bases[1]
    with pytest.raises(ExperimentError, match="made on other data or from other weights"):
        compare(parse(text), store, Tasks(sources, "cpu"), Machine())


def test_a_run_without_a_rate_keeps_to_its_budget(tmp_path):
    many = AUTO.replace("batch = 8", "batch = 8\ndirections = 8").replace("evaluations = 4", "evaluations = 2")
    assert make(plan(parse(many))[0], Store(tmp_path / "many")).queries <= 120
    with pytest.raises(ExperimentError, match="59 queries are too few for VS2P to find its rate"):
        parse(AUTO.replace("queries = 120", "queries = 59"))
    run, store = plan(parse(AUTO))[0], Store(tmp_path / "store")
    result = make(run, store)
    assert 117 <= result.queries <= 120
    assert len(result.curve.queries) == 5
    for i, queries in enumerate(result.curve.queries[:-1]):
        assert 30 * i <= queries < 30 * i + 4
    assert result.curve.queries[-1] == result.queries
    assert result.run.lr == "auto"


def test_global_random_numbers_are_left_alone(tmp_path):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    make(plan(parse())[0], Store(tmp_path / "store"))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_store_of_another_version(tmp_path):
    _, store = finished(tmp_path / "store", TEXT.replace("[0, 1]", "[0]"))
    mark = store.folder / "store.json"
    mark.write_text('{"schema": 99}')
    with pytest.raises(ExperimentError, match=r"was written by another version of forwardtune \(format 99"):
        Store(store.folder)
    mark.write_text('{"schema": 1}')
    file = next(store.runs.glob("*.json"))
    result = json.loads(file.read_text())
    file.write_text(json.dumps({**result, "schema": 0}))
    with pytest.raises(ExperimentError, match=r"has format 0, not 1; move it away to run it again"):
        store.result(file.stem)
    file.write_text("{")
    with pytest.raises(ExperimentError, match=r"cannot be read .*; move it away"):
        store.result(file.stem)


def test_a_result_is_read_as_it_was_written(tmp_path):
    _, store = finished(tmp_path / "store", TEXT.replace("[0, 1]", "[0]").replace("[1, 4]", "[1, 3e4]"))
    for file in store.runs.glob("*.json"):
        written = json.loads(file.read_text())
        result = store.result(file.stem)
        assert {"schema": 1, **result.to_json()} == written
        older = {name: value for name, value in written.items() if name not in ("metrics", "plateaus")}
        assert RunResult.from_json(older) == replace(result, plateaus=0)  # images were always judged by accuracy


def test_a_folder_that_is_something_else(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ExperimentError, match="holds no results of a comparison; name the folder"):
        Store(tmp_path)
    with pytest.raises(ExperimentError, match="holds no results"):
        Store(tmp_path / "nothing", create=False)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(ExperimentError, match="cannot be used"):
        Store(Path("/proc/nowhere"))


def test_a_store_whose_making_was_interrupted(tmp_path):
    folder = tmp_path / "store"
    folder.mkdir()
    (folder / ".store.json.123.new").write_text('{"sch')
    Store(folder)
    assert (folder / "runs").is_dir()
    (folder / "runs").rmdir()
    (folder / "bases").rmdir()
    Store(folder)
    assert (folder / "bases").is_dir()


def test_two_comparisons_on_one_store(tmp_path):
    store = Store(tmp_path / "store")
    with store.lock(), pytest.raises(ExperimentError, match=r"another process is writing to .*--out"):
        compare(parse(), Store(tmp_path / "store"), Tasks(Sources(), "cpu"), Machine())


def test_other_data_of_the_same_name_is_refused(tmp_path):
    spec, store = finished(tmp_path / "store", TEXT.replace("[0, 1]", "[0]"))
    run = plan(spec)[0]
    result = store.result(run.id)
    store.save(replace(result, base=Base("0", "0"), data=replace(result.data, train=999)))
    with pytest.raises(ExperimentError, match=r"made on other data .* \(there 999 training .*here 1,400"):
        unfinished([run], store, Tasks(Sources(), "cpu"))


def test_writing_is_whole_or_not_at_all(tmp_path, monkeypatch):
    file = tmp_path / "a.json"
    write_json(file, {"a": 1})
    monkeypatch.setattr("os.fsync", lambda number: (_ for _ in ()).throw(OSError("the disk is full")))
    with (
        pytest.raises(ExperimentError, match=r"a.json cannot be written .the disk is full"),
        translated(ExperimentError, f"{file} cannot be written"),
    ):
        write_json(file, {"a": 2})
    assert json.loads(file.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [file]


def test_machines():
    machine = Machine.choose("cpu")
    assert machine.threads == 1
    assert Machine.choose("cpu", workers=1).threads == machine.workers
    assert Machine.choose("cpu", threads=machine.workers).workers == 1
    with pytest.raises(ExperimentError, match="the device 'cuda:77' cannot be used"):
        Machine.choose("cuda:77")


def test_a_folder_that_is_moved_during_a_run_is_told_of_and_goes_on_when_it_is_back(tmp_path):
    (run, *_), folder = plan(parse()), tmp_path / "store"
    make(run, Store(tmp_path / "whole"))

    def move(event):
        if isinstance(event, Progressed) and folder.exists():
            folder.rename(tmp_path / "elsewhere")

    with pytest.raises(ExperimentError, match=r"store/.* cannot be written; make room or put it back, then run the"):
        make(run, Store(folder), move)
    assert not folder.exists()
    (tmp_path / "elsewhere").rename(folder)
    make(run, Store(folder))
    assert outcomes(folder) == outcomes(tmp_path / "whole")


def test_a_grid_is_extended_while_a_comparison_is_made(tmp_path):
    """Run by run until the best rate is inside; made again, nothing is left to do."""
    text = TEXT.replace("[1, 4]", "[0.01, 0.1]").replace('title = "a test"', 'title = "a test"\nextend = true')
    spec, store, tasks = parse(text), Store(tmp_path / "store"), Tasks(Sources(), "cpu")
    for expected in ([(6, 0), (8, 6), (10, 8), (12, 10), (14, 12)], [(6, 6), (14, 14)]):
        events = []
        compare(spec, store, tasks, Machine(workers=1, threads=1), events.append)
        assert [(event.runs, event.finished) for event in events if isinstance(event, Planned)] == expected
        scores = score(spec, store)
        assert scores.missing == 0
        vs2p, stp = scores.workloads[0].methods
        assert [rate.lr for rate in vs2p.rates] == [0.01, 0.1, 1.0, 10.0, 100.0, 1000.0]
        assert vs2p.best.lr == 100.0
        assert [rate.lr for rate in stp.rates] == [1e-3]
