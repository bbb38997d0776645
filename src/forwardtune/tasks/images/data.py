"""Labelled images, read from the files in which the datasets are published."""

from __future__ import annotations

import gzip
import hashlib
import io
import pickle
from collections.abc import Callable, Sequence
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
    """Bytes of shape (examples, channels, height, width), of which `peak` is the brightest, and their labels."""

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
    """A dataset by name, from the data folder."""
    if name == "digits":
        return digits()
    if folder is None:
        raise ExperimentError(
            f"{name} is read from the data folder, and none was given; name it with --data DIR or in the environment "
            "variable FORWARDTUNE_DATA"
        )
    if not folder.is_dir() and not download:
        raise ExperimentError(f"the data folder {folder} does not exist; name the one that has {name} with --data DIR")
    read = {"mnist": mnist, "cifar10": cifar10}[name]
    if not download:
        return read(folder)
    try:
        images = read(folder)
    except ExperimentError:
        images = None
    if images is None or images.note:  # nothing was there, or not all of it
        _download(name, folder)
        return read(folder)
    return images


def digits() -> Images:
    """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels; 1,400 of them, drawn once, are for training."""
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
    """MNIST's four IDX files, gzipped or not."""
    x = [_idx(folder, f"{part}-images-idx3-ubyte", 3).unsqueeze(1) for part in ("train", "t10k")]
    y = [_idx(folder, f"{part}-labels-idx1-ubyte", 1).long() for part in ("train", "t10k")]
    return _checked(Images("mnist", x[0], y[0], x[1], y[1]), folder)


def _idx(folder: Path, name: str, dimensions: int) -> Tensor:
    """An IDX file of bytes: two zeros, the type 8, the number of dimensions, each as a big-endian int32, the bytes."""
    paths = [folder / sub / f"{name}{suffix}" for sub in ("mnist", "MNIST/raw", ".") for suffix in (".gz", "")]
    file = _first_existing(paths, "MNIST", name)
    content = _content(file)
    shape = tuple(int.from_bytes(content[4 * i : 4 * i + 4]) for i in range(1, dimensions + 1))
    start = 4 + 4 * dimensions
    if content[:4] != bytes([0, 0, 8, dimensions]) or len(content) != start + int(np.prod(shape, dtype=np.int64)):
        raise ExperimentError(f"{file} is not an IDX file of MNIST; delete it and get it again{_REMEDY}")
    return torch.tensor(np.frombuffer(content, np.uint8, offset=start).reshape(shape))


def cifar10(folder: Path) -> Images:
    """CIFAR-10's binary or Python batches, whichever there are more of; missing training batches are noted."""
    layouts = (
        (folder / "cifar-10-batches-bin", ".bin", _binary_batch),
        (folder / "cifar-10-batches-py", "", _python_batch),
    )
    home, suffix, read = max(layouts, key=lambda layout: len(_training_batches(layout[0], layout[1])))
    names = _training_batches(home, suffix) or [f"data_batch_1{suffix}"]
    batches = [read(_first_existing([home / name], "CIFAR-10", name)) for name in (*names, f"test_batch{suffix}")]
    train_x, train_y = (torch.cat(parts) for parts in zip(*batches[:-1], strict=True))
    missing = 5 - len(names)
    note = f"{missing} of CIFAR-10's 5 training batches are not in {home}" if missing else ""
    return _checked(Images("cifar10", train_x, train_y, *batches[-1], note=note), folder)


def _training_batches(home: Path, suffix: str) -> list[str]:
    return [name for i in range(1, 6) if (home / (name := f"data_batch_{i}{suffix}")).exists()]


def _binary_batch(file: Path) -> tuple[Tensor, Tensor]:
    content = np.frombuffer(_content(file), np.uint8)
    if not len(content) or len(content) % 3073:
        raise ExperimentError(f"{file} is not a binary batch of CIFAR-10; delete it and get it again{_REMEDY}")
    rows = torch.tensor(content.reshape(-1, 3073))
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].long()


def _python_batch(file: Path) -> tuple[Tensor, Tensor]:
    try:
        batch = _ArraysOnly(io.BytesIO(_content(file)), encoding="bytes").load()
        return torch.tensor(batch[b"data"].reshape(-1, 3, 32, 32)), torch.tensor(batch[b"labels"])
    except (pickle.UnpicklingError, KeyError, TypeError, ValueError, EOFError, AttributeError) as error:
        raise ExperimentError(
            f"{file} is not a Python batch of CIFAR-10 ({error}); delete it and get it again{_REMEDY}"
        ) from None


class _ArraysOnly(pickle.Unpickler):
    """Reads arrays, and refuses everything else that a pickle can do."""

    def find_class(self, module: str, name: str) -> Any:
        if (module.split(".")[0], name) in {("numpy", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype")}:
            return super().find_class(module.replace("numpy.core", "numpy._core"), name)
        if (module, name) == ("_codecs", "encode"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


_REMEDY = ", for instance with --download, which has torchvision download it to the data folder"


def _first_existing(paths: Sequence[Path], dataset: str, name: str) -> Path:
    for path in paths:
        if path.is_file():
            return path
    folders = ", ".join(dict.fromkeys(str(path.parent) for path in paths))
    raise ExperimentError(f"{dataset} needs the file {name}, which is not in {folders}; put it there{_REMEDY}")


def _content(file: Path) -> bytes:
    try:
        return gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (OSError, EOFError, gzip.zlib.error) as error:  # type: ignore[attr-defined]
        raise ExperimentError(f"{file} cannot be read ({error}); delete it and get it again{_REMEDY}") from None


def _checked(images: Images, folder: Path) -> Images:
    for x, y in ((images.train_x, images.train_y), (images.test_x, images.test_y)):
        if len(x) != len(y) or not len(y) or int(y.max()) >= images.classes:
            raise ExperimentError(
                f"the images and labels of {images.name} in {folder} do not belong together; delete them and get them "
                f"again{_REMEDY}"
            )
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
