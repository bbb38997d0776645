"""The model card: what was tuned, how, and what it came to."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

from forwardtune.experiments.plan import Run
from forwardtune.experiments.result import RunResult, rate_name
from forwardtune.finetuning.kept import Kept
from forwardtune.markup import code_block, markdown
from forwardtune.metrics import shown, unit
from forwardtune.tasks.texts.quantized import is_quantized
from forwardtune.tasks.texts.task import TextTask
from forwardtune.tasks.texts.workload import LM


def card(run: Run, task: TextTask, result: RunResult, kept: Kept) -> str:
    """The model in a page of Markdown."""
    workload = task.workload
    name = markdown(Path(workload.weights).name)
    tuned = "all its weights" if workload.adapter == "none" else f"an adapter ({workload.adapter})"
    if workload.adapter == "none" and is_quantized(task.language.config, workload.dtype):
        tuned = "its norms, biases and new weights"
    stages: dict[str, Callable[[str], float]] = {"before": result.first}
    if result.base.before:
        stages["fitted"] = result.fitted
    stages["after"] = kept.scores.metrics.__getitem__
    rows = "\n".join(
        f"| {metric} | {' | '.join(shown(metric, score(metric)) for score in stages.values())} |"
        for metric in task.metrics
    )
    majority = result.data.majority
    always = f"\nAlways answering the majority class has an accuracy of {100 * majority:.1f}.\n" if majority else ""
    examples = min(workload.test_examples or task.tests, task.tests)
    settings = ", ".join(f"{key} {value}" for key, value in {**run.method.settings, "scale": run.method.scale}.items())
    selected = f"\nThese are the weights after {kept.queries:,} of them, the best evaluation on the test examples."
    selected = "" if kept.is_last else selected
    percent = f" ({unit(result.metric)})" if unit(result.metric) else ""
    is_language = workload.setup == LM
    named = f" --base {shlex.quote(_base(task))}"
    return f"""---
library_name: {"peft" if workload.adapter != "none" else "transformers"}
base_model: {json.dumps(workload.weights)}
tags: [forwardtune, {"text-generation" if is_language else "text-classification"}]
---

# {name}, tuned to {markdown(workload.name)}

{name} with {tuned} tuned by forward passes only: {result.queries:,} queries of {run.method.method} on batches of
{workload.batch} examples (lr {rate_name(run.lr)}, {settings}, {run.decay} decay, seed {run.seed}).{selected}

On {examples:,} test examples{percent}:

| | {" | ".join(stages)} |
| --- |{" --- |" * len(stages)}
{rows}
{always}
{_asked(task)}

```
forwardtune predict --model .{named if workload.adapter != "none" else ""} --text "..."
```

`run.ledger` is the run: `forwardtune ledger show run.ledger` tells of its steps. The weights that it started from and
this file give the weights here, bit for bit:

{code_block(f"forwardtune replay --model .{named} --out again")}
"""


def _base(task: TextTask) -> str:
    """Where the model is: its folder or file, wherever we are, or its name on the Hub."""
    path = Path(task.language.path)
    return str(path.resolve()) if path.exists() else task.language.path


def _asked(task: TextTask) -> str:
    """What it is asked and how."""
    if task.workload.setup == LM:
        return "It continues texts, as before. The command tells how well it predicts one: its perplexity."
    told = f'Texts are put to it by the setup "{task.language.setup_name}"'
    answers = ", ".join(map(repr, task.setup_words))
    return markdown(f"{told}, the template {task.template!r} and the answers {answers}." if answers else f"{told}.")
