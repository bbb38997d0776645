"""Where data and weights are read from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from forwardtune.errors import ExperimentError
from forwardtune.tasks.images.data import Images, load

PACKAGE = "package:"


@dataclass(frozen=True)
class Sources:
    """The data folder, the spec's folder, and whether what is missing may be downloaded."""

    data: Path | None = None
    folder: Path = Path()
    download: bool = False

    def images(self, name: str) -> Images:
        return _loaded(name, self.data, self.download)

    def file(self, name: str, remedy: str = "name another") -> Path:
        """A file in the spec's folder or the data folder."""
        paths = self._paths(name)
        for path in paths:
            if path.is_file():
                return path
        raise ExperimentError(f"there is no file at {' or '.join(map(str, paths))}; put it there, or {remedy}")

    def model(self, name: str) -> Path | None:
        """A transformer's folder or GGUF file: as for a file, or inside an installed package; None if on the Hub."""
        paths = _in_package(name) if name.startswith(PACKAGE) else self._paths(name)
        for path in paths:
            if (path / "config.json").is_file() or (path.suffix == ".gguf" and path.is_file()):
                return path.resolve()
        if self.download and not name.startswith(PACKAGE):
            return None
        raise ExperimentError(
            f"there is no model at {' or '.join(map(str, paths))}: no folder with a config.json, no GGUF file; put it "
            "there, or allow a download of the model of that name with --download"
        )

    def _paths(self, name: str) -> list[Path]:
        return list(dict.fromkeys(folder / name for folder in (self.folder, self.data) if folder is not None))


def _in_package(name: str) -> list[Path]:
    package, _, inside = name.removeprefix(PACKAGE).partition("/")
    installed = find_spec(package) if package.isidentifier() else None  # that of a part would import the whole
    if installed is None or not installed.submodule_search_locations:
        raise ExperimentError(f"the model {name} is in a package that is not installed: pip install {package}")
    return [Path(folder) / inside for folder in installed.submodule_search_locations]


@lru_cache(maxsize=4)
def _loaded(name: str, folder: Path | None, download: bool) -> Images:
    return load(name, folder, download=download)
