"""A transformer tuned to labelled texts, or to plain ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from forwardtune.errors import ExperimentError
from forwardtune.files import replace_file, translated
from forwardtune.heads import fit_head
from forwardtune.integrations.huggingface.footprint import footprint
from forwardtune.metrics import metric, one_minus, perplexity
from forwardtune.readout import Readout
from forwardtune.tasks.computing import computed
from forwardtune.tasks.identity import FITS, RULES, file_digest, fingerprint
from forwardtune.tasks.sources import Sources
from forwardtune.tasks.task import Scores, Task
from forwardtune.tasks.texts import glue
from forwardtune.tasks.texts.data import LINE, Text, Texts, from_files, plain_texts
from forwardtune.tasks.texts.last_norm import fit_last_norm
from forwardtune.tasks.texts.models import PretrainedModel
from forwardtune.tasks.texts.padding import Rows
from forwardtune.tasks.texts.quantized import check_saved
from forwardtune.tasks.texts.setups import Head, Language, score_between
from forwardtune.tasks.texts.workload import LM, PLAIN, TextWorkload

CHUNK = 16  # texts evaluated at a time
READOUT = "forwardtune.readout"
"""Its name in a file of base weights."""

Batch = tuple[list[Rows], Tensor]


class TextTask(Task):
    """The weights of a model, or of its adapter, are tuned, without dropout."""

    workload: TextWorkload

    def __init__(self, workload: TextWorkload, sources: Sources, device: str) -> None:
        self.texts = _texts(workload, sources)
        super().__init__(workload, sources, device, len(self.texts.train), len(self.texts.test))
        self.note = self.texts.note
        known = glue.TASKS.get(workload.data)
        self.metrics = known.metrics if known else ("accuracy", "f1")
        self.words = workload.words or (known.words if known else self.texts.classes)
        path = sources.model(workload.weights)
        self.language = PretrainedModel(
            path or workload.weights, workload.setup, workload.adapter, workload.dtype, workload.pad_token
        )
        usual = known.template if known else _default_template(self.texts.columns)
        self.template = workload.template or ("" if self.language.setup_name == "head" else usual)
        self.setup_words = self._checked_words()
        self.setup = self.language.setup(self.texts.columns, self.template, self.setup_words, workload.max_length)

    def _checked_words(self) -> tuple[str, ...]:
        """The answers, if there are any: a head that gives a score has none."""
        if self.language.setup_name == "head" and not self.texts.classes:
            return ()
        wanted = len(self.texts.classes) or 2
        if len(self.words) != wanted:
            classes = f"the classes {', '.join(self.texts.classes)}" if self.texts.classes else "the ends of the score"
            raise ExperimentError(f"there are {len(self.words)} words for {classes}; give {wanted}, in that order")
        return self.words

    @property
    def data_digest(self) -> str:
        return self.texts.digest

    @property
    def majority(self) -> float | None:
        if not self.texts.classes:
            return None
        actual = self.texts.test_y[self._sample[1]]
        return actual.bincount().max().item() / len(actual)

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
        """Examples by index, encoded when they are first asked for."""
        encoded = []
        for i in chosen.tolist():
            rows = kept[i]
            if rows is None:
                rows = kept[i] = self.setup.encode(texts[i])
            encoded.append(rows)
        return encoded

    def batch(self, chosen: Tensor) -> Batch:
        return self._encoded(self._train, self.texts.train, chosen), self.texts.train_y[chosen].to(self.device)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._objective(self._logits(model, batch[0]), batch[1])

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        logits = self._logits(model, batch[0], together=True)
        return torch.stack([self._objective(own[None], y[None]) for own, y in zip(logits, batch[1], strict=True)])

    def _logits(self, model: nn.Module, rows: list[Rows], *, together: bool = False) -> Tensor:
        return self._computed(self.setup.logits, model, rows, together=together)

    def _computed(self, forward: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
        return computed(self.workload.compute, self.device, partial(forward, *args, **options))

    def _objective(self, logits: Tensor, actual: Tensor) -> Tensor:
        """One minus a metric, or the loss: the cross entropy, with a score as the probability of the second answer.

        A head that gives the score itself has the squared error.
        """
        if self.workload.objective != "loss":
            return one_minus(self.workload.objective, logits, actual)
        if logits.shape[1] == 1 and not self.texts.classes:
            return F.mse_loss(logits[:, 0], actual)
        return F.cross_entropy(logits, self._targets(actual))

    def _targets(self, actual: Tensor) -> Tensor:
        """Labels, or the probabilities of two answers that a score stands for."""
        if self.texts.classes:
            return actual
        second = (actual - self.texts.low) / (self.texts.high - self.texts.low)
        return torch.stack([1 - second, second], dim=1)

    def answer(self, logits: Tensor) -> Tensor:
        """Class indices, or scores."""
        if self.texts.classes:
            return logits.argmax(1)
        return score_between(logits, self.texts.low, self.texts.high)

    def score(self, model: nn.Module, train: Tensor, test: Tensor) -> Scores:
        encoded = self._encoded(self._train, self.texts.train, train)
        train_loss, _ = self._evaluated(model, encoded, self.texts.train_y[train])
        actual = self.texts.test_y[test]
        test_loss, predicted = self._evaluated(model, self._encoded(self._test, self.texts.test, test), actual)
        classes = len(self.texts.classes)
        return Scores(train_loss, test_loss, {name: metric(name, predicted, actual, classes) for name in self.metrics})

    def _evaluated(self, model: nn.Module, examples: list[Rows], actual: Tensor) -> tuple[float, Tensor]:
        """The objective over all examples, and the answers."""
        logits = self.predict(model, examples)
        return self._objective(logits, actual).item(), self.answer(logits)

    @torch.inference_mode()
    def predict(self, model: nn.Module, examples: list[Rows]) -> Tensor:
        """Logits, computed in order of length."""
        order = sorted(range(len(examples)), key=lambda i: len(examples[i][0]["input_ids"]))
        parts = [
            self._logits(model, [examples[i] for i in order[at : at + CHUNK]]).cpu()
            for at in range(0, len(order), CHUNK)
        ]
        return torch.cat(parts)[torch.tensor(order).argsort()]

    @cached_property
    def base_id(self) -> str:
        w, path = self.workload, Path(self.language.path)
        files = sorted(file for file in (path, *path.glob("*")) if file.is_file())
        model = {file.name: file_digest(file) for file in files} or w.weights
        content = [RULES, self.language.setup_name, w.adapter, w.dtype, self.setup.answers, model, self.data_digest]
        if w.fit:
            content.append(
                ("fit", FITS, w.fit, w.compute, w.test_examples, w.template, w.max_length, w.pad_token, *w.words)
            )
        return fingerprint(content)

    def check(self) -> None:
        self.language.check_size(self.device)

    def describe(self, model: nn.Module) -> str:
        return str(footprint(model))

    def make_base(self, file: Path) -> nn.Module:
        """Writes only what the model's own files lack: new weights, and the readout."""
        model, new = self._built()
        model = model.to(self.device)
        before = None
        if self.workload.fit:
            before = self._told_before(model)
            new += self._fit(model, new)
        state = model.state_dict()
        made = {name: state[name].cpu().contiguous().clone() for name in new}
        if self.setup.readout:
            made |= {f"{READOUT}.{name}": tensor.contiguous() for name, tensor in self.setup.readout._asdict().items()}
        with translated(ExperimentError, f"{file} cannot be written"):
            replace_file(file, lambda path: save_file(made, path, before))
        return model

    @torch.no_grad()
    def _fit(self, model: nn.Module, new: Collection[str]) -> list[str]:
        """Fits a new head or, where the model brings all that it has, the readout of its answers.

        Returns the names of the model's own weights that it changed.
        """
        if not isinstance(self.setup, Head):
            rows, ys = zip(*map(self.batch, self._examples_to_fit()), strict=True)
            blocks = len(self.setup.blocks(model)) > 0
            features = torch.cat([self._computed(self.setup.features, model, some, blocks=blocks) for some in rows])
            if not torch.isfinite(features).all():
                raise ExperimentError(f"{self.language.path} computes numbers that are not finite; leave fit out")
            self.setup.fit(model, features, self._targets(torch.cat(ys)))
        elif f"{(head := self._head(model))}.weight" in new:
            fit_head(model, head, map(self.batch, self._examples_to_fit()), partial(self._logits, model))
        return []

    def _head(self, model: nn.Module) -> str:
        """The name of the linear layer whose outputs are the answers; peft keeps a copy of it that is not used."""
        layers: list[tuple[str, nn.Module]] = list(model.named_modules())
        for name, module in reversed(layers):
            is_head = isinstance(module, nn.Linear) and module.out_features == self.setup.answers
            if is_head and "original_module" not in name:
                return name
        raise ExperimentError(f"{self.language.path} has no linear head to fit; leave fit out")

    def start(self, base: Path) -> nn.Module:
        model, _ = self._built()
        made = load_file(base)
        model.load_state_dict(made, strict=False)
        if f"{READOUT}.weight" in made:
            self.setup.readout = Readout(made[f"{READOUT}.weight"], made[f"{READOUT}.bias"])
        return model.to(self.device)

    def _built(self) -> tuple[nn.Module, list[str]]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model, new = self.language.build(self.setup.answers)
        if self.workload.adapter == "none":
            check_saved(model)
        return model, new


class LanguageTask(TextTask):
    """A causal language model goes on learning to continue texts; labels are ignored.

    The loss of an example is the cross entropy of its next tokens, the mean over its own; that of a batch is the mean
    of these. The losses of an evaluation are means over all tokens of its examples, so that the perplexity is the
    exponential of the test loss.
    """

    setup: Language

    def __init__(self, workload: TextWorkload, sources: Sources, device: str) -> None:
        super().__init__(workload, sources, device)
        self.metrics, self.template = ("perplexity",), ""
        for texts, places in zip((self.texts.train, self.texts.test), self.texts.places, strict=True):
            for text, place in zip(texts, places, strict=True):
                if len(" ".join(text).split()) < 2:  # longer ones have tokens enough
                    self._check_text(text, place)

    def _check_text(self, text: Text, place: str) -> None:
        try:
            self.setup.encode(text)
        except ExperimentError as error:
            raise ExperimentError(f"{place}: {error}") from None

    def _checked_words(self) -> tuple[str, ...]:
        return ()

    @property
    def guessing(self) -> float:
        return math.log(self.language.config.vocab_size)

    def _fit(self, model: nn.Module, new: Collection[str]) -> list[str]:
        """Fits the last norm to the tokens of texts."""
        rows = [example for chosen in self._examples_to_fit() for example in self.batch(chosen)[0]]
        some = (rows[i : i + CHUNK] for i in range(0, len(rows), CHUNK))
        names, _ = fit_last_norm(model, (self.setup.next_tokens(examples, self.device) for examples in some))
        return names

    def _objective(self, logits: Tensor, actual: Tensor) -> Tensor:
        return -logits.mean()

    def score(self, model: nn.Module, train: Tensor, test: Tensor) -> Scores:
        train_loss = self._per_token(model, self._encoded(self._train, self.texts.train, train))
        test_loss = self._per_token(model, self._encoded(self._test, self.texts.test, test))
        return Scores(train_loss, test_loss, {"perplexity": perplexity(test_loss)})

    def _per_token(self, model: nn.Module, examples: list[Rows]) -> float:
        """The mean loss over all tokens of the examples."""
        counts = torch.tensor([self.setup.tokens(rows) for rows in examples], dtype=torch.float64)
        means = self.predict(model, examples)[:, 0].double()
        return -(means @ counts / counts.sum()).item()


def _texts(workload: TextWorkload, sources: Sources) -> Texts:
    if workload.data in glue.TASKS:
        texts = glue.load(workload.data, sources.data, download=sources.download)
        return texts.without_labels() if workload.setup == LM else texts
    test = sources.file(workload.test) if workload.test else None
    if workload.data == PLAIN:
        return plain_texts(sources.file(workload.train), test, workload.text or (LINE,))
    return from_files(sources.file(workload.train), test, workload.text, workload.label)


def _default_template(columns: Sequence[str]) -> str:
    return " ".join(f"{{{column}}}" for column in columns) + " It is"
