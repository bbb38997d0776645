"""The comparisons that ship: those for a first look, and the paper's."""

from __future__ import annotations

from pathlib import Path

import forwardtune
from forwardtune.errors import ExperimentError
from forwardtune.experiments import spec as specs
from forwardtune.experiments.spec import Spec
from forwardtune.experiments.toml_tables import nearest

HOME = Path(forwardtune.__file__).parent
FOLDERS = (HOME / "experiments" / "presets", HOME / "reproduction" / "specs")


def _files() -> dict[str, Path]:
    found = ((folder, file) for folder in FOLDERS for file in sorted(folder.rglob("*.toml"), key=_order))
    return {file.relative_to(folder).with_suffix("").as_posix(): file for folder, file in found}


def _order(file: Path) -> tuple[str, str]:
    return file.parent.name, file.stem


def names() -> list[str]:
    return list(_files())


def read(name: str) -> Spec:
    """A preset by its name."""
    files = _files()
    if name not in files:
        raise ExperimentError(f"there is no preset {name!r}{nearest(name, files)}; there are {', '.join(files)}")
    return specs.read(files[name])
