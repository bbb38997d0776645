"""Options and small pieces that commands share."""

from __future__ import annotations

import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_type_hints

import typer
from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from typer.models import OptionInfo

from forwardtune.errors import ExperimentError, printable

if TYPE_CHECKING:
    from forwardtune.cli.progress import Listener
    from forwardtune.experiments.spec import Spec


class Console(RichConsole):
    """Whatever is shown, what it quotes from files cannot be obeyed by the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


console = Console(highlight=False, soft_wrap=True)

Function = TypeVar("Function", bound=Callable[..., None])
VALUES = {str: "TEXT", Path: "PATH", int: "INTEGER", float: "NUMBER", list: "TEXT"}
"""What `--help` calls the values of options, by their type."""


def command(app: typer.Typer) -> Callable[[Function], Function]:
    """Registers a function as a command."""

    def register(function: Function) -> Function:
        hints = get_type_hints(function, include_extras=True)
        for hint in hints.values():
            for info in get_args(hint)[1:]:
                if isinstance(info, OptionInfo) and info.metavar is None:
                    info.metavar = VALUES.get(_plain(get_args(hint)[0]))
        function.__annotations__ = hints  # evaluated, lest Typer do so again
        app.command()(function)
        return function

    return register


def _plain(kind: Any) -> Any:
    """The type of a value that may be None, or of which there may be several."""
    first = get_args(kind)[0] if type(None) in get_args(kind) else kind
    return getattr(first, "__origin__", first)


SpecFile = Annotated[Path | None, typer.Argument(metavar="SPEC", help="A comparison in TOML.", show_default=False)]
Preset = Annotated[str | None, typer.Option(help="One that ships, see `forwardtune presets`.", show_default=False)]
Out = Annotated[Path | None, typer.Option(help="Folder of the results.", show_default="results/NAME")]
Data = Annotated[
    Path | None,
    typer.Option(envvar="FORWARDTUNE_DATA", help="Folder with MNIST, CIFAR-10, GLUE, weights.", show_default=False),
]
Download = Annotated[bool, typer.Option("--download", help="Fetch data and weights that are missing.")]
Device = Annotated[str | None, typer.Option(help="Where the runs are made.", show_default="a GPU if there is one")]
Threads = Annotated[int | None, typer.Option(min=1, max=1024, help="Threads of a run.", show_default="all cores")]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the noise and the batches.")]
Workload = Annotated[str | None, typer.Option(help="By its name.", show_default="the first")]
Silent = Annotated[bool, typer.Option("--quiet", "-q", help="Print the summary only.")]
Json = Annotated[bool, typer.Option("--json", help="Print events as JSON, one per line.")]
Board = Annotated[bool, typer.Option("--tensorboard", help="Also log to OUT/tensorboard.")]


def listener_for(quiet: bool, as_json: bool, board: Path | None = None) -> Listener:
    from forwardtune.cli.progress import JsonLines, Live, Quiet, TensorBoard

    if quiet and as_json:
        raise ExperimentError("choose one of --quiet and --json")
    listener = JsonLines() if as_json else Quiet() if quiet else Live()
    return TensorBoard(board, listener) if board else listener


class _Stopped(KeyboardInterrupt):
    """The system or the terminal asked the command to end, by a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C, SIGTERM and a terminal that is closed end the command with a sentence; ignored ones (nohup) do not."""
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    main = threading.current_thread() is threading.main_thread()
    ours = [number for number in numbers if main and signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _stop)
    try:
        yield
    except (KeyboardInterrupt, OSError) as raised:
        stop = raised.__context__ if isinstance(raised, OSError) else raised  # a display fails whose terminal is gone
        if not isinstance(stop, KeyboardInterrupt):
            raise
        with suppress(OSError):  # the terminal is gone
            Console(stderr=True, highlight=False).print("stopped; the same command resumes where it left off")
        raise typer.Exit(128 + (stop.number if isinstance(stop, _Stopped) else signal.SIGINT)) from None
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _stop(number: int, frame: object) -> None:
    raise _Stopped(number)


def spec_of(file: Path | None, preset: str | None) -> Spec:
    from forwardtune import presets as shipped
    from forwardtune.experiments import spec as specs

    if (file is None) == (preset is None):
        raise ExperimentError("name either a spec file or a preset (--preset digits); `forwardtune presets` lists them")
    if file and not file.exists() and str(file) in shipped.files():
        raise ExperimentError(f"there is no file {file}; for the preset of that name write --preset {file}")
    return specs.load(file) if file else shipped.load(preset or "")


def default_folder(spec: Spec, preset: str | None) -> Path:
    return Path("results") / (preset or spec.name)


@contextmanager
def notes() -> Iterator[None]:
    """Prints warnings as notes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        Console(stderr=True, soft_wrap=True, highlight=False).print(
            f"note: {warning.message}", style="yellow", markup=False
        )
