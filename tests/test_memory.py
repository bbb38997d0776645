"""Memory that runs out, in a worker of a comparison or in the command itself: what to do is told, and a run resumes."""

import importlib
import signal

import pytest
import torch

from forwardtune import ledger
from forwardtune.experiments import comparison, under_way
from forwardtune.experiments.comparison import Machine
from forwardtune.experiments.events import Failed, Progressed
from forwardtune.experiments.plan import plan
from forwardtune.experiments.runner import execute
from forwardtune.experiments.store import Store
from forwardtune.tasks import Sources, Tasks
from tests.helpers.comparisons import outcomes, parse

command = importlib.import_module("forwardtune.cli.main")  # the name in the package is that of the function

SPEC = """
title = "small"
queries = 40
batch = 8
seeds = [0]
evaluations = 2
train_examples = 40
test_examples = 40
workloads = [{data = "digits", network = "cnn", weights = "random"}]
methods = [{method = "VS2P", lr = [1]}]
"""


class DoneError(Exception):
    """The parent sends no further run."""


class Pipe:
    """What `_serve` hears and tells."""

    def __init__(self, *runs):
        self.runs, self.told = list(runs), []
        self.send = self.told.append

    def recv(self):
        if not self.runs:
            raise DoneError
        return self.runs.pop()


def too_much():
    torch.empty(2**60)


def python_has_none():
    raise MemoryError


@pytest.mark.parametrize("fails", [too_much, python_has_none])
def test_a_worker_says_what_to_do_and_the_run_resumes(tmp_path, monkeypatch, fails):
    spec, tasks = parse(SPEC), Tasks(Sources(), "cpu")
    (run,) = plan(spec)
    execute(run, Store(tmp_path / "whole"), tasks[run.workload])

    def fail_midway(run, store, task, tell):
        steps = 0

        def stop(event):
            nonlocal steps
            steps += isinstance(event, Progressed)
            fails() if steps == 3 else tell(event)

        return execute(run, store, task, stop)

    monkeypatch.setattr(under_way, "PAUSE", 0.0)
    monkeypatch.setattr(comparison, "execute", fail_midway)
    monkeypatch.setattr(comparison, "_end_with_parent", lambda: None)
    under_way.make_base(tasks[run.workload], Store(tmp_path / "failed"))  # which a worker finds there
    pipe, before = Pipe(run), signal.getsignal(signal.SIGINT)
    with pytest.raises(DoneError):
        comparison._serve(pipe, tmp_path / "failed", Sources(), Machine(threads=torch.get_num_threads()))
    signal.signal(signal.SIGINT, before)
    assert [event.text for event in pipe.told if isinstance(event, Failed)] == [
        f"{run.title} ran out of memory; the same command resumes where it left off, and needs less memory with "
        "--workers 1"
    ]
    recorded = ledger.read(Store(tmp_path / "failed").ledger(run.id)).end
    assert 3 <= recorded < 20
    execute(run, Store(tmp_path / "failed"), tasks[run.workload])
    assert outcomes(tmp_path / "failed") == outcomes(tmp_path / "whole")


@pytest.mark.parametrize("fails", [too_much, python_has_none])
def test_the_command_says_what_to_do(monkeypatch, capsys, fails):
    monkeypatch.setattr(command, "app", fails)
    with pytest.raises(SystemExit) as end:
        command.main()
    assert end.value.code == 1
    told = "memory ran out; free some, or choose a smaller model or --batch; a run that had begun can be resumed"
    assert capsys.readouterr().err == f"error: {told}\n"


def test_other_errors_are_not_taken_for_it(monkeypatch):
    monkeypatch.setattr(command, "app", lambda: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="size"):
        command.main()
