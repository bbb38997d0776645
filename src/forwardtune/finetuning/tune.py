"""Makes a run of a language model and saves what it leads to; see `tuned` for the folder."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from forwardtune import ledger as ledgers
from forwardtune.errors import ExperimentError, LedgerError
from forwardtune.experiments import cores
from forwardtune.experiments.events import Measuring, Noted, Tell, ignore
from forwardtune.experiments.plan import Run
from forwardtune.experiments.result import RunResult, scores_to_json
from forwardtune.experiments.runner import Executed, execute
from forwardtune.experiments.store import Store, read_json
from forwardtune.experiments.under_way import Ready, make_base
from forwardtune.files import filled, temporary, translated, write_json, write_text
from forwardtune.finetuning.budget import Budget, BudgetFile, fitted
from forwardtune.finetuning.card import card
from forwardtune.finetuning.kept import Keep, Kept, kept
from forwardtune.finetuning.pace import Pace, measure
from forwardtune.finetuning.tuned import FORMAT, LEDGER, NEW, READ, SETTINGS, Settings
from forwardtune.tasks import Sources, TextWorkload, prepare
from forwardtune.tasks.texts.models import quiet
from forwardtune.tasks.texts.task import READOUT, TextTask
from forwardtune.tasks.texts.workload import LM


def finetune(
    run: Run,
    out: Path,
    sources: Sources,
    *,
    device: str = "cpu",
    threads: int | None = None,
    minutes: float | None = None,
    evaluations: int | None = None,
    keep: Keep = "best",
    tell: Tell = ignore,
) -> tuple[RunResult, Kept]:
    """Makes the run, or what is left of it, and saves the model that it leads to, at its best evaluation or its end.

    With `minutes` the run's budget, and unless `evaluations` is given their number, is planned for that time. Without
    `threads` their number is the better one of 1 and the free cores.
    """
    begun, settings = time.perf_counter(), out / SETTINGS
    file = BudgetFile(out / "run" / "budgets", run, minutes, evaluations)
    budget = file.read()
    planned = budget.of(run) if budget else run if minutes is None else None
    if settings.exists():
        saved = read_json(settings)
        if planned is None or saved.get("run") != planned.id:
            raise ExperimentError(f"{out} holds the result of another run; choose another folder with --out")
        if saved.get("keep", "last") != keep:
            raise ExperimentError(f"{out} was saved with --keep {saved.get('keep', 'last')}; choose another --out")
    if out.exists() and not (out / "run").is_dir() and any(out.iterdir()):
        raise ExperimentError(f"{out} is not empty; choose another folder with --out")
    task = prepare(run.workload, sources, device)
    assert isinstance(task, TextTask)
    task.check()
    store, ready = Store(out / "run"), None
    with store.lock():
        if planned is None or (budget is None and store.result(planned.id) is None):
            pace, ready = _measured(run, task, store, threads, tell)
            if minutes is None:
                budget = Budget(task.queries, run.workload.evaluations, pace)
            else:
                budget = fitted(run, pace, minutes, time.perf_counter() - begun, evaluations)
            file.write(budget)
            planned = budget.of(run)
        else:
            torch.set_num_threads(threads or min(budget.pace.threads if budget else 1, cores.allowed()))
        if budget and store.result(planned.id) is None:
            tell(budget.estimate)
        return _made(planned, task.with_workload(planned.workload), store, out, keep, tell, ready)


def _measured(run: Run, task: TextTask, store: Store, threads: int | None, tell: Tell) -> tuple[Pace, Ready]:
    """The pace of a run that has not begun, with the best number of threads if none is given."""
    if fit := min(run.workload.fit, task.examples):
        what = {"head": "a new head", LM: "the last norm"}.get(task.language.setup_name, "how answers are read")
        tell(Noted(f"{what} is fitted to {fit:,} training examples first"))
    model = make_base(task, store) or task.start(store.base(task.base_id))
    tell(Measuring(task.describe(model)))
    tried = [threads] if threads else [cores.free()] if task.device.type != "cpu" else sorted({1, cores.free()})
    pace, evaluation = measure(run, task, model, tried)
    return pace, Ready(model, evaluation)


def _made(
    run: Run, task: TextTask, store: Store, out: Path, keep: Keep, tell: Tell, ready: Ready | None
) -> tuple[RunResult, Kept]:
    live, is_saved = store.ledger(run.id), (out / SETTINGS).exists()
    if not is_saved:
        _link(live, out / LEDGER, tell)
    executed = execute(run, store, task, tell, ready)
    result = executed.result
    if result.diverged:
        raise ExperimentError(
            f"the run diverged: {result.reason}. Its evaluations are in {store.runs / run.id}.json; try "
            "again in another folder, with a smaller --lr if it had one"
        )
    chosen = kept(result, keep)
    with translated(ExperimentError, f"{out} cannot be written"):
        if not is_saved:
            _save(run, task, store, executed, out, keep, chosen)
        elif not _is_sound(out / LEDGER):
            _export(live, out / LEDGER, chosen)
            tell(Noted(f"{out / LEDGER} was missing or damaged; it is exported again from {live}"))
    return result, chosen


def _link(live: Path, name: Path, tell: Tell) -> None:
    """Gives the ledger of a run under way the name that its export will have."""
    new = temporary(name)
    try:
        new.unlink(missing_ok=True)
        new.symlink_to(os.path.relpath(live, name.parent))
        os.replace(new, name)
    except OSError as error:
        tell(Noted(f"{name} cannot be made a link ({error}); until the run ends its ledger is {live}"))


def _export(live: Path, name: Path, chosen: Kept) -> None:
    new = temporary(name)
    new.unlink(missing_ok=True)
    ledgers.export(live, new, until=chosen.until(live))
    os.replace(new, name)


def _is_sound(file: Path) -> bool:
    try:
        ledgers.read(file)
    except LedgerError:
        return False
    return True


def _save(run: Run, task: TextTask, store: Store, executed: Executed, out: Path, keep: Keep, chosen: Kept) -> None:
    base, live = store.base(task.base_id), store.ledger(run.id)
    model: Any = executed.model if chosen.is_last else None
    if model is None:
        model = ledgers.replay(task.start(base), live, until=chosen.until(live))
    with filled(out) as new:
        with quiet():
            model.cpu().save_pretrained(new)
            task.language.tokenizer.save_pretrained(new)
        if any(not name.startswith(READOUT) for name in load_file(base)):
            shutil.copyfile(base, new / NEW)
        if task.setup.readout:
            save_file({name: t.contiguous() for name, t in task.setup.readout._asdict().items()}, new / READ)
        write_text(new / "README.md", card(run, task, executed.result, chosen))
    _export(live, out / LEDGER, chosen)
    write_json(
        out / SETTINGS,
        {
            "format": FORMAT,
            "run": run.id,
            "keep": keep,
            **asdict(_settings(task)),
            "final": scores_to_json(chosen.scores),
        },
    )


def _settings(task: TextTask) -> Settings:
    workload: TextWorkload = task.workload
    return Settings(
        model=task.language.path if workload.adapter != "none" else "",
        setup=task.language.setup_name,
        adapter=workload.adapter,
        dtype=workload.dtype,
        pad_token=workload.pad_token,
        max_length=task.setup.max_length,
        template=task.template,
        words=task.setup_words,
        columns=task.texts.columns,
        classes=task.texts.names,
        low=task.texts.low,
        high=task.texts.high,
    )
