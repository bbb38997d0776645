"""`forwardtune finetune` and `predict`: a model of language tuned to texts, and asked."""

from __future__ import annotations

import json as json_lines
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from forwardtune._compat import check_transformers
from forwardtune.cli.experiments import Data, Device, Json, Silent, Threads, interruptible, listener_for
from forwardtune.cli.progress import Listener
from forwardtune.errors import ExperimentError
from forwardtune.experiments.comparison import Machine
from forwardtune.experiments.plan import Run
from forwardtune.experiments.report.tables import as_csv
from forwardtune.experiments.runner import Event
from forwardtune.experiments.spec import DECAYS, TEXTS, TRANSFORMER, Method, Workload
from forwardtune.experiments.store import write_text
from forwardtune.methods import METHODS
from forwardtune.tasks import Sources
from forwardtune.toml_tables import one_of

console = Console(highlight=False, soft_wrap=True)

RATES = {"VS2P": (1.0, 15.0), "MeZO": (3e-5, 3e-3), "STP": (3e-4, 3e-3)}
"""Rates to begin with: for all weights, and for an adapter."""


def finetune(
    model: Annotated[str, typer.Option(help="Folder of the model, or with --download its name on the hub.")],
    task: Annotated[str | None, typer.Option(help="sst2, mrpc, qnli, rte or stsb.", show_default=False)] = None,
    data: Data = None,
    train: Annotated[
        Path | None, typer.Option(help="A table of your own: .csv, .tsv, .jsonl.", show_default=False)
    ] = None,
    test: Annotated[Path | None, typer.Option(help="One to test on.", show_default="a tenth of --train")] = None,
    text_column: Annotated[
        list[str] | None, typer.Option(help="Of --train; twice for pairs.", show_default="text")
    ] = None,
    label_column: Annotated[str | None, typer.Option(help="Of --train.", show_default="label")] = None,
    template: Annotated[str, typer.Option(help="The question, as '{text} It was'.", show_default="the task's")] = "",
    word: Annotated[
        list[str] | None, typer.Option(help="The answer of each class, in order.", show_default=False)
    ] = None,
    setup: Annotated[str, typer.Option(help="prompt, similarity or head.", show_default="what the model can")] = "",
    peft: Annotated[str, typer.Option(help="none, lora, prefix, prompt or ia3.")] = "none",
    method: Annotated[str, typer.Option(help="vs2p, mezo or stp.")] = "vs2p",
    lr: Annotated[float | None, typer.Option(help="Step size.", show_default="by method")] = None,
    rho: Annotated[
        float | None, typer.Option(help="How far from the weights the loss is probed.", show_default="0.001")
    ] = None,
    directions: Annotated[int, typer.Option(help="Directions a step.")] = 1,
    distribution: Annotated[str, typer.Option(help="rademacher, normal, uniform or sphere.")] = "rademacher",
    steps: Annotated[int, typer.Option(min=1, help="Length of the run.")] = 1000,
    batch: Annotated[int, typer.Option(min=1, help="Examples a step.")] = 16,
    objective: Annotated[str, typer.Option(help="loss, accuracy or f1.")] = "loss",
    decay: Annotated[str, typer.Option(help="cosine, linear or none.")] = "cosine",
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1)] = 0,
    evaluations: Annotated[int, typer.Option(min=1, help="How often to look at the test set.")] = 10,
    test_examples: Annotated[int, typer.Option(min=0, help="On how many of it; 0 is all.")] = 0,
    max_length: Annotated[int, typer.Option(help="Tokens of an example at most.")] = 128,
    pad_token: Annotated[
        str, typer.Option(help="For a tokenizer that has none, with a head.", show_default=False)
    ] = "",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    out: Annotated[Path, typer.Option(help="Folder of the result.")] = Path("tuned"),
    ledger: Annotated[Path | None, typer.Option(help="Also copy the ledger there.", show_default=False)] = None,
    download: Annotated[bool, typer.Option("--download", help="Allow the hub.")] = False,
    device: Device = None,
    threads: Threads = None,
    quiet: Silent = False,
    json: Json = False,
) -> None:
    """Tune a model of language to a task or to your own texts, with forward passes only.

    Stopped by Ctrl-C or otherwise, the same command goes on where it stopped.
    """
    check_transformers()
    from forwardtune.finetuning import tuned

    if (task is None) == (train is None):
        raise ExperimentError("name either a task (--task sst2 --data DIR) or a table (--train FILE)")
    if task and (test or text_column or label_column):
        raise ExperimentError("--test, --text-column and --label-column are of a table of your own; leave them out")
    if ledger and ledger.exists() and not (out / tuned.SETTINGS).exists():
        raise ExperimentError(f"{ledger} is there already; choose another name for --ledger")
    if task:
        one_of("task", task, [name for name in TEXTS if name != "files"])
    by = _method(method, peft, lr, {"rho": rho, "directions": directions, "distribution": distribution})
    workload = Workload(
        name=task or (train or Path()).stem,
        data=task or "files",
        network=TRANSFORMER,
        weights=model,
        batch=batch,
        seeds=(seed,),
        queries=steps * by.queries_per_step,
        evaluations=min(evaluations, steps),
        train_examples=200,
        test_examples=test_examples,
        setup=setup,
        adapter=peft,
        objective=objective,
        template=template,
        words=tuple(word or ()),
        max_length=max_length,
        pad_token=pad_token,
        dtype=dtype,
        train=str(train.resolve()) if train else "",
        test=str(test.resolve()) if test else "",
        text=tuple(text_column or ["text"]) if train else (),
        label=label_column or "label" if train else "",
    )
    one_of("decay", decay, DECAYS)
    machine = Machine.choose(device, workers=1, threads=threads)
    torch.set_num_threads(machine.threads)
    listener = _Tells(listener_for(quiet, json, None), quiet or json)
    with interruptible(), listener:
        result = tuned.finetune(
            Run(workload, by, by.lr[0], seed, decay),
            out,
            Sources(data, Path(), download),
            device=machine.device,
            tell=listener,
        )
    if ledger:
        ledger.parent.mkdir(parents=True, exist_ok=True)
        ledger.write_bytes((out / "run.ledger").read_bytes())
    if json:
        print(json_lines.dumps({"event": "saved", "model": str(out), "final": result["final"]}))
        return
    changes = ", ".join(
        f"{name} {100 * result['curve'][name][0]:.1f} to {100 * result['final'][name]:.1f}"
        for name in result["metrics"]
    )
    majority = result["data"].get("majority")
    console.print(f"test {changes}" + (f" (commonest class {100 * majority:.1f})" if majority else ""), markup=False)
    if 2 * result["plateaus"] > steps:
        console.print(
            f"{result['plateaus']} of {steps} steps saw no difference at all: raise --rho or --batch", style="yellow"
        )
    console.print(f"saved: {out}\nask it: forwardtune predict --model {out} --text '...'", markup=False)


def predict(
    model: Annotated[Path, typer.Option(help="A folder that `forwardtune finetune` made.")],
    text: Annotated[list[str] | None, typer.Option(help="A text; twice for a pair.", show_default=False)] = None,
    input: Annotated[
        Path | None, typer.Option(help="A table of texts: .csv, .tsv, .jsonl.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where to write, .csv or .jsonl.", show_default="standard output")
    ] = None,
    device: Device = None,
) -> None:
    """Ask a tuned model."""
    if (text is None) == (input is None):
        raise ExperimentError("give either texts (--text '...') or a table of them (--input FILE)")
    if out and out.suffix not in (".csv", ".jsonl"):
        raise ExperimentError(f"{out} must end in .csv or .jsonl")
    check_transformers()
    from forwardtune.finetuning.tuned import Tuned
    from forwardtune.tasks.texts.data import rows, texts_of

    found = rows(input) if input else []
    asked = Tuned(model, Machine.choose(device, workers=1).device)
    if text:
        if len(text) != len(asked.columns):
            wanted = ", ".join(asked.columns)
            raise ExperimentError(f"an example of this model is {wanted}: give --text for each, not {len(text)} times")
        found = [("the command", dict(zip(asked.columns, text, strict=True)))]
    answers: list[dict[str, Any]] = []
    for (_, row), answer in zip(found, asked.answers(texts_of(found, asked.columns)), strict=True):
        sure = {} if answer.probability is None else {"probability": round(answer.probability, 4)}
        answers.append({**row, "prediction": answer.prediction, **sure})
    content = as_csv(answers) if out and out.suffix == ".csv" else _jsonl(answers)
    if out:
        write_text(out, content)
        console.print(f"wrote {len(answers):,} predictions to {out}", markup=False)
    else:
        print(content, end="")


def _method(name: str, adapter: str, lr: float | None, settings: dict[str, Any]) -> Method:
    known = {kind.lower(): kind for kind in METHODS if kind in RATES}
    one_of("method", name.lower(), known)
    kind = known[name.lower()]
    if kind == "STP" and settings["rho"] is not None:
        raise ExperimentError("STP probes at its --lr and has no rho; leave --rho out")
    settings = {name: value for name, value in settings.items() if value is not None}
    rate = RATES[kind][adapter != "none"] if lr is None else lr
    return Method(kind, kind, (rate,), settings)


class _Tells(Listener):
    """Says what will be tuned before the run begins, then passes events on."""

    def __init__(self, then: Listener, silent: bool) -> None:
        self.then, self.silent = then, silent

    def __enter__(self) -> Listener:
        return self.then.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.then.__exit__(*error)

    def __call__(self, event: Event) -> None:
        if event["event"] == "start" and not self.silent:
            console.print(event["about"], markup=False)
        self.then(event)


def _jsonl(found: list[dict[str, Any]]) -> str:
    return "".join(json_lines.dumps(row, ensure_ascii=False) + "\n" for row in found)


def register(app: typer.Typer) -> None:
    for command in (finetune, predict):
        app.command()(command)
