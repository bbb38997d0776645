"""The comparisons that ship: `digits` for a first look, and by folder; docs/experiments.md says what each is for."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from forwardtune.errors import ExperimentError
from forwardtune.experiments import spec as specs
from forwardtune.experiments.spec import Spec
from forwardtune.toml_tables import nearest

HOME = Path(__file__).parent


@cache
def files() -> dict[str, Path]:
    """The presets' files by name, those at the top first."""
    ordered = sorted(HOME.rglob("*.toml"), key=lambda file: (file.parent != HOME, file.parent.name, file.stem))
    return {file.relative_to(HOME).with_suffix("").as_posix(): file for file in ordered}


def load(name: str) -> Spec:
    """A preset by its name."""
    known = files()
    if name not in known:
        raise ExperimentError(f"there is no preset {name!r}{nearest(name, known)}; there are {', '.join(known)}")
    return specs.load(known[name])
