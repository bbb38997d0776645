"""Sets of labelled images, read from the files in which they are published."""

from __future__ import annotations

import gzip
import hashlib
import io
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forwardtune.errors import ExperimentError


@dataclass(frozen=True)
class Images:
    """Bytes of shape (examples, channels, height, width), `peak` being the brightest, and their labels."""

    name: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    peak: float = 255.0
    note: str = ""

    @property
    def channels(self) -> int:
        return self.train_x.shape[1]

    @property
    def classes(self) -> int:
        return 10

    @cached_property
    def digest(self) -> str:
        """Tells whether two machines have the same data."""
        parts = (self.train_x, self.train_y, self.test_x, self.test_y)
        return hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()[:16]


def load(name: str, folder: Path | None, *, download: bool = False) -> Images:
    """A set by its name, from the user's folder of data."""
    if name == "digits":
        return digits()
    if folder is None:
        raise ExperimentError(
            f"{name} is read from a folder of data, and none was given; name it with --data DIR or in the environment "
            "variable FORWARDTUNE_DATA"
        )
    if not folder.is_dir() and not download:
        raise ExperimentError(
            f"the folder of data {folder} does not exist; name the one that has {name} with --data DIR"
        )
    read = {"mnist": mnist, "cifar10": cifar10}[name]
    if not download:
        return read(folder)
    try:
        images = read(folder)
    except ExperimentError:
        images = None
    if images is None or images.note:  # nothing there, or not all of it
        _download(name, folder)
        return read(folder)
    return images


def digits() -> Images:
    """The 1,797 handwritten digits of 8 x 8 pixels that come with scikit-learn; 1,400 of them, drawn once, to train."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ExperimentError("the digits come with scikit-learn; install it: pip install scikit-learn") from None
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.uint8).view(-1, 1, 8, 8), torch.tensor(labels)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    train, test = order[:1400], order[1400:]
    return Images("digits", x[train], y[train], x[test], y[test], peak=16.0)


def mnist(folder: Path) -> Images:
    """MNIST's four IDX files, packed or not."""

    def part(name: str, dimensions: int) -> Tensor:
        places = [folder / sub / f"{name}{end}" for sub in ("mnist", "MNIST/raw", ".") for end in (".gz", "")]
        file = _first(places, "MNIST", name)
        content = _content(file)
        magic = bytes([0, 0, 8, dimensions])
        shape = tuple(int.from_bytes(content[4 * i : 4 * i + 4]) for i in range(1, dimensions + 1))
        start = 4 + 4 * dimensions
        if content[:4] != magic or len(content) != start + int(np.prod(shape, dtype=np.int64)):
            raise ExperimentError(f"{file} is not the IDX file of MNIST; get it anew{_REMEDY}")
        return torch.tensor(np.frombuffer(content, np.uint8, offset=start).reshape(shape))

    x = [part(f"{which}-images-idx3-ubyte", 3).unsqueeze(1) for which in ("train", "t10k")]
    y = [part(f"{which}-labels-idx1-ubyte", 1).long() for which in ("train", "t10k")]
    return _checked(Images("mnist", x[0], y[0], x[1], y[1]), folder)


def cifar10(folder: Path) -> Images:
    """CIFAR-10's batches in their binary or Python layout; those of the training batches that are there."""
    layouts = (("bin", ".bin", _binary_batch), ("py", "", _python_batch))
    found, home, end, read = max(
        (
            (_batches(folder / f"cifar-10-batches-{kind}", end), folder / f"cifar-10-batches-{kind}", end, read)
            for kind, end, read in layouts
        ),
        key=lambda layout: len(layout[0]),
    )
    found = found or ["data_batch_1.bin"]
    batches = [read(_first([home / name], "CIFAR-10", name)) for name in found]
    test_x, test_y = read(_first([home / f"test_batch{end}"], "CIFAR-10", f"test_batch{end}"))
    train_x, train_y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    missing = 5 - len(found)
    note = f"{missing} of CIFAR-10's 5 training batches are not in {home}" if missing else ""
    return _checked(Images("cifar10", train_x, train_y, test_x, test_y, note=note), folder)


def _batches(home: Path, end: str) -> list[str]:
    return [name for i in range(1, 6) if (home / (name := f"data_batch_{i}{end}")).exists()]


def _binary_batch(file: Path) -> tuple[Tensor, Tensor]:
    content = np.frombuffer(_content(file), np.uint8)
    if not len(content) or len(content) % 3073:
        raise ExperimentError(f"{file} is not a binary batch of CIFAR-10; get it anew{_REMEDY}")
    rows = torch.tensor(content.reshape(-1, 3073))
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].long()


def _python_batch(file: Path) -> tuple[Tensor, Tensor]:
    try:
        batch = _ArraysOnly(io.BytesIO(_content(file)), encoding="bytes").load()
        return torch.tensor(batch[b"data"].reshape(-1, 3, 32, 32)), torch.tensor(batch[b"labels"])
    except (pickle.UnpicklingError, KeyError, TypeError, ValueError, EOFError, AttributeError) as error:
        raise ExperimentError(f"{file} is not a Python batch of CIFAR-10 ({error}); get it anew{_REMEDY}") from None


class _ArraysOnly(pickle.Unpickler):
    """Reads arrays, and refuses what a pickle could do otherwise."""

    def find_class(self, module: str, name: str) -> Any:
        if (module.split(".")[0], name) in {("numpy", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype")}:
            return super().find_class(module.replace("numpy.core", "numpy._core"), name)
        if (module, name) == ("_codecs", "encode"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


_REMEDY = ", for instance with --download, which has torchvision fetch it into the folder of data"


def _first(places: Iterable[Path], what: str, name: str) -> Path:
    places = list(places)
    for place in places:
        if place.is_file():
            return place
    homes = ", ".join(dict.fromkeys(str(place.parent) for place in places))
    raise ExperimentError(f"{what} needs the file {name}, which is not in {homes}; put it there{_REMEDY}")


def _content(file: Path) -> bytes:
    try:
        return gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (OSError, EOFError, gzip.zlib.error) as error:  # type: ignore[attr-defined]
        raise ExperimentError(f"{file} cannot be read ({error}); get it anew{_REMEDY}") from None


def _checked(images: Images, folder: Path) -> Images:
    for x, y in ((images.train_x, images.train_y), (images.test_x, images.test_y)):
        if len(x) != len(y) or not len(y) or int(y.max()) >= images.classes:
            raise ExperimentError(f"the images and labels of {images.name} in {folder} do not belong together")
    return images


def _download(name: str, folder: Path) -> None:
    from forwardtune._compat.torchvision import torchvision

    kind: Callable[..., Any] = {"mnist": torchvision().datasets.MNIST, "cifar10": torchvision().datasets.CIFAR10}[name]
    try:
        kind(str(folder), download=True)
    except (OSError, RuntimeError) as error:
        raise ExperimentError(
            f"{name} could not be downloaded to {folder} ({error}); put its files there by hand"
        ) from None
