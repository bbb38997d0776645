"""`forwardtune sweep`: many rates on the budget of a single run."""

from __future__ import annotations

import json as json_lines
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from forwardtune.cli.options import (
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
from forwardtune.errors import ExperimentError

if TYPE_CHECKING:
    from forwardtune.experiments.spec import Method, Spec
    from forwardtune.experiments.sweep import Outcome

RATES = 10
"""Between the ends of a range."""


def sweep(
    spec: SpecFile = None,
    preset: Preset = None,
    method: Annotated[
        str | None, typer.Option(help="A method of the spec, by its label.", show_default="the first with a grid")
    ] = None,
    workload: Workload = None,
    queries: Annotated[
        int | None, typer.Option(min=1, help="Of all rates together.", show_default="those of a run")
    ] = None,
    rates: Annotated[
        tuple[float, float] | None,
        typer.Option(metavar="LOW HIGH", help="Rates in equal ratios.", show_default="the method's grid"),
    ] = None,
    count: Annotated[int | None, typer.Option(help="How many of --rates.", show_default=str(RATES))] = None,
    eta: Annotated[int, typer.Option(help="One rate in so many goes on.")] = 3,
    seed: Seed = 0,
    out: Out = None,
    data: Data = None,
    download: Download = False,
    device: Device = None,
    threads: Threads = None,
    quiet: Silent = False,
    json: Json = False,
) -> None:
    """Search for a method's rate by successive halving.

    It uses the queries of a single run, everything included. Stopped by Ctrl-C or otherwise, the same command
    resumes where it left off.
    """
    import torch

    from forwardtune.experiments.comparison import Machine
    from forwardtune.experiments.store import Store
    from forwardtune.experiments.sweep import plan_sweep
    from forwardtune.experiments.sweep import sweep as search
    from forwardtune.tasks import Sources, Tasks, prepare

    chosen = spec_of(spec, preset)
    picked = chosen.workload(workload) if workload else chosen.workloads[0]
    by = _method(chosen, method, rates, count)
    machine = Machine.choose(device, threads=threads)
    sources = Sources(data, chosen.folder, download)
    budget = queries or picked.queries or prepare(picked, sources, machine.device).queries
    planned = plan_sweep(chosen, picked, by, queries=budget, seed=seed, eta=eta)
    store = Store(out or default_folder(chosen, preset))
    torch.set_num_threads(machine.threads)
    listener = listener_for(quiet, json)
    with interruptible(), listener:
        outcome = search(planned, store, Tasks(sources, machine.device), listener)
    if json:
        print(json_lines.dumps({"event": "outcome", **outcome.to_json()}, allow_nan=False))
        return
    console.print(verdict(outcome), markup=False)
    console.print(f"outcome: {store.sweeps / planned.id}.json", markup=False)
    if not quiet:
        Console(highlight=False).print(_table(outcome))


def _method(spec: Spec, label: str | None, rates: tuple[float, float] | None, count: int | None) -> Method:
    """The method to sweep, with the rates that are swept."""
    from forwardtune.experiments.sweep import spaced

    if count is not None and rates is None:
        raise ExperimentError("--count applies only with --rates; leave it out to sweep the method's grid")
    first = next((method for method in spec.methods if not method.is_auto), spec.methods[0])
    method = spec.method(label) if label else first
    if rates is None or method.is_auto:
        return method
    return replace(method, lr=spaced(*rates, RATES if count is None else count))


def verdict(outcome: Outcome) -> str:
    """Which rate is left, what its run came to, and what all of it cost."""
    from forwardtune.experiments.result import rate_name
    from forwardtune.experiments.summary import number

    winner, total = outcome.winner, f"The sweep used {outcome.queries:,} queries of {outcome.sweep.budget:,}"
    if winner is None:
        return f"{outcome.sweep.title}: every rate that was left diverged; sweep lower ones. {total}."
    alone = f"{total}, {winner.queries:,} of them for this rate."
    start = f"{outcome.sweep.title}: lr {rate_name(winner.run.lr)} won"
    if winner.diverged:
        return f"{start}, and diverged ({winner.reason}); sweep lower ones. {alone}"
    final = f"training loss {number(winner.final.train_loss)}, {winner.told_score}"
    ends = {outcome.sweep.rates[0]: "lower", outcome.sweep.rates[-1]: "higher"}
    beyond = ends.get(float(winner.run.lr))
    advice = f" It is an end of the rates; a {beyond} one might do better." if beyond else ""
    return f"{start}: {final}. {alone}{advice}"


def _table(outcome: Outcome) -> Table:
    """The losses that each rate was judged by, and how far it came."""
    from forwardtune.experiments.result import rate_name
    from forwardtune.experiments.summary import number

    at = [f"loss at {queries:,}" for queries in outcome.sweep.queries[:-1]]
    table = Table("lr", *at, "queries", "", box=None, padding=(0, 2, 0, 0), header_style="dim")
    for rate in outcome.rates:
        losses = [number(loss) for loss in rate.losses]
        table.add_row(rate_name(rate.lr), *losses, *[""] * (len(at) - len(losses)), f"{rate.queries:,}", rate.status)
    return table


def register(app: typer.Typer) -> None:
    command(app)(sweep)
