"""`forwardtune finetune`, `predict` and `replay`: a language model tuned to texts, asked, and made again."""

from __future__ import annotations

import json as json_lines
import math
from pathlib import Path
from shutil import copyfile
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from forwardtune._compat import check_transformers
from forwardtune.cli.options import (
    Data,
    Device,
    Json,
    Seed,
    Silent,
    command,
    console,
    interruptible,
    listener_for,
    notes,
)
from forwardtune.errors import ExperimentError
from forwardtune.files import replace_file, translated, write_text
from forwardtune.toml_tables import one_of

if TYPE_CHECKING:
    from forwardtune.arguments import Directions
    from forwardtune.experiments.spec import Method
    from forwardtune.finetuning.kept import Keep

METHODS_HERE = ("VS2P", "MeZO", "STP")
"""Those that find their rate while training."""


Base = Annotated[
    str | None, typer.Option(help="The model that was tuned: its folder, GGUF file or name.", show_default=False)
]
HubDownload = Annotated[bool, typer.Option("--download", help="Allow downloads from the Hub.")]


def finetune(
    model: Annotated[
        str, typer.Option(help="Folder or GGUF file of the model, or with --download its name on the hub.")
    ],
    task: Annotated[str | None, typer.Option(help="sst2, mrpc, qnli, rte or stsb.", show_default=False)] = None,
    data: Data = None,
    train: Annotated[
        Path | None, typer.Option(help="Texts of your own: .csv, .tsv, .jsonl; for lm also .txt.", show_default=False)
    ] = None,
    test: Annotated[Path | None, typer.Option(help="Texts to test on.", show_default="a tenth of --train")] = None,
    text_column: Annotated[
        list[str] | None, typer.Option(help="Text column of --train; repeat it for pairs.", show_default="text")
    ] = None,
    label_column: Annotated[str | None, typer.Option(help="Label column of --train.", show_default="label")] = None,
    template: Annotated[
        str, typer.Option(help="The question, as '{text} It was'.", show_default="the task's, or '{text} It is'")
    ] = "",
    word: Annotated[
        list[str] | None, typer.Option(help="The answer of each class, in order.", show_default=False)
    ] = None,
    setup: Annotated[
        str, typer.Option(help="prompt, similarity, head or lm.", show_default="inferred from the model")
    ] = "",
    fit: Annotated[
        int | None,
        typer.Option(
            help="First fit a new head, how answers are read, or for lm the last norm to so many examples.",
            show_default="2000 to 10000; lm 300",
        ),
    ] = None,
    adapter: Annotated[str, typer.Option(help="none, lora, prefix, prompt or ia3.")] = "none",
    peft: Annotated[str | None, typer.Option(hidden=True)] = None,
    method: Annotated[str, typer.Option(help="vs2p, mezo or stp.")] = "vs2p",
    lr: Annotated[float | None, typer.Option(help="Learning rate.", show_default="found while training")] = None,
    rho: Annotated[
        float | None,
        typer.Option(help="How far the loss is probed, with an --lr.", show_default="0.01; absolute 0.001"),
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(
            help="Units of --lr and --rho: relative to the weights, or absolute.",
            show_default="relative",
        ),
    ] = None,
    directions: Annotated[
        str, typer.Option(help="Directions per step, per-example, or auto (per example where it pays).")
    ] = "1",
    distribution: Annotated[str, typer.Option(help="rademacher, normal, uniform or sphere.")] = "rademacher",
    probes: Annotated[
        str | None,
        typer.Option(help="How they are made: in-place or layerwise.", show_default="layerwise with 16 bits"),
    ] = None,
    rounding: Annotated[
        str | None, typer.Option(help="Of 16-bit weights: stochastic or nearest.", show_default="stochastic")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Length of the run.", show_default="1000")] = None,
    queries: Annotated[
        int | None, typer.Option(min=1, help="Its length in queries instead.", show_default=False)
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Its length in minutes instead, planned by measuring.", show_default=False)
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Examples per step.")] = 16,
    objective: Annotated[
        str, typer.Option(help="loss, accuracy or f1 of the labels; lm: of the texts themselves.")
    ] = "loss",
    decay: Annotated[
        str | None, typer.Option(help="cosine, linear or none, with an --lr.", show_default="cosine")
    ] = None,
    seed: Seed = 0,
    evaluations: Annotated[
        int | None,
        typer.Option(min=1, help="How often to evaluate on the test set.", show_default="10; with --minutes at most"),
    ] = None,
    keep: Annotated[
        str, typer.Option(help="Which weights to save: best, at the best evaluation on the test set, or last.")
    ] = "best",
    test_examples: Annotated[int, typer.Option(min=0, help="On how many of its examples; 0 means all.")] = 0,
    max_length: Annotated[int, typer.Option(min=8, help="Maximum tokens per example.")] = 128,
    pad_token: Annotated[
        str, typer.Option(help="For a tokenizer that has none, with a head.", show_default=False)
    ] = "",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, float64, int8 or nf4.")] = "float32",
    out: Annotated[Path, typer.Option(help="Folder of the result.")] = Path("tuned"),
    ledger: Annotated[Path | None, typer.Option(help="Also copy the ledger there.", show_default=False)] = None,
    download: HubDownload = False,
    device: Device = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Threads of the run.", show_default="1 or all free cores, as is faster"),
    ] = None,
    quiet: Silent = False,
    json: Json = False,
) -> None:
    """Tune a language model with forward passes only.

    It learns a task, or texts of your own. Stopped by Ctrl-C or otherwise, the same command resumes where it left off.
    """
    if peft is not None:
        typer.echo("--peft is called --adapter now, and will be removed in the next release", err=True)
        adapter = peft

    if (task is None) == (train is None):
        raise ExperimentError("name either a task (--task sst2 --data DIR) or a table or text file (--train FILE)")
    if task and (test or text_column or label_column):
        raise ExperimentError("--test, --text-column and --label-column apply only with --train; leave them out")
    is_language = "lm" in (objective, setup)
    if train and train.suffix == ".txt" and not is_language:
        raise ExperimentError(
            f"{train} has texts without labels; add --objective lm to learn the texts themselves, or give a table "
            "(.csv, .tsv, .jsonl) with a column of labels"
        )
    if is_language and (label_column or setup not in ("", "lm") or objective not in ("loss", "lm")):
        raise ExperimentError(
            "with --objective lm the texts themselves are learned; leave --label-column and other setups out"
        )
    for file in (train, test):
        if file and not file.is_file():
            raise ExperimentError(f"there is no file at {file}; put it there, or name another")
    if out.exists() and not out.is_dir():
        raise ExperimentError(f"{out} is a file; choose a folder with --out")
    if sum(length is not None for length in (steps, queries, minutes)) > 1:
        raise ExperimentError("--steps, --queries and --minutes each say how long the run is; give one of them")
    _check_positive("--minutes", minutes)
    settings = {"rho": rho, "scale": scale, "directions": _directions(directions), "distribution": distribution}
    settings |= {"probes": probes, "rounding": rounding}
    kind = _kind(method, lr, settings)

    # What is checked above needs no imports, and what comes next torch only: transformers takes seconds.
    from forwardtune.cli.tuning import Tuning, outcome
    from forwardtune.experiments.comparison import Machine
    from forwardtune.experiments.plan import Run
    from forwardtune.experiments.result import scores_to_json
    from forwardtune.experiments.spec import DECAYS, LEAST_AUTO
    from forwardtune.finetuning.budget import EVALUATIONS
    from forwardtune.finetuning.kept import KEEPS
    from forwardtune.tasks import Sources, TextWorkload
    from forwardtune.tasks.texts.workload import FILES, GLUE, LM, PACKED, PLAIN, TRANSFORMER

    if task:
        one_of("task", task, GLUE)
    by = _method(kind, lr, settings)
    if by.is_auto and decay is not None:
        raise ExperimentError("--decay goes with an --lr; without one steps become smaller by themselves")
    budget = queries or (steps or 1000) * by.queries_per_step
    if by.is_auto and budget < LEAST_AUTO:
        least = f"--steps {-(-LEAST_AUTO // by.queries_per_step)}" if steps else f"--queries {LEAST_AUTO}"
        raise ExperimentError(f"{budget} queries are too few to find a rate; give {least}, or an --lr")
    usual_fit = 2000 if minutes else min(10_000, max(2000, budget * batch // 3))
    if is_language:
        usual_fit = 0 if adapter != "none" or dtype in PACKED else 300
    workload = TextWorkload(
        name=task or (train or Path()).stem,
        data=task or (PLAIN if is_language else FILES),
        network=TRANSFORMER,
        weights=model,
        batch=batch,
        seeds=(seed,),
        queries=budget,
        evaluations=min(evaluations or EVALUATIONS, max(1, budget // by.queries_per_step)),
        train_examples=200,
        test_examples=test_examples,
        setup=LM if is_language else setup,
        fit=usual_fit if fit is None else fit,
        adapter=adapter,
        objective="loss" if is_language else objective,
        template=template,
        words=tuple(word or ()),
        max_length=max_length,
        pad_token=pad_token,
        dtype=dtype,
        train=str(train.resolve()) if train else "",
        test=str(test.resolve()) if test else "",
        text=tuple(text_column or ["text"]) if train else (),
        label=label_column or "label" if train and not is_language else "",
    )
    if decay is not None:
        one_of("decay", decay, DECAYS)
    one_of("keep", keep, KEEPS)
    sources = Sources(data, Path(), download)
    sources.model(model)
    for table in (train, test):
        if table:
            sources.file(str(table))
    check_transformers()
    from forwardtune.finetuning.tune import finetune as make
    from forwardtune.finetuning.tuned import LEDGER, SETTINGS

    if ledger and ledger.exists() and not (out / SETTINGS).exists():
        raise ExperimentError(f"{ledger} already exists; choose another name for --ledger")
    listener = listener_for(quiet, json) if quiet or json else Tuning()
    with interruptible(), listener:
        result, kept = make(
            Run(workload, by, by.lr[0], seed, "none" if by.is_auto else decay or "cosine"),
            out,
            sources,
            device=Machine.choose(device).device,
            threads=threads,
            minutes=minutes,
            evaluations=evaluations,
            keep=cast("Keep", keep),
            tell=listener,
        )
    if ledger:
        with translated(ExperimentError, f"{ledger} cannot be written"):
            ledger.parent.mkdir(parents=True, exist_ok=True)
            replace_file(ledger, lambda new: copyfile(out / LEDGER, new))
    if json:
        final = scores_to_json(kept.scores)
        print(json_lines.dumps({"event": "saved", "model": str(out), "queries": kept.queries, "final": final}))
        return
    for line, style in outcome(result, kept, by.queries_per_step):
        console.print(line, markup=False, style=style)
    named = f" --base {model}" if adapter != "none" else ""
    console.print(f"saved: {out}\ntry it: forwardtune predict --model {out}{named} --text '...'", markup=False)


def predict(
    model: Annotated[Path, typer.Option(help="A folder that `forwardtune finetune` made.")],
    text: Annotated[list[str] | None, typer.Option(help="A text; twice for a pair.", show_default=False)] = None,
    input: Annotated[
        Path | None, typer.Option(help="A table of texts: .csv, .tsv, .jsonl; .txt: a text a line.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where to write, .csv or .jsonl.", show_default="standard output")
    ] = None,
    base: Base = None,
    download: HubDownload = False,
    device: Device = None,
) -> None:
    """Predict with a tuned model.

    Of a language model it is told how well it predicts texts: their perplexity.
    """
    if (text is None) == (input is None):
        raise ExperimentError("give either texts (--text '...') or a table of them (--input FILE)")
    if out and out.suffix not in (".csv", ".jsonl"):
        raise ExperimentError(f"{out} must end in .csv or .jsonl")
    check_transformers()
    from forwardtune.experiments.comparison import Machine
    from forwardtune.experiments.report.tables import as_csv
    from forwardtune.finetuning.tuned import Tuned
    from forwardtune.tasks.texts.data import LINE, rows, texts_of
    from forwardtune.tasks.texts.workload import LM

    examples = rows(input) if input else []
    tuned = Tuned(model, Machine.choose(device, workers=1).device, base, download=download)
    columns = tuned.settings.columns
    if text:
        if len(text) != len(columns):
            times = "once" if len(columns) == 1 else "twice"
            raise ExperimentError(
                f"an example of this model is {', '.join(columns)}: give --text {times}, or several examples as a "
                "table with --input"
            )
        examples = [("the command", dict(zip(columns, text, strict=True)))]
    if input and input.suffix == ".txt":
        if len(columns) > 1 and tuned.settings.setup != LM:
            raise ExperimentError(
                f"an example of this model is {', '.join(columns)}: give a table of them, not {input}"
            )
        columns = (LINE,)
    told = tuned.answers(texts_of(examples, columns))
    answers = [{**row, **answer.to_json()} for (_, row), answer in zip(examples, told, strict=True)]
    content = as_csv(answers) if out and out.suffix == ".csv" else _jsonl(answers)
    if out:
        with translated(ExperimentError, f"{out} cannot be written"):
            write_text(out, content)
        console.print(f"wrote {len(answers):,} predictions to {out}", markup=False)
    else:
        print(content, end="")


def replay(
    model: Annotated[Path, typer.Option(help="A folder that `forwardtune finetune` made.")],
    out: Annotated[Path, typer.Option(help="Folder to write the tuned model to.")],
    base: Base = None,
    download: HubDownload = False,
) -> None:
    """Reproduce a tuned model from its base and its ledger.

    Its weights are the same, bit for bit.
    """
    check_transformers()
    from forwardtune.finetuning.tuned import replayed

    with notes():
        replayed(model, base, out, download=download)
    console.print(f"wrote {out}", markup=False)


def _kind(name: str, lr: float | None, settings: dict[str, Any]) -> str:
    """The method's name, once its flags are known to go together."""
    known = {kind.lower(): kind for kind in METHODS_HERE}
    one_of("method", name.lower(), known)
    kind = known[name.lower()]
    if kind == "STP" and settings["rho"] is not None:
        raise ExperimentError("STP probes at its --lr and has no rho; leave --rho out")
    _check_positive("--lr", lr)
    _check_positive("--rho", settings["rho"])
    if lr is not None and settings["directions"] == "auto":
        raise ExperimentError("--directions auto goes without an --lr, which is then found while training")
    if lr is None and settings["rho"] is not None:
        raise ExperimentError("--rho goes with an --lr; without one both are found while training")
    return kind


def _method(kind: str, lr: float | None, settings: dict[str, Any]) -> Method:
    from forwardtune.experiments.spec import Method

    settings = {name: value for name, value in settings.items() if value is not None}
    return Method(kind, kind, ("auto" if lr is None else lr,), settings)


def _directions(text: str) -> Directions:
    if text in ("per-example", "auto"):
        return cast("Directions", text)
    if not text.isdecimal() or not 1 <= int(text) < 2**16:
        raise ExperimentError(f"--directions must be a whole number from 1 to 65535, per-example or auto, not {text!r}")
    return int(text)


def _check_positive(flag: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise ExperimentError(f"{flag} must be above zero and finite, not {value:g}")


def _jsonl(answers: list[dict[str, Any]]) -> str:
    """A line for each, with escapes for what a terminal might obey."""
    lines = (json_lines.dumps(row, ensure_ascii=False) for row in answers)
    escaped = ("".join(c if c.isprintable() else json_lines.dumps(c)[1:-1] for c in line) for line in lines)
    return "".join(line + "\n" for line in escaped)


def register(app: typer.Typer) -> None:
    for function in (finetune, predict, replay):
        command(app)(function)
