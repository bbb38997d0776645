"""A network tuned to an image dataset."""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from forwardtune.errors import ExperimentError
from forwardtune.files import replace_file, translated
from forwardtune.heads import fit_head
from forwardtune.metrics import metric, one_minus
from forwardtune.tasks.computing import computed
from forwardtune.tasks.identity import FITS, RULES, brief, file_digest, fingerprint
from forwardtune.tasks.images import networks
from forwardtune.tasks.images.data import Images
from forwardtune.tasks.images.workload import ImageWorkload, Pretrain
from forwardtune.tasks.sources import Sources
from forwardtune.tasks.task import Scores, Task
from forwardtune.wide import widen_head

CHUNK = 250  # images evaluated at a time


class ImageTask(Task):
    """The weights of the network are tuned; the loss is the cross entropy."""

    workload: ImageWorkload

    def __init__(self, workload: ImageWorkload, sources: Sources, device: str) -> None:
        self.images = sources.images(workload.data)
        super().__init__(workload, sources, device, len(self.images.train_y), len(self.images.test_y))
        self.note = self.images.note

    @property
    def data_digest(self) -> str:
        return self.images.digest

    @property
    def guessing(self) -> float:
        return math.log(self.images.classes)

    def network(self) -> nn.Module:
        """The network with random weights, drawn from torch's global generator."""
        return networks.build(self.workload.network, self.images)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self._objective(self._logits(model, batch[0]), batch[1])

    def losses(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits = self._logits(model, batch[0])
        if self.workload.objective != "loss":
            return (logits.argmax(1) != batch[1]).to(logits.dtype)
        return F.cross_entropy(logits, batch[1], reduction="none")

    def _logits(self, model: nn.Module, x: Tensor) -> Tensor:
        return computed(self.workload.compute, self.device, lambda: model(x))

    def _objective(self, logits: Tensor, actual: Tensor) -> Tensor:
        if self.workload.objective != "loss":
            return one_minus(self.workload.objective, logits, actual)
        return F.cross_entropy(logits, actual)

    def batch(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        return self._ready(self.images.train_x[chosen]), self.images.train_y[chosen].to(self.device)

    def score(self, model: nn.Module, train: Tensor, test: Tensor) -> Scores:
        train_loss, _ = self._evaluated(model, self.images.train_x[train], self.images.train_y[train])
        actual = self.images.test_y[test]
        test_loss, predicted = self._evaluated(model, self.images.test_x[test], actual)
        classes = self.images.classes
        return Scores(train_loss, test_loss, {name: metric(name, predicted, actual, classes) for name in self.metrics})

    def _evaluated(self, model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, Tensor]:
        """The objective over all examples, and the predicted classes."""
        logits = torch.cat([self._logits(model, self._ready(some)) for some in x.split(CHUNK)])  # type: ignore[no-untyped-call]
        return self._objective(logits, y.to(self.device)).item(), logits.argmax(1).cpu()

    def _ready(self, x: Tensor) -> Tensor:
        return networks.as_input(self.workload.network, self.images, x.to(self.device))

    @cached_property
    def base_id(self) -> str:
        w = self.workload
        content: list[Any] = [RULES, w.network, self.images.digest]
        content.append(file_digest(self._file) if self._is_file else w.weights)
        if w.pretrain:
            content += [brief(w.pretrain), self.sources.images(w.pretrain.data).digest]
        if w.fit:
            content.append(("fit", FITS, w.fit, w.test_examples))
        if not self._has_statistics and w.mode == "eval":
            content.append("statistics")
        if w.head != "linear":
            content.append(("head", w.head))
        return fingerprint(content)

    @property
    def _has_statistics(self) -> bool:
        """Whether the weights come with BatchNorm's running statistics, which are estimated anew on training images."""
        return bool(self.workload.pretrain) or self.workload.weights != "random"

    @property
    def _is_file(self) -> bool:
        return self.workload.weights not in ("random", "torchvision")

    @property
    def _file(self) -> Path:
        return self.sources.file(self.workload.weights, 'set weights to "torchvision" (with --download) or "random"')

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """What the network starts from, without its head; empty for random weights."""
        name, source = self.workload.network, self.workload.weights
        if self._is_file:
            file = self._file
            return networks.backbone(model, name, networks.read_weights(file), str(file))
        if source == "torchvision":
            if not self.sources.download:
                raise ExperimentError(
                    f"torchvision's weights of {name} are downloaded from the internet; allow it with --download, or "
                    'give a file: weights = "FILE.pth"'
                )
            return networks.backbone(model, name, networks.download_weights(name), f"torchvision's {name}")
        return {}

    def check(self) -> None:
        with torch.device("meta"):
            model = self.network()
        self.weights(model)
        if self.workload.pretrain:
            self._source(self.workload.pretrain)

    def make_base(self, file: Path) -> nn.Module:
        """Writes only the weights and buffers that are not those in `weights`."""
        recipe = self.workload.pretrain
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed if recipe else 0)
            model = self.network().to(self.device)
            model.load_state_dict(self.weights(model), strict=False)
            if recipe:
                self._pretrain(model, recipe)
            if self._has_statistics or self.workload.mode == "eval":
                order = torch.randperm(self.examples, generator=torch.Generator().manual_seed(0))
                some = [order[i : i + 128] for i in range(0, min(2048, self.examples), 128)]
                networks.estimate_statistics(model, [self.batch(indices)[0] for indices in some])
            self._widen(model)
            before = None
            if self.workload.fit:
                before = self._told_before(model)
                fit_head(model, networks.HEADS[self.workload.network], map(self.batch, self._examples_to_fit()))
        given = self.weights(model) if self._is_file else {}
        state = {
            key: value.cpu().contiguous()
            for key, value in model.state_dict().items()
            if key not in given or key in networks.DERIVED or not torch.equal(value.cpu(), given[key].to(value.dtype))
        }
        with translated(ExperimentError, f"{file} cannot be written"):
            replace_file(file, lambda new: save_file(state, new, before))
        return self._to_tune(model)

    def _widen(self, model: nn.Module) -> None:
        if self.workload.head == "wide":
            some = self._ready(self.images.train_x[:2]).to(next(model.parameters()).device)
            widen_head(model, networks.HEADS[self.workload.network], some)

    def _source(self, recipe: Pretrain) -> Images:
        images = self.sources.images(recipe.data)
        if self.workload.network == "cnn" and images.train_x.shape[1:] != self.images.train_x.shape[1:]:
            raise ExperimentError(
                f"{self.workload.name}: cnn takes images as they are, and those of {recipe.data} have another shape "
                f"than those of {self.images.name}; pretrain on {self.images.name}, or use another network"
            )
        return images

    def _pretrain(self, model: nn.Module, recipe: Pretrain) -> None:
        """Backpropagation on the source dataset."""
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
        with torch.device("meta"):
            model = self.network()
        self._widen(model)
        state, weights = model.state_dict(), self.weights(model) if self._is_file else {}
        given = {key: value.to(state[key].dtype) for key, value in weights.items()}
        model.load_state_dict({**given, **load_file(base)}, assign=True)
        return self._to_tune(model.to(self.device))

    def _to_tune(self, model: nn.Module) -> nn.Module:
        """The network in the mode that it has in steps, with what is not tuned frozen."""
        head = f"{networks.HEADS[self.workload.network]}."
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(self.workload.tune == "all" or parameter.ndim == 1 or name.startswith(head))
        return model.train(self.workload.mode == "train")
