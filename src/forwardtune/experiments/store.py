"""A folder of results: one JSON file a run, there whole or not at all.

store.json            which version of the format this is
spec.toml             the comparison that was run last
runs/ID.json          the result of a finished run
runs/ID.ledger        its steps (and, beside it, the state to go on from)
runs/ID.looks         evaluations of a run under way
bases/ID.safetensors  the weights that runs of a workload start from
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forwardtune.errors import ExperimentError

SCHEMA = 1


class Store:
    """Results in a folder, made if it is not there."""

    def __init__(self, folder: Path | str, *, create: bool = True) -> None:
        self.folder = folder = Path(folder)
        self.runs, self.bases = folder / "runs", folder / "bases"
        mark = folder / "store.json"
        try:
            if not mark.exists():
                if not create or (folder.exists() and any(file.name != _new(mark).name for file in folder.iterdir())):
                    raise ExperimentError(
                        f"{folder} holds no results of a comparison; name the folder that `forwardtune compare` made"
                        + (", or a new one" if create else "")
                    )
                folder.mkdir(parents=True, exist_ok=True)
                write(mark, {"schema": SCHEMA})
            found = read(mark).get("schema")
            for part in (self.runs, self.bases):
                part.mkdir(exist_ok=True)
        except OSError as error:
            raise ExperimentError(f"the results in {folder} cannot be used ({error})") from None
        if found != SCHEMA:
            raise ExperimentError(
                f"{folder} was written by another version of forwardtune (format {found}; this one has format "
                f"{SCHEMA}); use that version for it, or choose another folder"
            )

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Refuses to let two comparisons write one folder."""
        try:
            import fcntl
        except ImportError:
            raise ExperimentError("comparisons run on Linux and macOS only, for the locks that they need") from None
        with open(self.folder / ".lock", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ExperimentError(
                    f"another process is writing to {self.folder}; wait for it, or choose another folder with --out"
                ) from None
            yield

    def result(self, run_id: str) -> dict[str, Any] | None:
        """What a run came to, if it has finished."""
        file = self.runs / f"{run_id}.json"
        if not file.exists():
            return None
        result = read(file)
        if result.get("schema") != SCHEMA or result.get("id") != run_id:
            raise ExperimentError(
                f"{file} is not a result of this version of forwardtune; move it away to run it again"
            )
        return result

    def save(self, result: dict[str, Any]) -> None:
        write(self.runs / f"{result['id']}.json", {"schema": SCHEMA, **result})
        (self.runs / f"{result['id']}.looks").unlink(missing_ok=True)

    @property
    def spec_file(self) -> Path:
        return self.folder / "spec.toml"


def read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ExperimentError(f"{file} cannot be read ({error}); move it away to have it made again") from None
    if not isinstance(content, dict):
        raise ExperimentError(f"{file} is not a result; move it away to have it made again")
    return content
