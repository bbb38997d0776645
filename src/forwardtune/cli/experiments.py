"""`forwardtune compare`, `run`, `report`, `presets` and `reproduction`.

Commands import what they need when they run, here and in the files beside: `--help` should not wait for torch.
"""

from __future__ import annotations

import json as json_lines
import math
import webbrowser
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from forwardtune.cli.options import (
    Board,
    Console,
    Data,
    Device,
    Download,
    Json,
    Out,
    Preset,
    Seed,
    Silent,
    SpecFile,
    Threads,
    Workload,
    command,
    console,
    default_folder,
    interruptible,
    listener_for,
    spec_of,
)
from forwardtune.errors import ExperimentError, printable
from forwardtune.files import translated, write_text

if TYPE_CHECKING:
    from forwardtune.experiments.scoring import ComparisonScore
    from forwardtune.experiments.store import Store


class Page(StrEnum):
    """What a page is about."""

    paper = "paper"
    rates = "rates"


def compare(
    spec: SpecFile = None,
    preset: Preset = None,
    out: Out = None,
    data: Data = None,
    download: Download = False,
    device: Device = None,
    workers: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Runs at a time.", show_default="one per core")
    ] = None,
    threads: Threads = None,
    quiet: Silent = False,
    json: Json = False,
    tensorboard: Board = False,
    no_report: Annotated[bool, typer.Option("--no-report", help="Make the runs only.")] = False,
    keep: Annotated[
        Path | None,
        typer.Option(help="Folder of results that stay: runs in it are not made again.", show_default=False),
    ] = None,
) -> None:
    """Make all runs of a comparison, and its report.

    That is every method, rate and seed at equal queries. Stopped by Ctrl-C or otherwise, the same command resumes
    where it left off.
    """
    from forwardtune.experiments import report as reports
    from forwardtune.experiments.comparison import Machine
    from forwardtune.experiments.comparison import compare as compare_all
    from forwardtune.experiments.evidence import Evidence
    from forwardtune.experiments.scoring import score
    from forwardtune.experiments.store import Store
    from forwardtune.tasks import Sources, Tasks

    chosen = spec_of(spec, preset)
    if not no_report:
        reports.check_installed()
    evidence = Evidence(keep / f"{preset or chosen.name}.jsonl") if keep else None
    store, machine = Store(out or default_folder(chosen, preset)), Machine.choose(device, workers, threads)
    tasks = Tasks(Sources(data, chosen.folder, download), machine.device)
    listener = listener_for(quiet, json, store.folder / "tensorboard" if tensorboard else None)
    with interruptible(), listener:
        compare_all(chosen, store, tasks, machine, listener, evidence)
    scores = score(chosen, store)
    page = None if no_report else reports.write(scores, store.folder)
    _tell_outcome(scores, page, store, quiet=quiet, as_json=json)


def run(
    method: Annotated[str, typer.Option(help="A method of the spec, by its label.")],
    spec: SpecFile = None,
    preset: Preset = None,
    lr: Annotated[float | None, typer.Option(help="Any rate.", show_default="the first of its grid")] = None,
    seed: Seed = 0,
    workload: Workload = None,
    out: Out = None,
    data: Data = None,
    download: Download = False,
    device: Device = None,
    threads: Threads = None,
    quiet: Silent = False,
    json: Json = False,
    tensorboard: Board = False,
) -> None:
    """Make a single run of a comparison.

    It may be one outside its grid.
    """
    import torch

    from forwardtune.experiments.comparison import Machine, unfinished
    from forwardtune.experiments.plan import plan, run_of
    from forwardtune.experiments.runner import execute
    from forwardtune.experiments.store import Store
    from forwardtune.experiments.summary import number
    from forwardtune.tasks import Sources, Tasks

    chosen = spec_of(spec, preset)
    picked = chosen.workload(workload) if workload else chosen.workloads[0]
    by = chosen.method(method)
    if lr is not None and not 0 < lr < math.inf:
        raise ExperimentError(f"--lr must be above zero and finite, not {lr:g}")
    one = run_of(chosen, picked, by, by.lr[0] if lr is None else lr, seed)
    store, machine = Store(out or default_folder(chosen, preset)), Machine.choose(device, threads=threads)
    tasks = Tasks(Sources(data, chosen.folder, download), machine.device)
    torch.set_num_threads(machine.threads)
    listener = listener_for(quiet, json, store.folder / "tensorboard" if tensorboard else None)
    with interruptible(), store.lock(), listener:
        grid = [made for made in plan(chosen) if made.workload == picked]
        if one in unfinished([*grid, one], store, tasks):
            tasks[picked].check()
        result = execute(one, store, tasks[picked], listener).result
    if not json:
        final = result.final
        loss = number(final.train_loss) if math.isfinite(final.train_loss) else "not finite"
        reason = f" ({result.reason})" if result.reason else ""
        console.print(
            f"{result.title}: {result.status}{reason} after {result.queries:,} queries, training loss {loss}, "
            f"{result.told_score}\nresult: {store.runs / one.id}.json",
            markup=False,
        )


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of results.", show_default=False)],
    open: Annotated[bool, typer.Option("--open", help="Show it in a browser.")] = False,
) -> None:
    """Make the report of a comparison anew.

    That also works while it is running.
    """
    from forwardtune.experiments import report as reports
    from forwardtune.experiments import spec as specs
    from forwardtune.experiments.scoring import score
    from forwardtune.experiments.store import Store

    store = Store(folder, create=False)
    if not store.spec_file.exists():
        if store.sweeps.exists():
            raise ExperimentError(
                f"{folder} has sweeps but no comparison to report; their outcomes are in {store.sweeps}, and "
                "`forwardtune sweep` with the same arguments shows one again"
            )
        raise ExperimentError(f"{folder} has no spec.toml; `forwardtune compare` writes it there")
    chosen = specs.parse(specs.read_text(store.spec_file), folder.resolve().name, folder)
    scores = score(chosen, store)
    page = reports.write(scores, folder)
    _tell_outcome(scores, page, store)
    if open and not webbrowser.open(page.resolve().as_uri()):
        console.print("no browser was found to show it in")


def presets() -> None:
    """List the comparisons that ship."""
    from forwardtune import presets as shipped
    from forwardtune.experiments.plan import plan

    table = Table("preset", "what", "runs", box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in shipped.files():
        spec = shipped.load(name)
        runs = plan(spec, {method.label: method.lr[0] for method in spec.methods})
        table.add_row(name, spec.title, str(len(runs)))
    console.print(table)


def reproduction(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Results of presets, under their names.")],
    about: Annotated[Page, typer.Option(help="The paper's experiments, or rates found while training.")] = Page.paper,
    out: Annotated[Path | None, typer.Option(help="Where to write.", show_default="standard output")] = None,
) -> None:
    """Set our numbers beside the paper's, as a page.

    It is in Markdown; with --about rates they are set beside each other.
    """
    from forwardtune.reproduction.page import page
    from forwardtune.reproduction.rates_page import rates_page

    text = {Page.paper: page, Page.rates: rates_page}[about](folder)
    if out is None:
        print(printable(text))
    else:
        with translated(ExperimentError, f"{out} cannot be written"):
            write_text(out, text)
        console.print(f"wrote {out}", markup=False)


def _tell_outcome(
    scores: ComparisonScore, page: Path | None, store: Store, *, quiet: bool = False, as_json: bool = False
) -> None:
    from forwardtune.experiments.report.tables import tables
    from forwardtune.experiments.summary import sentence

    sentences = [sentence(workload) for workload in scores.workloads]
    if as_json:
        print(json_lines.dumps({"event": "outcome", "summary": sentences, "report": str(page) if page else None}))
        return
    for text in sentences:
        console.print(text, markup=False)
    console.print(f"report: {page}" if page else f"results: {store.folder}", markup=False)
    if quiet:
        return
    every_table = tables(scores)
    for content in (every_table[name] for name in ("accuracy", "loss", "acceleration", "cost") if name in every_table):
        table = Table(*content.header, title=content.title, box=None, padding=(0, 2, 0, 0))
        table.header_style, table.title_justify = "dim", "left"
        for row in content.rows:
            table.add_row(*row)
        console.print()
        Console(highlight=False, markup=False).print(table)


def register(app: typer.Typer) -> None:
    for function in (compare, run, report, presets, reproduction):
        command(app)(function)
