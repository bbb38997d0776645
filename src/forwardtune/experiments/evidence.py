"""Results that stay: one file per comparison, a line per run, small enough for version control.

A line has what the result of a run has, except its trace. Runs that were made at different times and places add up in
it: those that a comparison needs are taken from the file, and those that it makes are added. A run is known by the
hash of its description, which includes the versions of the noise and of the rules, so that runs of another version are
never taken for those of this one.

Small files of base weights stay beside it, in `bases`: those of small networks, and those that have little but a new
head beside weights from elsewhere. Runs that are added on another machine then start from the same bits.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from forwardtune.errors import ExperimentError
from forwardtune.experiments.plan import Run
from forwardtune.experiments.result import RunResult, Trace
from forwardtune.experiments.store import SCHEMA, Store, result_in
from forwardtune.files import parse_json, replace_file, translated, write_text

LARGEST = 1_000_000
"""Bytes up to which the file of a base is kept."""


class Evidence:
    """The results in a file; in none if it does not exist yet."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._results: dict[str, RunResult] = {}
        if not file.exists():
            return
        try:
            lines = file.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ExperimentError(f"{file} cannot be read ({error})") from None
        for number, line in enumerate(lines, 1):
            result = _parse(line, f"line {number} of {file}")
            self._results[result.id] = result

    def result(self, run_id: str) -> RunResult | None:
        """What a run came to, if it is in the file."""
        return self._results.get(run_id)

    def give(self, runs: Iterable[Run], store: Store) -> int:
        """Puts the results of these runs, and their bases, into a store that does not have them; returns how many."""
        for base in {result.base.id for run in runs if (result := self.result(run.id))}:
            _copy(self._base(base), store.base(base))
        given = [result for run in runs if (result := self.result(run.id)) and store.result(run.id) is None]
        for result in given:
            store.save(result)
        return len(given)

    def keep(self, runs: Iterable[Run], store: Store) -> None:
        """Adds the results of these runs that a store has, and writes the file if any of them is new."""
        made = {run.id: result for run in runs if (result := store.result(run.id))}
        new = {id: replace(result, trace=Trace()) for id, result in made.items() if id not in self._results}
        if not new:
            return
        self._results |= new
        lines = (_line(self._results[id]) for id in sorted(self._results))
        with translated(ExperimentError, f"{self.file} cannot be written; nothing was changed"):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            for base in {result.base.id for result in new.values()}:
                if store.base(base).exists() and store.base(base).stat().st_size <= LARGEST:
                    _copy(store.base(base), self._base(base))
            write_text(self.file, "".join(lines))

    def _base(self, base_id: str) -> Path:
        return self.file.parent / "bases" / f"{base_id}.safetensors"


def _copy(source: Path, to: Path) -> None:
    if source.exists() and not to.exists():
        to.parent.mkdir(exist_ok=True)
        replace_file(to, lambda new: shutil.copyfile(source, new))


def _line(result: RunResult) -> str:
    content = {"schema": SCHEMA, **result.to_json()}
    return json.dumps(content, separators=(",", ":"), allow_nan=False) + "\n"


def _parse(line: str, where: str) -> RunResult:
    remedy = "remove it, and the run will be made again"
    try:
        return result_in(parse_json(line), where)
    except (ValueError, ExperimentError) as error:
        raise ExperimentError(
            f"{error if isinstance(error, ExperimentError) else f'{where} is not JSON ({error})'}; {remedy}"
        ) from None
