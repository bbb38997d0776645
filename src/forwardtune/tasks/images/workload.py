"""A workload of images: a network, the weights it starts from, and how they are pretrained."""

from __future__ import annotations

from dataclasses import dataclass

from forwardtune.errors import ExperimentError
from forwardtune.tasks.workload import Workload
from forwardtune.toml_tables import above_zero, at_least, one_of

IMAGES = ("digits", "mnist", "cifar10")
NETWORKS = ("cnn", "densenet121", "resnet18", "vgg11", "vit_b_16")
TUNED = ("all", "norms")
MODES = ("train", "eval")
HEADS = ("linear", "wide")


@dataclass(frozen=True)
class Pretrain:
    """Backpropagation (Adam) on a source dataset, before the runs begin.

    shift: rolls the source's images by that many pixels, down and to the right.
    invert: swaps bright and dark in the source's images.
    head: whether tuning keeps the pretrained head (``"keep"``) or starts with a new one (``"new"``).
    """

    data: str
    steps: int
    batch: int = 64
    lr: float = 1e-3
    seed: int = 0
    shift: int = 0
    invert: bool = False
    head: str = "new"

    def __post_init__(self) -> None:
        one_of("data", self.data, IMAGES)
        one_of("head", self.head, ("new", "keep"))
        at_least(1, steps=self.steps, batch=self.batch)
        above_zero(lr=self.lr)


@dataclass(frozen=True, kw_only=True)
class ImageWorkload(Workload):
    """A network tuned to an image dataset.

    weights: ``"random"``, ``"torchvision"`` or a file (.safetensors, .pth) in the spec's folder or the data folder, of
        which everything but the head is used.
    pretrain: how these weights are trained before the runs begin.
    tune: which weights are tuned, ``"all"``, or ``"norms"``: the vectors, which are norms and biases, and the head.
    head: ``"linear"``, the network's own, or ``"wide"``, which reads layers below it too.
    mode: of the network in steps; in ``"eval"`` BatchNorm has its running statistics, as in evaluations.
    """

    pretrain: Pretrain | None = None
    tune: str = "all"
    head: str = "linear"
    mode: str = "train"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("data", self.data, IMAGES)
        one_of("network", self.network, NETWORKS)
        one_of("tune", self.tune, TUNED)
        one_of("head", self.head, HEADS)
        one_of("mode", self.mode, MODES)
        if self.fit and self.pretrain and self.pretrain.head == "keep":
            raise ExperimentError('only a new head is fitted; pretrain with head = "new", or leave fit out')
        if self.batch == 1 and self.mode == "train" and self.network in ("densenet121", "resnet18"):
            raise ExperimentError(
                f"{self.network} normalizes over the batch, which must have at least 2 examples, not 1"
            )
