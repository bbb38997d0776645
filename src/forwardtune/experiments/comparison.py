"""Makes all runs of a plan, several at a time, each in one of a few worker processes.

A worker that dies takes nothing with it, since its run is in the ledger. They end with the process that started them.
"""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection, get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

import torch

from forwardtune.errors import ExperimentError, ForwardTuneError, is_lack_of_memory
from forwardtune.experiments.cores import allowed
from forwardtune.experiments.events import Event, Failed, Finished, MakingBase, Noted, Planned, Tell, ignore
from forwardtune.experiments.evidence import Evidence
from forwardtune.experiments.plan import Run, plan
from forwardtune.experiments.result import Rate
from forwardtune.experiments.runner import execute
from forwardtune.experiments.scoring import chosen_rates, extended
from forwardtune.experiments.spec import Backpropagation, Spec, steps
from forwardtune.experiments.store import Store
from forwardtune.experiments.under_way import make_base
from forwardtune.files import translated, write_text
from forwardtune.tasks import Sources, Task, Tasks
from forwardtune.tasks.identity import file_digest

LESS_MEMORY = "the same command resumes where it left off, and needs less memory with --workers 1"


@dataclass(frozen=True)
class Machine:
    """What the runs are made on: so many at a time, each with so many threads."""

    device: str = "cpu"
    workers: int = 1
    threads: int = 1

    @staticmethod
    def choose(device: str | None = None, workers: int | None = None, threads: int | None = None) -> Machine:
        """All cores that we may use, one run a core; a GPU does one run at a time. What is given stays."""
        cores = allowed()
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise ExperimentError(f"the device {device!r} cannot be used ({str(error).splitlines()[0]})") from None
        if workers is None:
            workers = 1 if device != "cpu" else max(1, cores // (threads or 1))
        return Machine(device, workers, threads or max(1, cores // workers))


def compare(
    spec: Spec,
    store: Store,
    tasks: Tasks,
    machine: Machine,
    tell: Tell = ignore,
    evidence: Evidence | None = None,
) -> None:
    """Makes the runs that are neither in the store nor in evidence yet, adds them to both, and reports progress."""
    with store.lock():
        made, chosen = spec, dict[str, Rate]()
        while True:  # once, unless what is best on a workload decides on rates (`extend`, `rates_from`)
            runs = plan(made, chosen)
            if evidence:
                evidence.give(runs, store)
            try:
                _compare(made, runs, store, tasks, machine, tell)
            finally:
                if evidence:
                    evidence.keep(runs, store)
            before = made, chosen
            made = extended(spec, store)
            chosen = chosen_rates(made, store)
            if before == (made, chosen):
                return


def _compare(spec: Spec, runs: Sequence[Run], store: Store, tasks: Tasks, machine: Machine, tell: Tell) -> None:
    queries = {run.id: _queries(run, tasks[run.workload]) for run in runs}
    left = unfinished(runs, store, tasks)
    workloads = list(dict.fromkeys(run.workload for run in left))
    for workload in workloads:  # what is missing is noticed before anything is done
        tasks[workload].check()
    for note in dict.fromkeys(tasks[workload].note for workload in spec.workloads):
        if note:
            tell(Noted(note))
    with translated(ExperimentError, f"{store.spec_file} cannot be written"):
        write_text(store.spec_file, spec.text)
    tell(Planned(spec.name, len(runs), len(runs) - len(left), sum(queries[run.id] for run in left)))
    threads = torch.get_num_threads()
    torch.set_num_threads(machine.workers * machine.threads)
    for workload in workloads:
        tell(MakingBase(workload.name, workload.weights))
        make_base(tasks[workload], store)
        check_base(store.base(tasks[workload].base_id), runs, store)
    torch.set_num_threads(threads)
    for has_gradient in (False, True):  # apart, so that the memory of neither counts what the other has loaded
        part = [run for run in left if isinstance(run.method, Backpropagation) == has_gradient]
        if part:
            _WorkerPool(store, tasks, machine, tell).work(part)


def _queries(run: Run, task: Task) -> int:
    """What a run will use of its budget."""
    return steps(run.workload, run.method, task.queries) * run.method.queries_per_step


def unfinished(runs: Sequence[Run], store: Store, tasks: Tasks) -> list[Run]:
    """The runs that are left; those that are done must have been made on the same data and from the same weights."""
    left = []
    for run in runs:
        result = store.result(run.id)
        if result is None:
            left.append(run)
        elif result.base.id != tasks[run.workload].base_id:
            there, here = (
                f"{data.train:,} training and {data.test:,} test examples"
                for data in (result.data, tasks[run.workload].data)
            )
            sizes = f" (there {there}, here {here})" if there != here else ""
            raise ExperimentError(
                f"runs of {run.workload.name} in {store.folder} were made on other data or from other weights, or "
                f"by other code of a task{sizes}; use those, or choose another folder with --out"
            )
    return left


def check_base(file: Path, runs: Sequence[Run], store: Store) -> None:
    """Refuses base weights that are not those which finished runs started from."""
    bases = {result.base.id: result.base.digest for run in runs if (result := store.result(run.id))}
    if bases.get(file.stem, file_digest(file)) != file_digest(file):
        raise ExperimentError(
            f"{file} is not the file that the finished runs in {store.folder} started from; put that one back, or "
            "choose another folder with --out, and with --keep"
        )


class _WorkerPool:
    """Worker processes and the pipes to them."""

    def __init__(self, store: Store, tasks: Tasks, machine: Machine, tell: Tell) -> None:
        self.context = get_context("spawn")
        self.settings = store.folder, tasks.sources, machine
        self.machine, self.tell = machine, tell
        self.workers: dict[Connection, BaseProcess] = {}

    def work(self, runs: Sequence[Run]) -> None:
        waiting = list(reversed(runs))
        try:
            with _interrupts_ignored():  # by the workers, from their first moment: Ctrl-C is for this process
                for _ in range(min(self.machine.workers, len(runs))):
                    ours, theirs = self.context.Pipe()
                    process = self.context.Process(target=_serve, args=(theirs, *self.settings), daemon=True)
                    process.start()
                    theirs.close()
                    self.workers[ours] = process
            for pipe in list(self.workers):
                self._send(pipe, waiting)
            while self.workers:
                for ready in connection.wait(list(self.workers)):
                    assert isinstance(ready, Connection)
                    self._hear(ready, waiting)
        finally:
            for worker in self.workers.values():
                worker.kill()
            for worker in self.workers.values():
                worker.join()

    def _send(self, pipe: Connection, waiting: list[Run]) -> None:
        """The next run to a worker; if there is none it can go."""
        if not waiting:
            worker = self.workers.pop(pipe)
            worker.kill()
            worker.join()
            return
        try:
            pipe.send(waiting.pop())
        except OSError:
            self._worker_died(pipe)

    def _hear(self, pipe: Connection, waiting: list[Run]) -> None:
        try:
            event: Event = pipe.recv()
        except (EOFError, OSError):
            self._worker_died(pipe)
        if isinstance(event, Failed):
            raise ExperimentError(event.text)
        self.tell(event)
        if isinstance(event, Finished):
            self._send(pipe, waiting)

    def _worker_died(self, pipe: Connection) -> NoReturn:
        worker = self.workers.pop(pipe)
        worker.join(5)
        raise ExperimentError(
            f"a worker process died (exit code {worker.exitcode}; -9 is often a lack of memory); {LESS_MEMORY}"
        ) from None


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _serve(pipe: Connection, folder: Path, sources: Sources, machine: Machine) -> None:
    """A worker: makes the runs that it is sent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(machine.threads)
    store, tasks = Store(folder), Tasks(sources, machine.device)
    while True:
        run: Run = pipe.recv()
        try:
            task = tasks[run.workload]
            if not store.base(task.base_id).exists():
                raise ExperimentError(
                    "its code or data are not what they were when the comparison began; leave them alone meanwhile, "
                    "and draw random numbers with torch, whose generator is seeded"
                )
            execute(run, store, task, pipe.send)
        except ForwardTuneError as error:
            pipe.send(Failed(f"{run.title}: {error}"))
        except Exception as error:
            told = f"{run.title} failed unexpectedly:\n{traceback.format_exc()}"
            pipe.send(Failed(f"{run.title} ran out of memory; {LESS_MEMORY}" if is_lack_of_memory(error) else told))


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
