"""A workload made ready: its data in memory, its network, its base weights in a file."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from forwardtune.errors import ExperimentError
from forwardtune.experiments.plan import RULES, brief, fingerprint
from forwardtune.experiments.spec import Pretrain, Workload
from forwardtune.experiments.store import publish
from forwardtune.experiments.workloads import networks
from forwardtune.experiments.workloads.data import Images, load

CHUNK = 250  # images evaluated at a time


@dataclass(frozen=True)
class Sources:
    """Where data and weights are found, and whether what is missing may be downloaded."""

    data: Path | None = None
    folder: Path = Path()
    download: bool = False

    def images(self, name: str) -> Images:
        return _loaded(name, self.data, self.download)

    def file(self, name: str) -> Path:
        """A file of weights in the spec's folder or that of the data."""
        places = [place / name for place in (self.folder, self.data) if place is not None]
        for place in places:
            if place.is_file():
                return place
        raise ExperimentError(
            f"there are no weights at {' or '.join(map(str, places))}; put the file there, or set weights to "
            '"torchvision" (with --download) or "random"'
        )


@lru_cache(maxsize=4)
def _loaded(name: str, folder: Path | None, download: bool) -> Images:
    return load(name, folder, download=download)


class Evaluation(NamedTuple):
    """How well a network does: mean losses, and the share of test examples it gets right."""

    train_loss: float
    test_loss: float
    accuracy: float


class Task:
    """Tuning a network to a set of images."""

    def __init__(self, workload: Workload, sources: Sources, device: str) -> None:
        self.workload, self.sources, self.device = workload, sources, torch.device(device)
        self.images = sources.images(workload.data)
        self.examples = len(self.images.train_y)
        self.queries = workload.budget(self.examples)

    @property
    def data(self) -> dict[str, Any]:
        """What a result says of the data."""
        images = self.images
        found = {"name": images.name, "train": self.examples, "test": len(images.test_y), "digest": images.digest}
        return {**found, "note": images.note} if images.note else found

    def network(self) -> nn.Module:
        """The network, its weights drawn from torch's generator."""
        return networks.build(self.workload.network, self.images)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def batch(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Training examples by their numbers."""
        return self._ready(self.images.train_x[chosen]), self.images.train_y[chosen].to(self.device)

    @torch.inference_mode()
    def evaluate(self, model: nn.Module) -> Evaluation:
        """On the same examples every time, without dropout and with the running statistics."""
        training = model.training
        model.eval()
        train, test = self._sample
        train_loss, _ = self._means(model, self.images.train_x[train], self.images.train_y[train])
        test_loss, accuracy = self._means(model, self.images.test_x[test], self.images.test_y[test])
        model.train(training)
        return Evaluation(train_loss, test_loss, accuracy)

    @cached_property
    def _sample(self) -> tuple[Tensor, Tensor]:
        """The examples that are looked at: drawn once."""
        sizes = (self.examples, self.workload.train_examples), (len(self.images.test_y), self.workload.test_examples)
        train, test = (torch.randperm(n, generator=torch.Generator().manual_seed(0))[: k or n] for n, k in sizes)
        return train, test

    def _means(self, model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
        loss, right = 0.0, 0
        for some, labels in zip(x.split(CHUNK), y.to(self.device).split(CHUNK), strict=True):  # type: ignore[no-untyped-call]
            logits = model(self._ready(some))
            loss += F.cross_entropy(logits, labels, reduction="sum").item()
            right += int((logits.argmax(1) == labels).sum())
        return loss / len(y), right / len(y)

    def _ready(self, x: Tensor) -> Tensor:
        return networks.as_input(self.workload.network, self.images, x.to(self.device))

    @cached_property
    def base_id(self) -> str:
        """Known by all that decides the base weights: data, a file's content, recipes."""
        w = self.workload
        content: list[Any] = [RULES, w.network, self.images.digest]
        content.append(digest(self.sources.file(w.weights)) if self._is_file else w.weights)
        if w.pretrain:
            content += [brief(w.pretrain), self.sources.images(w.pretrain.data).digest]
        return fingerprint(content)

    @property
    def _is_file(self) -> bool:
        return self.workload.weights not in ("random", "torchvision")

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """What the network starts from, but for its head: nothing if it starts from random weights."""
        name, source = self.workload.network, self.workload.weights
        if self._is_file:
            file = self.sources.file(source)
            return networks.body(model, name, networks.read_weights(file), str(file))
        if source == "torchvision":
            if not self.sources.download:
                raise ExperimentError(
                    f"torchvision's weights of {name} are fetched from the internet; allow it with --download, or give "
                    'a file: weights = "FILE.pth"'
                )
            return networks.body(model, name, networks.download_weights(name), f"torchvision's {name}")
        return {}

    def check(self) -> None:
        """Notices now what could not be had later."""
        with torch.device("meta"):
            model = self.network()
        self.weights(model)
        if self.workload.pretrain:
            self._source(self.workload.pretrain)

    def make_base(self, file: Path) -> None:
        """Writes the weights and buffers that every run of the workload starts from."""
        recipe = self.workload.pretrain
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed if recipe else 0)
            model = self.network().to(self.device)
            model.load_state_dict(self.weights(model), strict=False)
            if recipe:
                self._pretrain(model, recipe)
            if recipe or self.workload.weights != "random":
                order = torch.randperm(self.examples, generator=torch.Generator().manual_seed(0))
                some = [order[i : i + 128] for i in range(0, min(2048, self.examples), 128)]
                networks.estimate_statistics(model, [self.batch(numbers)[0] for numbers in some])
        state = {key: value.cpu().contiguous() for key, value in model.state_dict().items()}
        publish(file, lambda new: save_file(state, new))

    def _source(self, recipe: Pretrain) -> Images:
        images = self.sources.images(recipe.data)
        if self.workload.network == "cnn" and images.train_x.shape[1:] != self.images.train_x.shape[1:]:
            raise ExperimentError(
                f"{self.workload.name}: cnn takes images as they are, and those of {recipe.data} have another shape "
                f"than those of {self.images.name}; pretrain on {self.images.name}, or use another network"
            )
        return images

    def _pretrain(self, model: nn.Module, recipe: Pretrain) -> None:
        """Backpropagation on the source set."""
        images = self._source(recipe)
        generator = torch.Generator().manual_seed(recipe.seed)
        optimizer = torch.optim.Adam(model.parameters(), lr=recipe.lr)
        model.train()
        for _ in range(recipe.steps):
            chosen = torch.randint(len(images.train_y), (recipe.batch,), generator=generator)
            x = images.train_x[chosen].to(self.device)
            if recipe.invert:
                x = int(images.peak) - x
            x = networks.as_input(self.workload.network, images, x.roll((recipe.shift, recipe.shift), dims=(2, 3)))
            optimizer.zero_grad()
            F.cross_entropy(model(x), images.train_y[chosen].to(self.device)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if recipe.head == "new":
            networks.renew_head(model, self.workload.network)

    def start(self, base: Path) -> nn.Module:
        """The network with the base weights."""
        with torch.device("meta"):
            model = self.network()
        model.load_state_dict(load_file(base), assign=True)
        return model.to(self.device).train()


def digest(file: Path) -> str:
    """The SHA-256 of a file, computed anew if it has changed."""
    stat = file.stat()
    return _digest(file, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=8)
def _digest(file: Path, time: int, size: int) -> str:
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


@lru_cache(maxsize=2)
def prepare(workload: Workload, sources: Sources, device: str) -> Task:
    """The workload with its data in memory."""
    return Task(workload, sources, device)
