"""Training arguments: Trainer's and those of a method; arguments that only apply to gradients are refused."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from forwardtune._compat.transformers import transformers
from forwardtune.arguments import check_directions
from forwardtune.errors import InvalidArgumentError
from forwardtune.methods import METHODS
from forwardtune.optimizer import LineSearch
from forwardtune.scales import SCALES

NOT_APPLICABLE = {
    "fp16": "its scaler scales gradients, and there are none; load the model in float16 or use bf16",
    "gradient_checkpointing": "it saves memory in the backward pass, and there is none",
    "max_grad_norm": "there are no gradients to clip",
    "weight_decay": "no method here decays weights",
    "optim": "the optimizer is chosen by `method`",
    "optim_args": "the settings of a method are given in `method_args`",
    "optim_target_modules": "freeze what is not to be tuned, by requires_grad or with peft",
    "adam_beta1": "there is no Adam here",
    "adam_beta2": "there is no Adam here",
    "adam_epsilon": "there is no Adam here",
    "deepspeed": "it shards gradients and optimizer states, and there are none",
    "fsdp": "every process needs all the weights; a model that fits for inference fits here",
}
"""Why an argument of Trainer's is refused."""


@dataclass
class ForwardTrainingArguments(transformers.TrainingArguments):
    """Trainer's arguments, with a method that needs no gradients instead of an optimizer.

    `seed` also seeds the noise. Without a `learning_rate` VS2P, MeZO and STP find theirs while training.

    >>> args = ForwardTrainingArguments("out", method="MeZO", learning_rate=1e-6, scale="absolute", max_steps=100)
    >>> args.method, args.auto
    ('MeZO', False)
    """

    learning_rate: float | None = field(  # type: ignore[assignment]
        default=None, metadata={"help": "The step size; found while training by default, except for S2P."}
    )
    auto: bool | None = field(
        default=None,
        metadata={
            "help": "Whether the step size is found while training; learning_rate is then a factor, 1 by default. By "
            "default where no learning_rate is given and the method can."
        },
    )
    lr_scheduler_type: str | None = field(  # type: ignore[assignment]
        default=None,
        metadata={"help": "The schedule; by default linear, or constant where the step size is found while training."},
    )
    scale: str | None = field(
        default=None,
        metadata={"help": "The units of steps, absolute or relative to the weights; see forwardtune.RunOptions."},
    )
    max_grad_norm: float = field(default=0.0, metadata={"help": "Not used: there are no gradients to clip."})
    method: str = field(default="VS2P", metadata={"help": f"One of {', '.join(METHODS)}."})
    rho: float | None = field(
        default=None,
        metadata={"help": "How far the loss is probed; by default 1e-2, and 1e-3 in absolute units."},
    )
    distribution: str = field(
        default="rademacher", metadata={"help": "The distribution of the noise: rademacher, normal, uniform or sphere."}
    )
    directions: int | str | None = field(  # Trainer's parser reads the second of three types
        default=1,
        metadata={"help": "Directions searched per step; per-example, or auto (per example where it pays)."},
    )
    method_args: dict[str, Any] | str | None = field(
        default=None, metadata={"help": 'Other settings of the method, such as {"window": 20}.'}
    )
    ledger: str | None = field(
        default=None, metadata={"help": "A file that records the run, so that it can be replayed."}
    )

    _VALID_DICT_FIELDS = [*transformers.TrainingArguments._VALID_DICT_FIELDS, "method_args"]  # noqa: RUF012

    def __post_init__(self) -> None:
        defaults = {entry.name: entry.default for entry in fields(self)}
        for name, reason in NOT_APPLICABLE.items():
            given = getattr(self, name, None)
            if given and given != defaults[name]:
                raise InvalidArgumentError(
                    f"{name}={given!r} does not apply to tuning with forward passes only: {reason}"
                )
        known = {name.lower(): name for name in METHODS}
        if str(self.method).lower() not in known:
            raise InvalidArgumentError(f"method {self.method!r} is not known; choose one of {', '.join(METHODS)}")
        self.method = known[self.method.lower()]
        self._check_method_args()
        finds = METHODS[self.method].settings_at is not LineSearch.settings_at
        if self.auto and not finds:
            raise InvalidArgumentError(f"{self.method} cannot find its step size; give it a learning_rate")
        if self.scale is not None and self.scale not in SCALES:
            raise InvalidArgumentError(f"scale {self.scale!r} is not known; choose one of {', '.join(SCALES)}")
        if self.auto is None:
            self.auto = self.learning_rate is None and finds
        if self.auto and self.rho is not None:
            raise InvalidArgumentError("rho is found while training, too; leave it out, or give a learning_rate")
        self._check_directions()
        if self.learning_rate is None:
            if finds and not self.auto:
                raise InvalidArgumentError(f"{self.method} needs a learning_rate where auto=False; give it one")
            self.learning_rate = 1.0
        if self.lr_scheduler_type is None:
            self.lr_scheduler_type = "constant" if self.auto else "linear"
        super().__post_init__()  # type: ignore[no-untyped-call]

    def _check_directions(self) -> None:
        if self.directions is None or (isinstance(self.directions, str) and self.directions.isdecimal()):
            self.directions = int(self.directions or 1)
        check_directions(self.directions, self.distribution)
        if self.directions == "auto" and not self.auto:
            raise InvalidArgumentError(
                'directions="auto" goes without a learning_rate, which is then found while training; with one choose 1 '
                'or "per-example"'
            )
        if isinstance(self.directions, str) and self.gradient_accumulation_steps > 1:
            raise InvalidArgumentError(
                f"with directions={self.directions!r} every forward pass has the whole batch; leave "
                "gradient_accumulation_steps at 1, and make per_device_train_batch_size the size of the batch"
            )

    def _check_method_args(self) -> None:
        given = json.loads(self.method_args) if isinstance(self.method_args, str) else self.method_args or {}
        known = inspect.signature(METHODS[self.method]).parameters.keys() - {"params", "lr", "run"}
        if "rho" not in known and self.rho is not None:
            raise InvalidArgumentError(
                f"rho={self.rho:g} does not apply to {self.method}, which probes at its learning rate; leave it out"
            )
        for name in given:
            if name not in known:
                settings = ", ".join(sorted(known)) or "its learning rate"
                raise InvalidArgumentError(
                    f"method_args: {self.method} has no setting {name!r}, only {settings}; "
                    "seed, distribution and directions are arguments of their own"
                )
        kind: Any = METHODS[self.method]
        try:
            kind([torch.zeros(1)], lr=1.0, backend="reference", **given)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"method_args: {error}") from None

    def optimizer(self, params: Any, **run: Any) -> LineSearch:
        """The method, with the parameters it is to tune."""
        kind: Any = METHODS[self.method]
        settings = dict(self.method_args or {})  # type: ignore[arg-type]  # text was read as JSON by Trainer's arguments
        if self.rho is not None:
            settings = {"rho": self.rho, **settings}
        options: dict[str, Any] = {"distribution": self.distribution, "directions": self.directions, "seed": self.seed}
        if self.scale is not None:
            options["scale"] = self.scale
        optimizer: LineSearch = kind(
            params, lr="auto" if self.auto else self.learning_rate, **settings, **options, **run
        )
        if self.auto:
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate
        return optimizer
