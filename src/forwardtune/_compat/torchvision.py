"""torchvision, also where its compiled operators cannot be loaded.

On import, torchvision registers fake implementations of two of its compiled operators. With a torch that its binary was
not built for (a CPU build, say) the operators do not exist and the import fails, although no classification model uses
them. Then, and only then, the two are declared first.

Our own code sees to that. So that others may be imported before it (transformers and peft import torchvision), `make
install` calls `python -m forwardtune._compat.torchvision`, which leaves a hook in an environment that needs it.
"""

from __future__ import annotations

import sysconfig
from functools import cache
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

import torch

from forwardtune.errors import ExperimentError

HOOK = (
    "import sys; sys.meta_path.insert(0, type('TorchvisionFinder', (), {'find_spec': lambda name, *_: name == "
    "'torchvision' and __import__('forwardtune._compat.torchvision', fromlist=['*']).make_importable() or None}))\n"
)
"""A line for a .pth file, which Python executes at its start; it imports nothing until torchvision is looked for."""

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
    package = PathFinder.find_spec("torchvision")  # past the hook, which may have called us
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


def install_hook(folder: Path) -> None:
    """Writes the hook into a folder of packages if torchvision is there and cannot be imported as it is."""
    try:
        import_module("torchvision")
    except ModuleNotFoundError:
        pass
    except RuntimeError:
        (folder / "forwardtune_torchvision.pth").write_text(HOOK, "utf-8")


if __name__ == "__main__":
    install_hook(Path(sysconfig.get_path("purelib")))
