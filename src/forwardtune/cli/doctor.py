"""`forwardtune doctor`: what tuning would do to a model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Column, Table

from forwardtune._compat import check_transformers
from forwardtune.cli.options import Console, command
from forwardtune.errors import ExperimentError

if TYPE_CHECKING:
    from forwardtune.doctor import Examination, Finding

NOTE = (
    "size: of a usual weight. still, changed: of a probe in place at {:.2%} of it, rounded to nearest, the weights "
    "that it does not move, and those that it leaves changed. own: whether examples can have lines of their own"
)


def doctor(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The model's folder, or its name on the Hub.")],
    setup: Annotated[
        str, typer.Option(help="prompt, similarity, head or lm.", show_default="inferred from the model")
    ] = "",
    adapter: Annotated[str, typer.Option(help="none, lora, prefix, prompt or ia3.")] = "none",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, float64, int8 or nf4.")] = "float32",
    rho: Annotated[float, typer.Option(help="How far a probe goes, relative to the weights.")] = 1e-2,
    batch: Annotated[int, typer.Option(min=1, help="Examples per step.")] = 16,
    download: Annotated[bool, typer.Option("--download", help="Allow downloads from the Hub.")] = False,
) -> None:
    """Tell what tuning would do to a model.

    What probes would do to its weights, which lines it can be tuned along, and the memory that it takes.
    """
    import torch

    from forwardtune.doctor import examine
    from forwardtune.tasks import Sources
    from forwardtune.tasks.texts.workload import ADAPTERS, DTYPES, SETUPS
    from forwardtune.toml_tables import one_of

    one_of("adapter", adapter, ADAPTERS)
    one_of("dtype", dtype, DTYPES)
    if setup:
        one_of("setup", setup, SETUPS)
    if not 0 < rho <= 1:
        raise ExperimentError(f"--rho must be above zero and at most 1, not {rho:g}")
    path = Sources(None, Path(), download).model(model) or model
    check_transformers()
    from forwardtune.integrations.huggingface.footprint import footprint
    from forwardtune.tasks.texts.models import PretrainedModel

    language = PretrainedModel(path, setup, adapter, dtype)
    language.check_size(torch.device("cpu"))
    network = language.build(2)[0]
    tokens = language.tokenizer(["It was a good day."] * 2, return_tensors="pt")["input_ids"]
    seen = examine(network, rho, lambda: network(input_ids=tokens))
    console = Console(highlight=False)
    console.print(_table(seen.findings, console.width))
    dtypes = {row.dtype for row in seen.findings}
    alike = f"all are {', '.join(dtypes)}. " if len(dtypes) == 1 else ""
    for line in (alike + NOTE.format(rho), str(footprint(network)), *_consequences(seen, batch)):
        console.print(line, markup=False)


def _table(findings: Sequence[Finding], width: int) -> Table:
    """Names are shown without what all of them begin with, and are broken at their dots if they must be."""
    names = [row.name.split(".") for row in findings]
    places = zip(*(name[:-1] for name in names), strict=False)
    shared = len(list(takewhile(lambda parts: len(set(parts)) == 1, places)))
    mixed = len({row.dtype for row in findings}) > 1
    titles = ("number", *["dtype"] * mixed, "size", "still", "changed")
    columns = [Column(title, justify="right", no_wrap=True) for title in titles]
    table = Table(Column("weights", overflow="fold"), *columns, "own", box=SIMPLE_HEAD, pad_edge=False)
    most = f"{max(row.weights for row in findings):,}"
    cells = (most, *["bfloat16"] * mixed, "0.01-0.01", "100.0%", "changed", "yes")
    room = width - 2 - sum(len(cell) + 3 for cell in cells)
    for row, name in zip(findings, names, strict=True):
        low, high = (f"{scale:.2g}" for scale in row.scale)
        table.add_row(
            escape(_folded(".".join(name[shared:]).removesuffix(".weight"), room)),
            f"{row.weights:,}",
            *[row.dtype] * mixed,
            low if low == high else f"{low}-{high}",
            f"{row.still:.1%}",
            f"{row.changed:.1%}",
            row.no_own_lines or "yes",
        )
    return table


def _folded(name: str, room: int) -> str:
    """A name in lines that are as long as there is room for, each but the last ending in a dot."""
    lines = [""]
    for part in re.findall(r"[^.]*\.?", name):
        if lines[-1] and len(lines[-1] + part) > room:
            lines.append(" ")
        lines[-1] += part
    return "\n".join(lines)


def _consequences(seen: Examination, batch: int) -> Iterator[str]:
    from forwardtune.integrations.huggingface.footprint import size

    if seen.probes == "layerwise":
        yield (
            "probes: layer by layer, since weights have 16 bits; they leave every bit as it was, and take another "
            f"{size(seen.copy)} for a copy of a layer"
        )
    else:
        yield (
            "probes: in place, one pass each; layer by layer (--probes layerwise) they would leave every bit as it "
            "was, and take another "
            f"{size(seen.copy)}"
        )
    if seen.uncovered:
        yield (
            f"lines: common ones; examples cannot have their own in {seen.uncovered[0].name} (one of "
            f"{len(seen.uncovered)} such rows): freeze them for it"
        )
    else:
        yield (
            "lines: common ones, or a line for each example (--directions auto), which takes another "
            f"{size(batch * seen.line)} for {batch} examples"
        )


def register(app: typer.Typer) -> None:
    command(app)(doctor)
