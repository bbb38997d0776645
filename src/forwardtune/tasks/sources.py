"""Where data and weights are found."""

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
    """The folder of data, that of the spec, and whether what is missing may be downloaded."""

    data: Path | None = None
    folder: Path = Path()
    download: bool = False

    def images(self, name: str) -> Images:
        return _loaded(name, self.data, self.download)

    def file(self, name: str, remedy: str = "name another") -> Path:
        """A file in the spec's folder or that of the data."""
        places = self._places(name)
        for place in places:
            if place.is_file():
                return place
        raise ExperimentError(f"there is no file at {' or '.join(map(str, places))}; put it there, or {remedy}")

    def model(self, name: str) -> Path | None:
        """The folder of a transformer: as for a file, or inside an installed package; None if it is a hub's name."""
        if name.startswith(PACKAGE):
            package, _, inside = name.removeprefix(PACKAGE).partition("/")
            found = find_spec(package)
            if found is None or not found.submodule_search_locations:
                raise ExperimentError(f"the model {name} is in a package that is not installed: pip install {package}")
            places = [Path(home) / inside for home in found.submodule_search_locations]
        else:
            places = self._places(name)
        for place in places:
            if (place / "config.json").is_file():
                return place.resolve()
        if self.download and not name.startswith(PACKAGE):
            return None
        raise ExperimentError(
            f"there is no model at {' or '.join(map(str, places))}: no folder with a config.json; put it there, or "
            "allow a download of the model of that name with --download"
        )

    def _places(self, name: str) -> list[Path]:
        return [place / name for place in (self.folder, self.data) if place is not None]


@lru_cache(maxsize=4)
def _loaded(name: str, folder: Path | None, download: bool) -> Images:
    return load(name, folder, download=download)
