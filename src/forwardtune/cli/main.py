"""The command and what all its parts share: errors are told in a sentence, not in a traceback."""

from __future__ import annotations

import sys
from typing import NoReturn

import typer

from forwardtune.cli import doctor, experiments, finetune, sweep
from forwardtune.cli.ledger import app as ledger
from forwardtune.cli.options import Console
from forwardtune.errors import ForwardTuneError, is_lack_of_memory

app = typer.Typer(
    name="forwardtune",
    help="Fine-tune deep models with forward passes only.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
finetune.register(app)
experiments.register(app)
sweep.register(app)
doctor.register(app)
app.add_typer(ledger, name="ledger")


@app.callback(invoke_without_command=True)
def show_version(show: bool = typer.Option(False, "--version", help="Show the version.", is_eager=True)) -> None:
    if show:
        from importlib.metadata import version

        typer.echo(version("forwardtune"))
        raise typer.Exit


def main() -> None:
    try:
        app()
    except (ForwardTuneError, OSError) as error:
        _fail(str(error))
    except (MemoryError, RuntimeError) as error:
        if not is_lack_of_memory(error):
            raise
        _fail("memory ran out; free some, or choose a smaller model or --batch; a run that had begun can be resumed")


def _fail(text: str) -> NoReturn:
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"error: {text}", style="red", markup=False)
    sys.exit(1)
