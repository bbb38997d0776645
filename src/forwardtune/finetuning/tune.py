"""Makes a run of a language model and saves what it leads to; see `tuned` for the folder."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import nn

from forwardtune import ledger as ledgers
from forwardtune.errors import ExperimentError
from forwardtune.experiments.events import Tell, ignore
from forwardtune.experiments.plan import Run
from forwardtune.experiments.result import RunResult, scores_to_json
from forwardtune.experiments.runner import Executed, execute
from forwardtune.experiments.store import Store, read_json
from forwardtune.files import translated, write_json, write_text
from forwardtune.finetuning.card import card
from forwardtune.finetuning.tuned import FORMAT, SETTINGS, Settings
from forwardtune.tasks import Sources, TextWorkload, prepare
from forwardtune.tasks.texts.models import quiet
from forwardtune.tasks.texts.task import TextTask


def finetune(run: Run, out: Path, sources: Sources, *, device: str = "cpu", tell: Tell = ignore) -> RunResult:
    """Makes the run, or what is left of it, and saves the model that it leads to."""
    settings = out / SETTINGS
    if settings.exists() and read_json(settings).get("run") != run.id:
        raise ExperimentError(f"{out} holds the result of another run; choose another folder with --out")
    if out.exists() and not (out / "run").is_dir() and any(out.iterdir()):
        raise ExperimentError(f"{out} is not empty; choose another folder with --out")
    task = prepare(run.workload, sources, device)
    assert isinstance(task, TextTask)
    task.check()
    store = Store(out / "run")
    with store.lock():
        executed = execute(run, store, task, tell)
        result = executed.result
        if result.diverged:
            raise ExperimentError(
                f"the run diverged: {result.reason}. Its evaluations are in {store.runs / run.id}.json; try "
                "again in another folder, with a smaller --lr if it had one"
            )
        if not settings.exists():
            with translated(ExperimentError, f"{out} cannot be written"):
                _save(run, task, store, executed, out)
    return result


def _save(run: Run, task: TextTask, store: Store, executed: Executed, out: Path) -> None:
    base, live = store.base(task.base_id), store.ledger(run.id)
    model: Any = executed.model or _replayed(task, base, live)
    with quiet():
        model.cpu().save_pretrained(out)
        task.language.tokenizer.save_pretrained(out)
    if load_file(base):
        shutil.copyfile(base, out / "base.safetensors")
    (out / "run.ledger").unlink(missing_ok=True)
    ledgers.export(live, out / "run.ledger")
    write_text(out / "README.md", card(run, task, executed.result))
    write_json(
        out / SETTINGS,
        {
            "format": FORMAT,
            "run": run.id,
            **asdict(_settings(task)),
            "final": scores_to_json(executed.result.final),
        },
    )


def _replayed(task: TextTask, base: Path, live: Path) -> nn.Module:
    """The tuned model of a run that an earlier process finished, but did not save."""
    return ledgers.replay(task.start(base), live)


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
