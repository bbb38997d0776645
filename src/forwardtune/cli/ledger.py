"""`forwardtune ledger`: look at recorded runs, check, replay, export and compare them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from forwardtune import ledger as ledgers
from forwardtune.record import StepRecord

app = typer.Typer(help="Look at recorded runs, check, replay, export and compare them.", no_args_is_help=True)

File = Annotated[Path, typer.Argument(help="A ledger, live or exported.", show_default=False)]
Until = Annotated[int | None, typer.Option(help="Only so many steps of the run.", show_default="all")]

console = Console(highlight=False)


@app.command()
def show(
    file: File, steps: Annotated[int, typer.Option(min=0, help="How many of the last steps to list.")] = 5
) -> None:
    """Tell what a ledger holds."""
    run = ledgers.read(file)
    header = run.header
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for group in header.groups:
        settings = ", ".join(f"{name} {_number(group.settings[name])}" for name in group.numbers)
        table.add_row("method" if group is header.groups[0] else "", _clean(f"{header.method} ({settings})"))
    table.add_row(
        "noise", f"{header.distribution}, seed {header.seed}, {_count(header.directions, 'direction')} a step"
    )
    dtypes = ", ".join(sorted({parameter.dtype for parameter in header.parameters}))
    table.add_row("weights", f"{header.dimension:,} of {dtypes} in {_count(len(header.parameters), 'tensor')}")
    table.add_row("made", _clean(f"{header.created} by forwardtune {header.version}"))
    done = run.end - header.step
    if done:
        first, last = run.record(header.step), run.record(run.end - 1)
        under_way = ", under way" if run.writing else ""
        table.add_row("steps", f"{done:,}{under_way}" + (f", from step {header.step}" if header.step else ""))
        table.add_row("queries", f"{last.queries - header.queries:,}")
        table.add_row("loss", f"{first.loss:.6g} in the first step, {last.loss:.6g} in the last")
        undone = sum(not run.record(step).taken for step in range(header.step, run.end))
        if undone:
            table.add_row("not taken", _count(undone, "step"))
    else:
        table.add_row("steps", "none yet")
    table.add_row("size", f"{file.stat().st_size:,} bytes")
    if run.damage:
        table.add_row("damage", Text(f"{run.damage}; steps up to {run.end} are sound", "red"))
    console.print(table)
    if done and steps > 0:
        listing = Table("step", "loss", "probes", "t", box=None, padding=(0, 2, 0, 0), header_style="dim")
        for step in range(max(header.step, run.end - steps), run.end):
            listing.add_row(*_cells(run.record(step)))
        console.print()
        console.print(listing)


@app.command()
def verify(file: File) -> None:
    """Check every step of a ledger; the exit code is 1 if any is not sound."""
    run = ledgers.read(file)
    for step in range(run.header.step, run.end):
        run.record(step)
    sound = f"steps {run.header.step} to {run.end - 1} are sound" if run.end > run.header.step else "it has no steps"
    if run.damage:
        console.print(Text(f"damaged: {run.damage}; {sound}, what follows cannot be trusted", "red"), soft_wrap=True)
        raise typer.Exit(1)
    console.print(f"[green]sound:[/] {sound}" + (" (and a run is writing it)" if run.writing else ""))
    if run.state_end < run.end and run.left_buffers(run.end):
        console.print(f"buffers are known after step {run.state_end} only", soft_wrap=True)


@app.command()
def replay(
    file: File,
    base: Annotated[Path, typer.Option(help="The base weights: a safetensors file, or a folder of them.")],
    out: Annotated[Path, typer.Option(help="Where to write the tuned weights.")],
    until: Until = None,
    backend: Annotated[str, typer.Option(help="What moves the weights: auto, numba or reference.")] = "auto",
) -> None:
    """Make tuned weights from base weights and a ledger, bit for bit."""
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("replaying", total=1.0, visible=False)
        with _notes():
            ledgers.replay_file(
                base,
                file,
                out,
                until=until,
                backend=backend,
                progress=lambda done: progress.update(task, completed=done, visible=True),
            )
    console.print(f"wrote {out}", soft_wrap=True, markup=False)


@app.command()
def export(
    file: File,
    out: Annotated[Path | None, typer.Option(help="Where to write.", show_default="FILE with .safetensors")] = None,
    until: Until = None,
) -> None:
    """Make the small file that one sends to a colleague."""
    target = out or file.with_suffix(".safetensors")
    with _notes():
        ledgers.export(file, target, until=until)
    console.print(f"wrote {target}, {target.stat().st_size:,} bytes", soft_wrap=True, markup=False)


@app.command()
def diff(a: File, b: File) -> None:
    """Tell where two runs part; the exit code is 1 if they do."""
    found = ledgers.diff(a, b)
    for name, (one, other) in list(found.fields.items())[:10]:
        console.print(_clean(f"{name}: {one} and {other}"), soft_wrap=True)
    if len(found.fields) > 10:
        console.print(f"and {len(found.fields) - 10} more fields of the header")
    if found.a and found.b:
        console.print(f"the runs part at step {found.step}:")
        table = Table("", "step", "loss", "probes", "t", box=None, padding=(0, 2, 0, 0), header_style="dim")
        table.add_row(_clean(str(a)), *_cells(found.a))
        table.add_row(_clean(str(b)), *_cells(found.b))
        console.print(table)
    elif found.ends[0] != found.ends[1]:
        console.print(f"the runs go the same way as far as both go: to step {found.ends[0]} and to {found.ends[1]}")
    elif not found:
        console.print("the runs are the same")
    if found:
        raise typer.Exit(1)


@contextmanager
def _notes() -> Iterator[None]:
    """Tells warnings as sentences."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        Console(stderr=True, soft_wrap=True, highlight=False).print(
            f"note: {warning.message}", style="yellow", markup=False
        )


def _cells(record: StepRecord) -> list[str]:
    if not record.lines:
        return [str(record.step), f"{record.loss:.6g}", "", "not taken"]
    probes = " ".join(f"{offset:+.4g}" for offset in record.offsets)
    return [str(record.step), f"{record.loss:.6g}", probes, f"{record.t:+.6g}" if record.taken else "not taken"]


def _number(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _clean(text: str) -> Text:
    """What comes from a file is shown as it is, but for what is no character."""
    return Text("".join(c if c.isprintable() else "?" for c in text))


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")
