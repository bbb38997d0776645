"""A tuned model in a folder: its weights or adapter, how it is asked, its ledger, and a card that tells of it.

model.safetensors, config.json, ...  the model and its tokenizer (with an adapter: adapter_model.safetensors, ...)
forwardtune.json                     how a text is put to it
run.ledger                           the run: with the base weights it gives the tuned ones, bit for bit
base.safetensors                     of a new head or adapter: its weights before the run
README.md                            the card
run/                                 the run under way, from which it goes on if it was stopped
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from forwardtune import ledger as ledgers
from forwardtune.errors import ExperimentError
from forwardtune.experiments.plan import Run
from forwardtune.experiments.runner import Event, Tell, base_of, execute
from forwardtune.experiments.store import Store, read, write, write_text
from forwardtune.tasks import Sources, prepare
from forwardtune.tasks.texts.data import Text
from forwardtune.tasks.texts.models import Language, quiet
from forwardtune.tasks.texts.setups import score_between
from forwardtune.tasks.texts.task import CHUNK, TextTask

SETTINGS = "forwardtune.json"
FORMAT = 1


def finetune(run: Run, out: Path, sources: Sources, *, device: str = "cpu", tell: Tell = lambda event: None) -> Event:
    """Makes the run, or what is left of it, and saves the model that it leads to; its result."""
    settings = out / SETTINGS
    if settings.exists() and read(settings).get("run") != run.id:
        raise ExperimentError(f"{out} holds the result of another run; choose another folder with --out")
    if out.exists() and not (out / "run").is_dir() and any(out.iterdir()):
        raise ExperimentError(f"{out} is not empty; choose another folder with --out")
    task = prepare(run.workload, sources, device)
    assert isinstance(task, TextTask)
    task.check()
    store = Store(out / "run")
    with store.lock():
        result = execute(run, store, sources, device=device, tell=tell)
        if result["status"] == "diverged":
            raise ExperimentError(
                f"the run was given up: {result['reason']}. Its evaluations are in {store.runs / run.id}.json; try a "
                "smaller --lr, in another folder"
            )
        if not settings.exists():
            _save(run, task, store, result, out)
    return result


def _save(run: Run, task: TextTask, store: Store, result: Event, out: Path) -> None:
    base, live = base_of(task, store), store.runs / f"{run.id}.ledger"
    model: Any = ledgers.replay(task.start(base), live)
    with quiet():
        model.cpu().save_pretrained(out)
        task.language.tokenizer.save_pretrained(out)
    if load_file(base):
        shutil.copyfile(base, out / "base.safetensors")
    (out / "run.ledger").unlink(missing_ok=True)
    ledgers.export(live, out / "run.ledger")
    write_text(out / "README.md", card(run, task, result))
    texts, language = task.texts, task.language
    write(
        out / SETTINGS,
        {
            "format": FORMAT,
            "run": run.id,
            "model": language.place if run.workload.adapter != "none" else "",
            "setup": language.setup_name,
            "adapter": run.workload.adapter,
            "dtype": run.workload.dtype,
            "pad_token": run.workload.pad_token,
            "max_length": task.setup.max_length,
            "template": task.template,
            "words": list(task.setup_words),
            "columns": list(texts.columns),
            "classes": list(texts.names),
            "low": texts.low,
            "high": texts.high,
            "final": result["final"],
        },
    )


def card(run: Run, task: TextTask, result: Event) -> str:
    """The model in a page of Markdown."""
    workload, metrics = run.workload, task.metrics
    what = Path(workload.weights).name
    how = "all its weights" if workload.adapter == "none" else f"an adapter ({workload.adapter})"
    rows = "\n".join(
        f"| {name} | {100 * result['curve'][name][0]:.1f} | {100 * result['final'][name]:.1f} |" for name in metrics
    )
    majority = result["data"].get("majority")
    always = f"\nAlways answering the commonest class has an accuracy of {100 * majority:.1f}.\n" if majority else ""
    examples = min(workload.test_examples or task.tests, task.tests)
    settings = ", ".join(f"{name} {value}" for name, value in run.method.settings.items())
    return f"""---
library_name: {"peft" if workload.adapter != "none" else "transformers"}
base_model: {workload.weights}
tags: [forwardtune, text-classification]
---

# {what}, tuned to {workload.name}

{what} with {how} tuned by forward passes only: {result["queries"]:,} evaluations of {run.method.method} on batches of
{workload.batch} examples (lr {run.lr:g}, {settings}, {run.decay} decay, seed {run.seed}).

On {examples:,} test examples (%):

| | before | after |
| --- | --- | --- |
{rows}
{always}
It is asked by the set-up "{task.language.setup_name}"{_question(task)}.

```
forwardtune predict --model . --text "..."
```

`run.ledger` is the run. The weights it started from and this file give the weights here, bit for bit.
"""


def _question(task: TextTask) -> str:
    if not task.setup_words:
        return ""
    return f", the template {task.template!r} and the answers {', '.join(map(repr, task.setup_words))}"


@dataclass(frozen=True)
class Answer:
    """Of one example: a class and how sure the model is, or a score."""

    prediction: str | float
    probability: float | None


class Tuned:
    """A model from the folder that `finetune` made, ready to answer."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        file = folder / SETTINGS
        if not file.is_file():
            raise ExperimentError(
                f"{folder} holds no tuned model: there is no {SETTINGS}; `forwardtune finetune` makes one"
            )
        found: Mapping[str, Any] = read(file)
        if found.get("format") != FORMAT:
            raise ExperimentError(f"{file} was written by another version of forwardtune; use that version for it")
        self.columns, self.classes = tuple(found["columns"]), tuple(found["classes"])
        self._low, self._high = found["low"], found["high"]
        place = Path(found["model"]) if found["adapter"] != "none" else folder
        if place.is_absolute() and not place.is_dir():
            raise ExperimentError(f"the base model of this adapter is not at {place} any more; put it back there")
        self._language = Language(str(place), found["setup"], "none", found["dtype"], found["pad_token"])
        self._language.check_size(torch.device(device))
        self._setup = self._language.setup(self.columns, found["template"], found["words"], found["max_length"])
        self._model = self._load(folder, found["adapter"]).to(device).eval()

    def _load(self, folder: Path, adapter: str) -> nn.Module:
        model, _ = self._language.build(self._setup.answers)
        if adapter == "none":
            return model
        from peft import PeftModel

        loaded: nn.Module = PeftModel.from_pretrained(model, str(folder))
        return loaded

    @torch.inference_mode()
    def answers(self, texts: Sequence[Text]) -> Iterator[Answer]:
        for at in range(0, len(texts), CHUNK):
            logits = self._setup.logits(self._model, [self._setup.encode(text) for text in texts[at : at + CHUNK]])
            if not self.classes:
                yield from (Answer(score, None) for score in score_between(logits, self._low, self._high).tolist())
                continue
            sure, chosen = logits.softmax(1).max(1)
            for number, probability in zip(chosen.tolist(), sure.tolist(), strict=True):
                yield Answer(self.classes[number], probability)
