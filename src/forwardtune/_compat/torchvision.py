"""torchvision, also where its compiled operators cannot be loaded.

On import, torchvision registers fake implementations of two of its compiled operators. With a torch that its binary was
not built for (a CPU build, say) the operators do not exist and the import fails, although no classification model uses
them. Then, and only then, the two are declared first.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch

from forwardtune.errors import ExperimentError

_declared: list[torch.library.Library] = []  # a declaration lasts as long as its library


@cache
def torchvision() -> ModuleType:
    """The module, with its models and datasets."""
    make_importable()
    try:
        for part in ("models", "datasets"):
            import_module(f"torchvision.{part}")
    except (ImportError, RuntimeError) as error:
        raise ExperimentError(
            f"this needs torchvision ({error}); install it: pip install 'forwardtune[vision]'"
        ) from None
    return import_module("torchvision")


@cache
def make_importable() -> None:
    """Declares the operators where they are missing; call it before importing anything that imports torchvision."""
    package = find_spec("torchvision")
    binaries = [Path(home) / "_C.so" for home in package.submodule_search_locations or ()] if package else []
    for binary in filter(Path.exists, binaries):
        try:
            torch.ops.load_library(binary)  # type: ignore[no-untyped-call]
        except OSError:
            library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
            for name in ("nms", "qnms"):
                schema = f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                library.define(schema)  # type: ignore[no-untyped-call]
            _declared.append(library)
