"""How a text is put to a model, and its answer read: texts in, one logit for each answer out.

prompt: a language model is asked in its own words. The text goes into a template ("{sentence} It was") and the answers
    are words that may follow ("terrible", "great"); their logits are the answer's. A model that was trained to go on
    with texts knows something of the task before it is tuned, which is what few forward passes can build on.
similarity: a sentence encoder is asked in its own: by the cosine of two embeddings (means over tokens). Those of two
    texts are compared with each other, that of one with those of the answers ("It was terrible.", "It was great.").
head: a new linear map on top of the model, as is usual with backpropagation.

A batch is cut into buckets of about the same length, each padded to its longest, so the model sees little padding.
"""

from __future__ import annotations

import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forwardtune.errors import ExperimentError
from forwardtune.tasks.texts.data import Text

SCALE, THRESHOLD = 10.0, 0.7
"""Of the cosine: what it is multiplied by, and from where on two texts are alike."""
STRETCH = 1.25
"""The longest row of a bucket over its shortest, at most."""

Row = dict[str, list[int]]
Rows = tuple[Row, ...]
"""One example, as the tokenizer gives it: one sequence, or two that are embedded apart."""


class Setup(ABC):
    """`answers` is the number of logits."""

    answers: int

    def __init__(self, tokenizer: Any, max_length: int) -> None:
        self.tokenizer, self.max_length = tokenizer, max_length

    @property
    def _filler(self) -> int:
        """What stands for nothing."""
        known = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        return next((token for token in known if token is not None), 0)

    @abstractmethod
    def encode(self, text: Text) -> Rows: ...

    @abstractmethod
    def logits(self, model: nn.Module, examples: Sequence[Rows]) -> Tensor: ...

    def _in_buckets(
        self, model: nn.Module, rows: Sequence[Row], read: Callable[[dict[str, Tensor], list[Row]], Tensor]
    ) -> Tensor:
        """What is read from the model for every row, bucket by bucket."""
        device = next(model.parameters()).device
        order, parts = [], []
        for bucket in buckets([len(row["input_ids"]) for row in rows]):
            chosen = [rows[i] for i in bucket]
            order += bucket
            parts.append(read(pad(chosen, self._filler, device), chosen))
        return torch.cat(parts)[torch.tensor(order).argsort().to(device)]


class Prompt(Setup):
    """`mask` is the token whose place the answer takes; without one it follows the text."""

    def __init__(
        self,
        tokenizer: Any,
        max_length: int,
        columns: Sequence[str],
        template: str,
        words: Sequence[str],
        masked: bool = False,
    ) -> None:
        super().__init__(tokenizer, max_length)
        self.columns, self.template, self.answers = columns, template, len(words)
        check_template(template, columns)
        if masked and tokenizer.mask_token is None:
            raise ExperimentError("the tokenizer of this masked language model has no mask token; use another setup")
        self.mask = tokenizer.mask_token_id if masked else None
        self.ending = f" {tokenizer.mask_token}." if masked else ""
        self.words = torch.tensor(_first_tokens(tokenizer, words))
        if len(self._ids(tuple("" for _ in columns))) >= max_length:
            raise ExperimentError(f"the template alone has {max_length} tokens or more; raise max_length")

    def encode(self, text: Text) -> Rows:
        ids = self._ids(text)
        while len(ids) > self.max_length:  # the longest text loses its end, never the template
            longest = max(range(len(text)), key=lambda i: len(text[i]))
            kept = max(0, int(len(text[longest]) * (1 - (len(ids) - self.max_length) / len(ids))) - 1)
            text = (*text[:longest], text[longest][:kept], *text[longest + 1 :])
            ids = self._ids(text)
        return ({"input_ids": ids},)

    def _ids(self, text: Text) -> list[int]:
        prompt = fill(self.template, self.columns, text) + self.ending
        ids: list[int] = self.tokenizer(prompt)["input_ids"]
        start, end = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        if self.mask is None:
            ids = ids[:-1] if ids[-1:] == [end] else ids
            if start is not None and start != end and ids[:1] != [start]:  # Llama's was always there in its training
                ids = [start, *ids]
        return ids

    def logits(self, model: nn.Module, examples: Sequence[Rows]) -> Tensor:
        def read(inputs: dict[str, Tensor], rows: list[Row]) -> Tensor:
            places = [self._place(row["input_ids"], inputs["input_ids"].shape[1]) for row in rows]
            kept = sorted(set(places))
            spot = torch.tensor([kept.index(place) for place in places])
            wanted = torch.tensor(kept, device=inputs["input_ids"].device)
            if _keeps_logits(model):
                found: Tensor = model(**inputs, logits_to_keep=wanted).logits
            else:
                found = model(**inputs).logits[:, wanted]
            return found[torch.arange(len(rows)), spot][:, self.words].float()

        return self._in_buckets(model, [rows[0] for rows in examples], read)

    def _place(self, ids: list[int], width: int) -> int:
        """Where the answer is read, counted from the end, since adapters may put tokens in front."""
        return (len(ids) if self.mask is None else len(ids) - ids[::-1].index(self.mask)) - 1 - width


class Similarity(Setup):
    """`answers` are two for two texts: different, and alike."""

    def __init__(
        self, tokenizer: Any, max_length: int, columns: Sequence[str], template: str, words: Sequence[str]
    ) -> None:
        super().__init__(tokenizer, max_length)
        self.answers = len(words)
        check_template(template, columns)
        if len(columns) == 2 and self.answers != 2:
            raise ExperimentError(f"two texts are alike or not; similarity cannot tell {self.answers} classes of them")
        around = fill(template, columns, [""] * len(columns)).strip()
        self.labels = [] if len(columns) == 2 else [self._row(f"{around} {word}.".strip()) for word in words]

    def encode(self, text: Text) -> Rows:
        return tuple(map(self._row, text))

    def _row(self, text: str) -> Row:
        ids = self.tokenizer(text, truncation=True, max_length=self.max_length)["input_ids"]
        return {"input_ids": ids or [self._filler]}

    def logits(self, model: nn.Module, examples: Sequence[Rows]) -> Tensor:
        def read(inputs: dict[str, Tensor], rows: list[Row]) -> Tensor:
            mask = inputs["attention_mask"].unsqueeze(-1).float()
            hidden = model(**inputs).last_hidden_state[:, -mask.shape[1] :].float()  # without an adapter's tokens
            return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)

        n = len(examples)
        seconds = self.labels or [rows[1] for rows in examples]
        found = self._in_buckets(model, [*(rows[0] for rows in examples), *seconds], read)
        if self.labels:
            return SCALE * found[:n] @ found[n:].T
        alike = SCALE * ((found[:n] * found[n:]).sum(1) - THRESHOLD)
        return torch.stack([torch.zeros_like(alike), alike], dim=1)


class Head(Setup):
    """The model has the head already."""

    def __init__(self, tokenizer: Any, max_length: int, answers: int) -> None:
        super().__init__(tokenizer, max_length)
        self.answers = answers

    def encode(self, text: Text) -> Rows:
        found = self.tokenizer(*text, truncation=True, max_length=self.max_length)
        if not found["input_ids"]:
            return ({"input_ids": [self._filler]},)
        return ({name: list(found[name]) for name in ("input_ids", "token_type_ids") if name in found},)

    def logits(self, model: nn.Module, examples: Sequence[Rows]) -> Tensor:
        def read(inputs: dict[str, Tensor], rows: list[Row]) -> Tensor:
            found: Tensor = model(**inputs).logits
            return found.float()

        return self._in_buckets(model, [rows[0] for rows in examples], read)


def score_between(logits: Tensor, low: float, high: float) -> Tensor:
    """A head's one number is the score itself; of two answers, the more probable the second, the nearer to `high`."""
    return logits[:, 0] if logits.shape[1] == 1 else low + (high - low) * logits.softmax(1)[:, 1]


def fill(template: str, columns: Sequence[str], text: Sequence[str]) -> str:
    """A template with the texts in their places, `{column}`."""
    cells = dict(zip(columns, text, strict=True))
    return re.sub(r"\{([^{}]*)\}", lambda place: cells[place[1]], template)


def check_template(template: str, columns: Sequence[str]) -> None:
    """A template must hold every text, and nothing that is not there."""
    places = re.findall(r"\{([^{}]*)\}", template)
    for place in places:
        if place not in columns:
            holds = ", ".join(f"{{{column}}}" for column in columns)
            raise ExperimentError(f"the template {template!r} asks for {place!r}; it can hold {holds}")
    for column in columns:
        if column not in places:
            raise ExperimentError(f"the template {template!r} does not hold {{{column}}}; add it")


def buckets(lengths: Sequence[int]) -> list[list[int]]:
    """The numbers of the rows, by length, in lists whose longest is not much longer than their shortest."""
    found: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if not found or lengths[i] > STRETCH * lengths[found[-1][0]]:
            found.append([])
        found[-1].append(i)
    return found


def pad(rows: Sequence[Row], token: int, device: torch.device) -> dict[str, Tensor]:
    """Rows as tensors, filled up on the right."""
    width = max(len(row["input_ids"]) for row in rows)
    found = {
        name: torch.tensor(
            [row[name] + [token if name == "input_ids" else 0] * (width - len(row[name])) for row in rows]
        )
        for name in rows[0]
    }
    found["attention_mask"] = torch.tensor(
        [[1] * len(row["input_ids"]) + [0] * (width - len(row["input_ids"])) for row in rows]
    )
    return {name: tensor.to(device) for name, tensor in found.items()}


def _first_tokens(tokenizer: Any, words: Sequence[str]) -> list[int]:
    """The token that begins each word, as it follows others."""
    tokens = [tokenizer(f" {word}", add_special_tokens=False)["input_ids"] for word in words]
    if not all(tokens):
        raise ExperimentError(f"the word {words[tokens.index([])]!r} has no token; give another for the class")
    found = [ids[0] for ids in tokens]
    if len(set(found)) < len(found):
        double = [word for word, token in zip(words, found, strict=True) if found.count(token) > 1]
        raise ExperimentError(
            f"the words {', '.join(map(repr, double))} begin with the same token, so the model cannot choose between "
            "them; give other words for the classes"
        )
    return found


def _keeps_logits(model: nn.Module) -> bool:
    """Whether the model computes logits only where they are wanted."""
    outer: Any = model
    inner = outer.get_base_model() if hasattr(outer, "get_base_model") else outer
    return "logits_to_keep" in inspect.signature(inner.forward).parameters
