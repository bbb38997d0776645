"""Tuning a model of language to labelled texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from forwardtune.errors import ExperimentError
from forwardtune.experiments.plan import RULES, fingerprint
from forwardtune.experiments.spec import Workload
from forwardtune.experiments.store import publish
from forwardtune.experiments.workloads.language import glue
from forwardtune.experiments.workloads.language.metrics import metric
from forwardtune.experiments.workloads.language.models import Language
from forwardtune.experiments.workloads.language.setups import Rows, score_between
from forwardtune.experiments.workloads.language.texts import Text, Texts, from_files
from forwardtune.experiments.workloads.sources import Sources, digest
from forwardtune.experiments.workloads.task import Evaluation, Task
from forwardtune.integrations.huggingface.memory import footprint
from forwardtune.integrations.huggingface.objectives import METRICS, counts

CHUNK = 128  # texts evaluated at a time

Batch = tuple[list[Rows], Tensor]


class TextTask(Task):
    """The weights of a model, or of its adapter, are tuned without dropout."""

    def __init__(self, workload: Workload, sources: Sources, device: str) -> None:
        self.texts = _texts(workload, sources)
        super().__init__(workload, sources, device, len(self.texts.train), len(self.texts.test))
        self.note = self.texts.note
        known = glue.TASKS.get(workload.data)
        self.metrics = known.metrics if known else ("accuracy", "f1")
        self.template = workload.template or (known.template if known else _default_template(self.texts.columns))
        self.words = workload.words or (known.words if known else self.texts.classes)
        place = sources.model(workload.weights)
        self.language = Language(
            place or workload.weights, workload.setup, workload.adapter, workload.dtype, workload.pad_token
        )
        scored = self.language.setup_name == "head" and not self.texts.classes
        self.setup_words = () if scored else self._checked_words()
        self.setup = self.language.setup(self.texts.columns, self.template, self.setup_words, workload.max_length)

    def _checked_words(self) -> tuple[str, ...]:
        wanted = len(self.texts.classes) or 2
        if len(self.words) != wanted:
            classes = f"the classes {', '.join(self.texts.classes)}" if self.texts.classes else "the ends of the score"
            raise ExperimentError(f"there are {len(self.words)} words for {classes}; give {wanted}, in that order")
        return self.words

    @property
    def data_digest(self) -> str:
        return self.texts.digest

    @property
    def data(self) -> dict[str, Any]:
        """With the accuracy of always answering the commonest class of the examples that are looked at."""
        looked_at = self.texts.test_y[self._sample[1]]
        majority = {"majority": looked_at.bincount().max().item() / len(looked_at)} if self.texts.classes else {}
        return super().data | majority

    @property
    def guessing(self) -> float:
        return math.log(max(2, len(self.texts.classes)))

    @cached_property
    def _train(self) -> list[Rows | None]:
        return [None] * self.examples

    @cached_property
    def _test(self) -> list[Rows | None]:
        return [None] * self.tests

    def _encoded(self, kept: list[Rows | None], texts: Sequence[Text], chosen: Tensor) -> list[Rows]:
        """Examples by their numbers, encoded when they are first asked for."""
        found = []
        for i in chosen.tolist():
            rows = kept[i]
            if rows is None:
                rows = kept[i] = self.setup.encode(texts[i])
            found.append(rows)
        return found

    def batch(self, chosen: Tensor) -> Batch:
        return self._encoded(self._train, self.texts.train, chosen), self.texts.train_y[chosen].to(self.device)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._objective(self.setup.logits(model, batch[0]), batch[1])

    def _objective(self, logits: Tensor, actual: Tensor) -> Tensor:
        """The cross entropy, for a score that of an answer between its two ends; or what a metric lacks."""
        if self.workload.objective != "loss":
            return 1 - METRICS[self.workload.objective](*counts(logits, actual))
        if self.texts.classes:
            return F.cross_entropy(logits, actual)
        if logits.shape[1] == 1:
            return F.mse_loss(logits[:, 0], actual)
        part = (actual - self.texts.low) / (self.texts.high - self.texts.low)
        return F.cross_entropy(logits, torch.stack([1 - part, part], dim=1))

    def answer(self, logits: Tensor) -> Tensor:
        """Numbers of classes, or scores."""
        if self.texts.classes:
            return logits.argmax(1)
        return score_between(logits, self.texts.low, self.texts.high)

    def score(self, model: nn.Module, train: Tensor, test: Tensor) -> Evaluation:
        train_loss, _ = self._means(
            model, self._encoded(self._train, self.texts.train, train), self.texts.train_y[train]
        )
        actual = self.texts.test_y[test]
        test_loss, predicted = self._means(model, self._encoded(self._test, self.texts.test, test), actual)
        found = {"train_loss": train_loss, "test_loss": test_loss}
        return found | {name: metric(name, actual, predicted, len(self.texts.classes)) for name in self.metrics}

    def _means(self, model: nn.Module, examples: list[Rows], actual: Tensor) -> tuple[float, Tensor]:
        logits = self.predict(model, examples)
        return self._objective(logits, actual).item(), self.answer(logits)

    @torch.inference_mode()
    def predict(self, model: nn.Module, examples: list[Rows]) -> Tensor:
        """Logits, computed in the order of length."""
        order = sorted(range(len(examples)), key=lambda i: len(examples[i][0]["input_ids"]))
        parts = [
            self.setup.logits(model, [examples[i] for i in order[at : at + CHUNK]]).cpu()
            for at in range(0, len(order), CHUNK)
        ]
        return torch.cat(parts)[torch.tensor(order).argsort()]

    @cached_property
    def base_id(self) -> str:
        w, place = self.workload, Path(self.language.place)
        files = sorted(file for file in place.glob("*") if file.is_file()) if place.is_dir() else []
        model = {file.name: digest(file) for file in files} or w.weights
        return fingerprint(
            [RULES, self.language.setup_name, w.adapter, w.dtype, self.setup.answers, model, self.data_digest]
        )

    def check(self) -> None:
        self.language.check_size(self.device)

    def describe(self, model: nn.Module) -> str:
        return str(footprint(model))

    def make_base(self, file: Path) -> None:
        """Only what is not in the model's own files."""
        model, new = self._built()
        state = model.state_dict()
        made = {name: state[name].contiguous().clone() for name in new}
        publish(file, lambda path: save_file(made, path))

    def start(self, base: Path) -> nn.Module:
        model, _ = self._built()
        model.load_state_dict(load_file(base), strict=False)
        return model.to(self.device)

    def _built(self) -> tuple[nn.Module, list[str]]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.language.build(self.setup.answers)


def _texts(workload: Workload, sources: Sources) -> Texts:
    if workload.data in glue.TASKS:
        return glue.load(workload.data, sources.data, download=sources.download)
    test = sources.file(workload.test) if workload.test else None
    return from_files(sources.file(workload.train), test, workload.text, workload.label)


def _default_template(columns: Sequence[str]) -> str:
    return " ".join(f"{{{column}}}" for column in columns) + " It is"
