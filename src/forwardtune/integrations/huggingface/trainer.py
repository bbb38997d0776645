"""`transformers.Trainer` with forward passes only: its loop, unchanged, around another training step.

Trainer calls `training_step` for every micro-batch and, when a batch is complete, `optimizer.step()`. Here the
micro-batches are kept until the last one arrives; then the step is taken, each of its probes going through all of them,
and Trainer's own call of `optimizer.step()` does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from forwardtune import ledger as ledgers
from forwardtune._compat.transformers import transformers
from forwardtune.errors import InvalidArgumentError
from forwardtune.integrations.huggingface import example_objectives, objectives
from forwardtune.integrations.huggingface.arguments import NOT_APPLICABLE, ForwardTrainingArguments
from forwardtune.integrations.huggingface.objectives import Own
from forwardtune.optimizer import LineSearch
from forwardtune.packed import keep_as_packed, parts_of


class ForwardTrainer(transformers.Trainer):
    """A Trainer that tunes every parameter with `requires_grad`, using only forward passes.

    All of Trainer works: schedulers, callbacks, logs, evaluation, checkpoints, several processes. The loss of a step is
    computed under `model.train()`, with the same dropout masks at all its probes.

    Args:
        model, args, ...: as for `transformers.Trainer`; `args` is a :class:`ForwardTrainingArguments`.
        objective: what a step minimizes: ``"loss"`` (default) is what Trainer would differentiate; ``"accuracy"`` and
            ``"f1"`` are maximized; a function of the model and a batch returns a number, with or without a gradient.
            With ``directions="per-example"`` or ``"auto"`` there is one loss per example, and a function returns a
            tensor of them.
    """

    args: ForwardTrainingArguments
    model: nn.Module
    optimizer: Any

    def __init__(
        self,
        model: nn.Module | None = None,
        args: ForwardTrainingArguments | None = None,
        *others: Any,
        objective: str | Own = "loss",
        **more: Any,
    ) -> None:
        self._objective = objectives.choose(objective)
        args = ForwardTrainingArguments("tmp_trainer") if args is None else args
        if not isinstance(args, ForwardTrainingArguments):
            raise InvalidArgumentError(
                f"args must be ForwardTrainingArguments, which choose the method, not {type(args).__name__}"
            )
        super().__init__(model, args, *others, **more)
        if not isinstance(self.optimizer, LineSearch | None):
            raise InvalidArgumentError(
                f"the optimizer must be one of forwardtune's: {type(self.optimizer).__name__} needs gradients"
            )
        if self.optimizer_cls_and_kwargs:
            raise InvalidArgumentError("optimizer_cls_and_kwargs does not apply here; choose the method in args")
        sharded = self.accelerator.distributed_type in ("DEEPSPEED", "FSDP", "MEGATRON_LM")
        if self.accelerator.mixed_precision == "fp16" or sharded:  # set by a launcher, not by the arguments
            name = "fp16" if not sharded else {"DEEPSPEED": "deepspeed"}.get(self.accelerator.distributed_type, "fsdp")
            raise InvalidArgumentError(
                f"{name} does not apply to tuning with forward passes only: {NOT_APPLICABLE[name]}"
            )
        _check_padding(self.model, max(self.args.per_device_train_batch_size, self.args.per_device_eval_batch_size))
        keep_as_packed(self.model)
        directions = self.args.directions if self.optimizer is None else self.optimizer.directions
        if isinstance(directions, str):
            self._objective = example_objectives.choose(objective, self)
        # No DistributedDataParallel: it would allocate a copy of all gradients.
        self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)
        self._batches: list[Mapping[str, Any]] = []
        self._begun = False
        self._ledger: ledgers.Ledger | None = None
        self.add_callback(_AnchorCheckpoints)

    def train(self, *others: Any, **more: Any) -> Any:
        """As Trainer's; the ledger is closed however it ends."""
        try:
            return super().train(*others, **more)
        finally:
            self._close_ledger()

    def _load_best_model(self) -> None:
        """The ledger ends with the last step's weights, not with the best."""
        self._close_ledger()
        super()._load_best_model()

    def create_optimizer(self, model: nn.Module | None = None) -> LineSearch:
        """The method chosen by the arguments, over all parameters that require a gradient."""
        self._batches, self._begun = [], False
        if self.optimizer is None:
            tuned = [(name, p) for name, p in (model or self.model).named_parameters() if p.requires_grad]
            if not tuned:
                raise InvalidArgumentError(
                    "there is nothing to tune: no parameter of the model requires a gradient; set requires_grad on some"
                )
            self.optimizer = self.args.optimizer(tuned)
        if isinstance(self.optimizer, LineSearch):  # not yet wrapped by accelerate
            self.optimizer.step = MethodType(_step_with_closure, self.optimizer)  # type: ignore[method-assign]
        return self._method

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Keeps a micro-batch; at the last one, takes the step and returns the loss over all of them."""
        self._batches.append(self._prepare_inputs(inputs))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batches, self._batches = self._batches, []
        if not self._begun:
            self._begin()
        for batch in batches:
            _check_labels(self.model, batch)
        model.train()

        def query() -> Tensor:
            with self.compute_loss_context_manager():
                return self._objective(self, model, batches)

        loss: Tensor = self._method.step(query)
        return loss

    def log(self, logs: dict[str, float], *others: Any, **more: Any) -> None:
        """Adds what the method saw in its last step, and how many queries it has used, to the training logs."""
        if "loss" in logs and self.optimizer and (seen := self._method.last_step):
            logs.pop("grad_norm", None)  # there are no gradients
            auto = self._method.auto
            measured = {"gamma": seen.gamma, "sigma": seen.sigma, "t": seen.t, "r": auto["r"] if auto else None}
            measured["agreement"] = self._method.agreement
            logs |= {name: value for name, value in measured.items() if value is not None}
            logs |= {"queries": self._method.queries, "plateaus": self._method.plateaus}
        super().log(logs, *others, **more)

    @property
    def _method(self) -> LineSearch:
        """The optimizer without accelerate's wrapper."""
        method = self.optimizer if isinstance(self.optimizer, LineSearch) else self.optimizer.optimizer
        assert isinstance(method, LineSearch)
        return method

    def _begin(self) -> None:
        """Before the first step of a call to `train`: gives all processes the same weights, and opens the ledger."""
        self._begun, optimizer = True, self._method
        if self.accelerator.num_processes > 1:
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                for part in parts_of(tensor):
                    torch.distributed.broadcast(part.data, 0)
        if self.args.ledger and self.accelerator.is_main_process and optimizer.recorder is None:
            path = Path(self.args.ledger)
            if path.exists() and not optimizer.queries:
                raise InvalidArgumentError(
                    f"the ledger {path} already exists: resume its run by train(resume_from_checkpoint=True), or "
                    "choose another name"
                )
            if path.exists():
                ledgers.rejoin(optimizer, self.model, path)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                optimizer.recorder = ledgers.Ledger(path, self.model)
            assert isinstance(optimizer.recorder, ledgers.Ledger)
            self._ledger = optimizer.recorder

    def _close_ledger(self) -> None:
        if self._ledger:
            self._ledger.close()
            self._ledger = self._method.recorder = None


def _check_padding(model: nn.Module, batch: int) -> None:
    """A classifier on top of a causal model finds the end of a text by the pad token."""
    config: Any = getattr(model, "config", None)
    if batch == 1 or not _classifies(model) or getattr(config, "pad_token_id", None) is not None:
        return
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING and not hasattr(config, "type_vocab_size"):
        raise InvalidArgumentError(
            "the model has no pad token, by which its head finds the end of a text: set model.config.pad_token_id (and "
            "tokenizer.pad_token) before training, for instance to the end-of-text token"
        )


def _check_labels(model: nn.Module, batch: Mapping[str, Any]) -> None:
    labels = batch.get("labels")
    if not _classifies(model) or not isinstance(labels, Tensor) or labels.is_floating_point() or labels.ndim != 1:
        return
    config: Any = model.config
    classes = config.num_labels
    wrong = labels[(labels != -100) & ((labels < 0) | (labels >= classes))]
    if classes > 1 and len(wrong):
        raise InvalidArgumentError(
            f"the label {wrong[0].item()} is out of range for a model with {classes} classes; labels are 0 to "
            f"{classes - 1}: correct the data, or load the model with num_labels"
        )


def _classifies(model: nn.Module) -> bool:
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    return type(inner).__name__.endswith("ForSequenceClassification") and hasattr(inner, "config")


class _AnchorCheckpoints(transformers.TrainerCallback):
    """Anchors the ledger at every checkpoint, so that it recognizes a run that resumes from there."""

    def on_save(self, *others: Any, optimizer: Any = None, **more: Any) -> None:
        recorder = getattr(optimizer, "optimizer", optimizer).recorder
        if isinstance(recorder, ledgers.Ledger):
            recorder.anchor()


def _step_with_closure(optimizer: LineSearch, closure: Callable[[], Any] | None = None) -> Any:
    """With a closure, the call of `training_step`, takes a step; without, Trainer's call that follows, does nothing."""
    return None if closure is None else type(optimizer).step(optimizer, closure)
