"""Networks for images, their inputs and their weights.

`cnn` ships here and takes a dataset's images as they are. The four of the paper are torchvision's, unchanged but for
the head, with images of 32 x 32 pixels in three channels, scaled by ImageNet's mean and deviation: MNIST is padded with
two pixels of zeros, digits are magnified four times. Their stems were made for 224 x 224 and stay as they are, so that
pretrained weights fit: ResNet18 and DenseNet121 shrink the image to 8 x 8 before their first block and to 1 x 1 at
their last, VGG11 pools it to 1 x 1, which its adaptive pooling then repeats 7 x 7 times, and ViT-B/16 sees four
patches, with its positional embedding interpolated from the 14 x 14 grid (bicubic).
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from forwardtune._compat.torchvision import torchvision
from forwardtune.errors import ExperimentError
from forwardtune.tasks.images.data import Images

SIZE = 32
HEADS = {
    "densenet121": "classifier",
    "resnet18": "fc",
    "vgg11": "classifier.6",
    "vit_b_16": "heads.head",
    "cnn": "head",
}
DERIVED = ("encoder.pos_embedding",)
"""Weights that are computed from those in a file."""
MEAN, DEVIATION = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


def build(name: str, images: Images) -> nn.Module:
    """The network with random weights, drawn from torch's global generator."""
    if name == "cnn":
        return cnn(images.channels, images.train_x.shape[-1], images.classes)
    size = {"image_size": SIZE} if name == "vit_b_16" else {}
    model: nn.Module = torchvision().models.get_model(name, weights=None, num_classes=images.classes, **size)
    return model


def cnn(channels: int, size: int, classes: int) -> nn.Sequential:
    """A convolution over patches, another one, and two linear layers: 21,546 weights on digits."""
    layers = OrderedDict(
        conv1=nn.Conv2d(channels, 16, size // 4 + 1, stride=size // 4, padding=1),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(16, 32, 3, padding=1),
        relu2=nn.ReLU(),
        flatten=nn.Flatten(),
        linear=nn.Linear(512, 32),
        relu3=nn.ReLU(),
        head=nn.Linear(32, classes),
    )
    return nn.Sequential(layers)


def as_input(name: str, images: Images, x: Tensor) -> Tensor:
    """Images of bytes as the network takes them."""
    x = x.float() / images.peak
    if name == "cnn":
        return x
    if x.shape[-1] == 28:
        x = F.pad(x, (2, 2, 2, 2))
    elif x.shape[-1] != SIZE:
        x = F.interpolate(x, SIZE, mode="nearest")
    return (x - MEAN.to(x.device).view(3, 1, 1)) / DEVIATION.to(x.device).view(3, 1, 1)


def renew_head(model: nn.Module, name: str) -> None:
    """Reinitializes the last linear layer."""
    head = model.get_submodule(HEADS[name])
    assert isinstance(head, nn.Linear)
    head.reset_parameters()


def download_weights(name: str) -> dict[str, Tensor]:
    """torchvision's ImageNet checkpoint, downloaded if it is not in torch's cache."""
    try:
        weights = torchvision().models.get_model_weights(name).DEFAULT
        checkpoint: dict[str, Tensor] = weights.get_state_dict(progress=False, check_hash=True)
    except (OSError, RuntimeError) as error:
        raise ExperimentError(
            f"torchvision's weights of {name} could not be downloaded ({error}); without internet access give a file: "
            'weights = "FILE.pth"'
        ) from None
    return checkpoint


def read_weights(file: Path) -> dict[str, Tensor]:
    """The state dict in a file, also where it is saved under "state_dict" or "model"."""
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the first bytes of another file lead torch's unpickler to
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ExperimentError(f"the weights {file} cannot be read ({reason}); give another file") from None
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not all(isinstance(tensor, Tensor) for tensor in content.values()):
        raise ExperimentError(f"{file} does not hold a state dict; save model.state_dict() in it")
    return dict(content)


def backbone(model: nn.Module, name: str, checkpoint: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """A state dict without its head, after checking that it belongs to this architecture."""
    refusal = f"{source} is a checkpoint for another architecture than {name}: "
    # Checkpoints of DenseNet from before torch 0.4 have a dot where later ones have none.
    weights = {re.sub(r"(denselayer\d+\.(?:norm|conv))\.(\d)\.", r"\1\2.", key): w for key, w in checkpoint.items()}
    if name == "vit_b_16" and "encoder.pos_embedding" in weights:
        try:
            weights = torchvision().models.vision_transformer.interpolate_embeddings(SIZE, 16, weights)
        except ValueError as error:
            raise ExperimentError(f"{refusal}{error}") from None
    own, head = model.state_dict(), HEADS[name]
    kept = {key: value for key, value in weights.items() if not key.startswith(f"{head}.")}
    wanted = {key for key in own if not key.startswith(f"{head}.")}
    optional = {key for key in wanted if key.endswith("num_batches_tracked")}
    if missing := sorted(wanted - optional - kept.keys()):
        raise ExperimentError(f"{refusal}it lacks {missing[0]!r}")
    if extra := sorted(kept.keys() - wanted):
        raise ExperimentError(f"{refusal}it has {extra[0]!r}, which {name} does not")
    if misshapen := [key for key in sorted(kept) if kept[key].shape != own[key].shape]:
        shapes = f"{tuple(kept[misshapen[0]].shape)} instead of {tuple(own[misshapen[0]].shape)}"
        raise ExperimentError(f"{refusal}{misshapen[0]!r} has shape {shapes}")
    return kept


@torch.no_grad()
def estimate_statistics(model: nn.Module, batches: list[Tensor]) -> None:
    """Sets BatchNorm's running statistics to the means over some batches."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    model.train()
    for batch in batches:
        model(batch)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
