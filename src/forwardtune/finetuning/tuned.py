"""A tuned model in a folder: its weights or adapter, how it is asked, its ledger, and a card that tells of it.

model.safetensors, config.json, ...  the model and its tokenizer (with an adapter: adapter_model.safetensors, ...)
forwardtune.json                     how a text is put to it
run.ledger                           the run: with the base weights it gives the tuned ones, bit for bit; while it is
                                     under way a link to its live ledger in run/, afterwards its export
readout.safetensors                  how its answers are read, if that was fitted
base.safetensors                     of a new head or adapter: its weights before the run
README.md                            the card
run/                                 the run under way and its budget, from which it resumes if it was stopped
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from forwardtune import ledger as ledgers
from forwardtune.errors import ExperimentError, InvalidArgumentError
from forwardtune.experiments.result import Json
from forwardtune.experiments.store import read_json
from forwardtune.files import give_usual_mode, naming, temporary, translated
from forwardtune.metrics import perplexity
from forwardtune.readout import Readout
from forwardtune.tasks import Sources
from forwardtune.tasks.texts.data import Text
from forwardtune.tasks.texts.models import PretrainedModel, load_adapter, quiet
from forwardtune.tasks.texts.setups import Language, score_between
from forwardtune.tasks.texts.task import CHUNK
from forwardtune.tasks.texts.workload import ADAPTERS, DTYPES, SETUPS
from forwardtune.toml_tables import at_least, build, one_of

SETTINGS, LEDGER, NEW, READ = "forwardtune.json", "run.ledger", "base.safetensors", "readout.safetensors"
FORMAT = 3
"""Of the settings. Before format 3 there is no readout; in format 1 heads have templates that nothing was put into."""


@dataclass(frozen=True)
class Settings:
    """How a text is put to a tuned model.

    model: where the base of an adapter was; empty if the folder holds the whole model.
    columns, classes: of an example; without classes the answer is a score from `low` to `high`.
    """

    model: str
    setup: str
    adapter: str
    dtype: str
    pad_token: str
    max_length: int
    template: str
    columns: tuple[str, ...]
    low: float
    high: float
    words: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        one_of("setup", self.setup, SETUPS)
        one_of("adapter", self.adapter, ADAPTERS)
        one_of("dtype", self.dtype, DTYPES)
        at_least(1, max_length=self.max_length)
        if len(self.columns) > 2:
            raise ExperimentError(f"an example has one text or two, not {len(self.columns)}")
        if self.classes and len(self.words) != len(self.classes):
            raise ExperimentError(f"there are {len(self.words)} words for {len(self.classes)} classes")


@dataclass(frozen=True)
class Answer:
    """Of one example: a class and how sure the model is, a score, or the perplexity of so many tokens."""

    prediction: str | float
    probability: float | None = None
    tokens: int | None = None

    def to_json(self) -> Json:
        if self.tokens is not None:
            return {"perplexity": self.prediction, "tokens": self.tokens}
        sure = {} if self.probability is None else {"probability": round(self.probability, 4)}
        return {"prediction": self.prediction, **sure}


class Tuned:
    """A model from the folder that `finetune` made, ready to answer."""

    def __init__(self, folder: Path, device: str = "cpu", base: str | None = None, *, download: bool = False) -> None:
        self.settings = settings = read_settings(folder)
        if settings.adapter == "none" and base:
            raise ExperimentError(f"{folder} holds a whole model, which needs no base; leave --base out")
        path = str(folder) if settings.adapter == "none" else _base(folder, settings, base, download)
        self._language = PretrainedModel(path, settings.setup, settings.adapter, settings.dtype, settings.pad_token)
        self._language.check_size(torch.device(device))
        self._setup = self._language.setup(settings.columns, settings.template, settings.words, settings.max_length)
        self._setup.readout = self._read_readout(folder / READ)
        self._model = self._load(folder).to(device).eval()

    def _load(self, folder: Path) -> nn.Module:
        model, _ = self._language.build(self._setup.answers)
        if self.settings.adapter != "none":
            load_adapter(model, folder / "adapter_model.safetensors")
        readout = self._setup.readout
        if readout and readout.weight.shape[1] > self._setup.own and not self._setup.blocks(model):
            raise ExperimentError(f"{folder / READ} reads blocks that the model does not have; tune the model again")
        return model

    def _read_readout(self, file: Path) -> Readout | None:
        if not file.exists():
            return None
        setup = self._setup
        try:
            tensors = load_file(file)
            is_own = "weight" in tensors and tensors["weight"].shape[1:] == (setup.own,)
            return Readout.of(tensors, (setup.answers, setup.own if is_own else setup.own + setup.more))
        except (OSError, SafetensorError, InvalidArgumentError) as error:
            raise ExperimentError(f"{file} cannot be read ({error}); tune the model again, in another folder") from None

    @torch.inference_mode()
    def answers(self, texts: Sequence[Text]) -> Iterator[Answer]:
        for at in range(0, len(texts), CHUNK):
            examples = [self._setup.encode(text) for text in texts[at : at + CHUNK]]
            logits = self._setup.logits(self._model, examples)
            if isinstance(self._setup, Language):
                for mean, example in zip(logits[:, 0].tolist(), examples, strict=True):
                    yield Answer(perplexity(-mean), tokens=self._setup.tokens(example))
                continue
            if not self.settings.classes:
                scores = score_between(logits, self.settings.low, self.settings.high)
                yield from map(Answer, scores.tolist())
                continue
            sure, chosen = logits.softmax(1).max(1)
            for number, probability in zip(chosen.tolist(), sure.tolist(), strict=True):
                yield Answer(self.settings.classes[number], probability)


def replayed(folder: Path, base: str | None, out: Path, *, download: bool = False) -> None:
    """The tuned model of a folder once more, from its base weights and its ledger alone, written to another folder."""
    settings = read_settings(folder)
    if out.exists():
        raise ExperimentError(f"{out} already exists; choose another name for --out")
    path = _base(folder, settings, base, download)
    language = PretrainedModel(path, settings.setup, settings.adapter, settings.dtype, settings.pad_token)
    language.check_size(torch.device("cpu"))
    setup = language.setup(settings.columns, settings.template, settings.words, settings.max_length)
    with torch.random.fork_rng(devices=[]):
        model: Any = language.build(setup.answers)[0]
    if (folder / NEW).exists():
        model.load_state_dict(load_file(folder / NEW), strict=False)
    ledgers.replay(model, folder / LEDGER)
    new = temporary(out)
    try:
        with quiet(), translated(ExperimentError, f"{out} cannot be written"), naming(out):
            model.save_pretrained(new)
            language.tokenizer.save_pretrained(new)
            give_usual_mode(*new.glob("*.safetensors"))
            new.rename(out)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _base(folder: Path, settings: Settings, base: str | None, download: bool) -> str:
    """Where the model is that was tuned, as the user says: what a file says of other places is told, not followed."""
    if base:
        return str(Sources(download=download).model(base) or base)
    said = f", which was {settings.model} when it was tuned" if settings.model else ""
    raise ExperimentError(f"{folder} does not hold its base{said}; name one that you trust with --base")


def read_settings(folder: Path) -> Settings:
    """What the folder says of its model."""
    file = folder / SETTINGS
    if not file.is_file():
        raise ExperimentError(
            f"{folder} holds no tuned model: there is no {SETTINGS}; `forwardtune finetune` makes one"
        )
    table = read_json(file)
    if table.get("format") not in (1, 2, FORMAT):
        raise ExperimentError(f"{file} was written by another version of forwardtune; use that version for it")
    if table["format"] == 1 and table.get("setup") == "head":
        table = {**table, "template": ""}
    try:
        return build(Settings, {field.name: table[field.name] for field in fields(Settings)}, str(file))
    except KeyError as error:
        raise ExperimentError(f"{file} lacks {error}; tune the model again, in another folder") from None
