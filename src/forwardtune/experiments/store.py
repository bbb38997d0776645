"""A folder of results: one JSON file a run, there whole or not at all.

store.json            which version of the format this is
spec.toml             the comparison that was run last
runs/ID.json          the result of a finished run
runs/ID.ledger        its steps (and, beside it, the state to resume from)
runs/ID.looks         evaluations of a run under way
runs/ID.checkpoint    what one by backpropagation resumes from, which has no ledger
sweeps/ID.json        what a sweep over rates came to
bases/ID.safetensors  the weights that runs of a workload start from
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forwardtune.errors import ExperimentError
from forwardtune.experiments.result import Json, RunResult
from forwardtune.files import lock, parse_json, translated, write_json

SCHEMA = 1


class Store:
    """Results in a folder, made if it does not exist."""

    def __init__(self, folder: Path | str, *, create: bool = True) -> None:
        self.folder = folder = Path(folder)
        self.runs, self.bases, self.sweeps = folder / "runs", folder / "bases", folder / "sweeps"
        mark = folder / "store.json"
        with translated(ExperimentError, f"the results in {folder} cannot be used"):
            if not mark.exists():
                if not create or (folder.exists() and not all(_is_beginning(file) for file in folder.iterdir())):
                    raise ExperimentError(
                        f"{folder} holds no results of a comparison; name the folder that `forwardtune compare` made"
                        + (", or a new one" if create else "")
                    )
                folder.mkdir(parents=True, exist_ok=True)
                write_json(mark, {"schema": SCHEMA})
            schema = read_json(mark).get("schema")
            for part in (self.runs, self.bases):
                part.mkdir(exist_ok=True)
        if schema != SCHEMA:
            raise ExperimentError(
                f"{folder} was written by another version of forwardtune (format {schema}; this one has format "
                f"{SCHEMA}); use that version for it, or choose another folder"
            )

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Refuses to let two comparisons write one folder."""
        with open(self.folder / ".lock", "w") as file:
            try:
                alone = lock(file.fileno())
            except ImportError:
                raise ExperimentError("comparisons run on Linux and macOS only, for the locks they need") from None
            if not alone:
                raise ExperimentError(
                    f"another process is writing to {self.folder}; wait for it, or choose another folder with --out"
                )
            yield

    def result(self, run_id: str) -> RunResult | None:
        """What a run came to, if it has finished."""
        file = self.runs / f"{run_id}.json"
        if not file.exists():
            return None
        table = read_json(file)
        try:
            result = result_in(table, str(file))
            if result.id != run_id:
                raise ExperimentError(f"{file} is the result of another run")
        except ExperimentError as error:
            raise ExperimentError(f"{error}; move it away to run it again") from None
        return result

    def save(self, result: RunResult) -> None:
        file = self.runs / f"{result.id}.json"
        with translated(ExperimentError, f"{file} cannot be written; nothing was changed"):
            write_json(file, {"schema": SCHEMA, **result.to_json()})
        self.evaluations(result.id).unlink(missing_ok=True)
        self.checkpoint(result.id).unlink(missing_ok=True)

    def ledger(self, run_id: str) -> Path:
        return self.runs / f"{run_id}.ledger"

    def evaluations(self, run_id: str) -> Path:
        return self.runs / f"{run_id}.looks"

    def checkpoint(self, run_id: str) -> Path:
        return self.runs / f"{run_id}.checkpoint"

    def save_sweep(self, sweep_id: str, outcome: Json) -> None:
        file = self.sweeps / f"{sweep_id}.json"
        with translated(ExperimentError, f"{file} cannot be written"):
            self.sweeps.mkdir(exist_ok=True)
            write_json(file, {"schema": SCHEMA, "id": sweep_id, **outcome})

    def base(self, base_id: str) -> Path:
        return self.bases / f"{base_id}.safetensors"

    @property
    def spec_file(self) -> Path:
        return self.folder / "spec.toml"


def result_in(table: Any, where: str) -> RunResult:
    """The result that a table from JSON is, after all checks."""
    if not isinstance(table, dict):
        raise ExperimentError(f"{where} is not the result of a run, but {table!r}")
    if table.get("schema") != SCHEMA:
        raise ExperimentError(f"{where} has format {table.get('schema')!r}, not {SCHEMA}")
    return RunResult.from_json(table, where)


def _is_beginning(file: Path) -> bool:
    """Whether a file is what a process left that was killed while it made the store."""
    return file.name.startswith(".store.json.") and file.name.endswith(".new")


def read_json(file: Path) -> Json:
    try:
        content = parse_json(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ExperimentError(f"{file} cannot be read ({error}); move it away to have it made again") from None
    if not isinstance(content, dict):
        raise ExperimentError(f"{file} is not a result; move it away to have it made again")
    return content
