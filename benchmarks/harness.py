"""Shared by all benchmarks: interleaved timing, best of several rounds; ratios as a table and as JSON."""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

Row = dict[str, str | float]


def arguments(description: str) -> argparse.ArgumentParser:
    """Those that every benchmark of rounds has."""
    parser = without_rounds(description)
    parser.add_argument("--rounds", type=int, default=7, help="rounds, of which the best counts (default 7)")
    return parser


def without_rounds(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to this file")
    return parser


def interleaved(candidates: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The best time of each candidate in seconds.

    Every round runs each candidate once, so that all suffer the same disturbances; every other round runs backwards,
    so that none always follows the one that leaves the most memory behind.
    """
    best = dict.fromkeys(candidates, float("inf"))
    for run in candidates.values():
        run()
    for number in range(rounds):
        order = list(candidates.items())
        for name, run in reversed(order) if number % 2 else order:
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def ratios(seconds: Mapping[str, float], baseline: str) -> list[Row]:
    return [
        {"name": name, "baseline": baseline, "ratio": value / seconds[baseline], "seconds": value}
        for name, value in seconds.items()
    ]


def show(title: str, rows: list[Row]) -> None:
    """Prints the rows as a table."""
    units = [unit for unit in ("seconds", "megabytes") if any(unit in row for row in rows)]
    table = Table("", *units, "ratio", title=title, caption=f"ratio: against {rows[0]['baseline']}")
    for row in rows:
        measured = [f"{row[unit]:.4g}" if unit in row else "" for unit in units]
        ratio = row["ratio"]
        table.add_row(str(row["name"]), *measured, f"{ratio:.2f}" if ratio >= 0.095 or not ratio else f"{ratio:.3f}")
    Console().print(table)


def finish(rows: list[Row], path: Path | None) -> None:
    """Prints the machine, and writes the rows as JSON if a path is given."""
    print(f"{processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(rows, indent=1) + "\n")


def processor() -> str:
    """The processor's name, as Linux reports it."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.machine()
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()
