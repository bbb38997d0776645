"""The models, batches and rival training steps that the benchmarks share."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Closure = Callable[[], torch.Tensor]


def digits_network() -> nn.Sequential:
    """A network for images of 8 x 8 pixels, 21,546 weights."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


def gpt2(batch: int = 32, length: int = 64) -> tuple[nn.Module, Closure]:
    """GPT-2 (124M) with random weights, and its language-modelling loss on a random batch."""
    from forwardtune._compat.torchvision import make_importable

    make_importable()
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(use_cache=False))
    tokens = torch.randint(0, 50257, (batch, length))
    return model.eval(), lambda: model(input_ids=tokens, labels=tokens).loss


def gpt2_by_example(batch: int = 16, length: int = 64, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Closure]:
    """GPT-2, and one loss, in float32, for each text of a random batch."""
    model, _ = gpt2(batch, length)
    model.to(dtype)
    tokens = torch.randint(0, 50257, (batch, length))

    def losses() -> torch.Tensor:
        logits = model(input_ids=tokens).logits[:, :-1].float()
        return F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").mean(1)

    return model, losses


def cnn(pixels: int, batch: int = 32) -> tuple[nn.Module, Closure]:
    """A small network of about 20,000 weights for square, single-channel images."""
    torch.manual_seed(0)
    hidden = {8: 69, 28: 23}[pixels]
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2 if pixels == 28 else 1),
        nn.Flatten(),
        nn.LazyLinear(hidden),
        nn.ReLU(),
        nn.Linear(hidden, 10),
    )
    x, y = torch.randn(batch, 1, pixels, pixels), torch.randint(0, 10, (batch,))
    model(x)
    return model, lambda: F.cross_entropy(model(x), y)


def deep(layers: int = 74, batch: int = 32) -> tuple[nn.Module, Closure]:
    """A network of many small tensors, two for each of its layers of 16 units."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(16, 16), nn.ReLU())))
    x, y = torch.randn(batch, 16), torch.randint(0, 16, (batch,))
    return model, lambda: F.cross_entropy(model(x), y)


def two_forward_passes(model: nn.Module, closure: Closure) -> Callable[[], Any]:
    @torch.inference_mode()
    def step() -> None:
        closure()
        closure()

    return step


def perturb(parameters: list[nn.Parameter], seed: int, scale: float) -> None:
    """One sweep of the published MeZO code: reseed, then a tensor of noise for each parameter."""
    torch.manual_seed(seed)
    for p in parameters:
        noise = torch.normal(mean=0, std=1, size=p.size(), device=p.device, dtype=p.dtype)
        p.data = p.data + scale * noise


def published_mezo(model: nn.Module, closure: Closure, lr: float = 1e-6) -> Callable[[], Any]:
    """The published MeZO step: four sweeps around two queries."""
    parameters, rho, numbers = list(model.parameters()), 1e-3, itertools.count()

    @torch.inference_mode()
    def query() -> float:
        return closure().item()

    def step() -> None:
        seed = next(numbers)
        perturb(parameters, seed, rho)
        plus = query()
        perturb(parameters, seed, -2 * rho)
        minus = query()
        perturb(parameters, seed, rho)
        perturb(parameters, seed, -lr * (plus - minus) / (2 * rho))

    return step


def adamw(model: nn.Module, closure: Closure) -> Callable[[], Any]:
    """A step of backpropagation with torch's AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        closure().backward()
        optimizer.step()

    return step


def vs2p(model: nn.Module, closure: Closure, **settings: Any) -> Callable[[], Any]:
    import forwardtune as ft

    optimizer = ft.VS2P(model.parameters(), **{"lr": 1e-3, **settings})
    return lambda: optimizer.step(closure)


def forward_trainer(model: nn.Module, closure: Closure) -> Callable[[], Any]:
    from forwardtune.integrations.huggingface import ForwardTrainer, ForwardTrainingArguments

    return _trained(model, ForwardTrainer, ForwardTrainingArguments, learning_rate=1e-3)


def trainer(model: nn.Module, closure: Closure) -> Callable[[], Any]:
    """Hugging Face's own Trainer, with backpropagation."""
    from transformers import Trainer, TrainingArguments

    return _trained(model, Trainer, TrainingArguments, learning_rate=1e-6)


def _trained(model: nn.Module, kind: Any, arguments: Any, batch: int = 32, length: int = 64, **more: Any) -> Any:
    tokens = torch.randint(0, 50257, (batch, length))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    run = {"max_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True}
    args = arguments(tempfile.mkdtemp(), per_device_train_batch_size=batch, **run, **more)
    return kind(model, args, train_dataset=rows).train
