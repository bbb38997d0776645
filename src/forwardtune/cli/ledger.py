"""`forwardtune ledger`: show, verify, replay, export and compare recorded runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

import forwardtune as ft
from forwardtune.cli.options import Console, command, notes

app = typer.Typer(help="Show, verify, replay, export and compare recorded runs.", no_args_is_help=True)

File = Annotated[Path, typer.Argument(metavar="FILE", help="A ledger, live or exported.", show_default=False)]
Until = Annotated[int | None, typer.Option(help="Stop at this step of the run.", show_default="the end")]

console = Console(highlight=False)


@command(app)
def show(
    file: File, steps: Annotated[int, typer.Option(min=0, help="How many of the last steps to list.")] = 5
) -> None:
    """Show a run, its settings and its last steps."""
    run = ft.ledger.read(file)
    console.print(_summary(run, file.stat().st_size))
    if run.end > run.header.step and steps > 0:
        listing = Table("step", "loss", "probes", "t", box=None, padding=(0, 2, 0, 0), header_style="dim")
        for record in run.records(max(run.header.step, run.end - steps)):
            listing.add_row(*_cells(record))
        console.print()
        console.print(listing)


def _summary(run: ft.ledger.RecordedRun, size: int) -> Table:
    header, table = run.header, Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for group in header.groups:
        settings = ", ".join(f"{name} {_number(group.settings[name])}" for name in group.numbers)
        settings = "lr auto" if header.auto else settings
        table.add_row("method" if group is header.groups[0] else "", _clean(f"{header.method} ({settings})"))
    directions = "a line per example" + ", where it is worth it" * (header.directions == "auto")
    if isinstance(header.directions, int):
        directions = f"{_count(header.directions, 'direction')} per step"
    table.add_row("noise", f"{header.distribution}, seed {header.seed}, {directions}, {header.scale} scale")
    dtypes = ", ".join(sorted({parameter.dtype for parameter in header.parameters}))
    table.add_row("weights", f"{header.dimension:,} of {dtypes} in {_count(len(header.parameters), 'tensor')}")
    table.add_row("recorded", _clean(f"{header.created} by forwardtune {header.version}"))
    if run.end == header.step:
        table.add_row("steps", "none yet")
    else:
        first, last = run.record(header.step), run.record(run.end - 1)
        under_way = ", under way" if run.writing else ""
        start = f", from step {header.step}" if header.step else ""
        table.add_row("steps", f"{run.end - header.step:,}{under_way}{start}")
        table.add_row("queries", f"{last.queries - header.queries:,}")
        table.add_row("loss", f"{first.loss:.6g} in the first step, {last.loss:.6g} in the last")
        not_taken = sum(not record.taken for record in run.records())
        if not_taken:
            table.add_row("not taken", _count(not_taken, "step"))
    table.add_row("size", f"{size:,} bytes")
    if run.damage:
        table.add_row("damage", Text(f"{run.damage}; the steps up to {run.end} are sound", "red"))
    return table


@command(app)
def verify(file: File) -> None:
    """Check every step of a ledger.

    The exit code is 1 if the file is damaged.
    """
    run = ft.ledger.read(file)
    for _ in run.records():  # each is checked when it is read
        pass
    sound = f"steps {run.header.step} to {run.end - 1} are sound" if run.end > run.header.step else "it has no steps"
    if run.damage:
        console.print(Text(f"damaged: {run.damage}; {sound}, the rest cannot be trusted", "red"), soft_wrap=True)
        raise typer.Exit(1)
    console.print(f"[green]sound:[/] {sound}" + (" (the run is under way)" if run.writing else ""))
    if run.state_end < run.end and run.changed_buffers(run.end):
        console.print(f"the model's buffers are known after step {run.state_end} only", soft_wrap=True)


@command(app)
def replay(
    file: File,
    base: Annotated[Path, typer.Option(help="The base weights: a safetensors file or a folder of them.")],
    out: Annotated[Path, typer.Option(help="The file or folder to write the tuned weights to.")],
    until: Until = None,
    backend: Annotated[str, typer.Option(help="What moves the weights: auto, numba or reference.")] = "auto",
) -> None:
    """Reproduce the tuned weights from the base weights and a ledger.

    They are the same, bit for bit.
    """
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("replaying", total=1.0, visible=False)
        with notes():
            ft.ledger.replay_file(
                base,
                file,
                out,
                until=until,
                backend=backend,
                progress=lambda done: progress.update(task, completed=done, visible=True),
            )
    console.print(f"wrote {out}", soft_wrap=True, markup=False)


@command(app)
def export(
    file: File,
    out: Annotated[
        Path | None, typer.Option(help="The file to write.", show_default="FILE with the ending .safetensors")
    ] = None,
    until: Until = None,
) -> None:
    """Write a small file to share, from which others can replay the run."""
    target = out or file.with_suffix(".safetensors")
    with notes():
        ft.ledger.export(file, target, until=until)
    console.print(f"wrote {target}, {target.stat().st_size:,} bytes", soft_wrap=True, markup=False)


@command(app)
def diff(a: File, b: File) -> None:
    """Show where two runs diverge.

    The exit code is 1 if they differ.
    """
    difference = ft.ledger.diff(a, b)
    for name, (one, other) in list(difference.fields.items())[:10]:
        console.print(_clean(f"{name}: {one} and {other}"), soft_wrap=True)
    if len(difference.fields) > 10:
        console.print(f"and {len(difference.fields) - 10} more fields of the header")
    if difference.a and difference.b:
        console.print(f"the runs diverge at step {difference.step}:")
        table = Table("", "step", "loss", "probes", "t", box=None, padding=(0, 2, 0, 0), header_style="dim")
        table.add_row(_clean(str(a)), *_cells(difference.a))
        table.add_row(_clean(str(b)), *_cells(difference.b))
        console.print(table)
    elif difference.ends[0] != difference.ends[1]:
        ends = " and ".join(f"step {end}" for end in difference.ends)
        console.print(f"one run is the beginning of the other: they end at {ends}")
    elif not difference:
        console.print("the runs are the same")
    if difference:
        raise typer.Exit(1)


def _cells(record: ft.StepRecord) -> list[str]:
    if not record.lines:
        return [str(record.step), f"{record.loss:.6g}", "", "not taken"]
    probes = " ".join(f"{offset:+.4g}" for offset in record.offsets)
    return [str(record.step), f"{record.loss:.6g}", probes, f"{record.t:+.6g}" if record.taken else "not taken"]


def _number(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _clean(text: str) -> Text:
    """Text from a file, without markup."""
    return Text(text)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")
