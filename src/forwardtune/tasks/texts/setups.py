"""How a text is put to a model and its answer read: texts in, one logit per answer out.

prompt: a language model is asked in its own terms. The text goes into a template ("{sentence} It was") and the answers
    are words that may follow ("terrible", "great"); the logits of their first tokens are those of the answers. A model
    trained to continue texts knows something about the task before it is tuned, which few forward passes can build on.
similarity: a sentence encoder is asked in its own terms, by the cosine of two embeddings (means over tokens). Two texts
    are compared with each other, a single text with the answers ("It was terrible.", "It was great."), or after a fit
    with vectors that tell the classes apart better.
head: a new linear layer on top of the model, as usual with backpropagation; with a template a causal model reads the
    text and the question before it.
lm: a language model is asked nothing. The only answer is the text itself, and its logit is the mean log-probability of
    its tokens. A fit is one of the last norm (`last_norm.py`).

The answers of the first two are read off what the model computes by a linear map, which may be fitted to examples: off
what it answers itself, or off what each of its blocks computes as well.

A batch is split into buckets of similar length, each padded to its longest row: as many as cost least, counting padded
tokens and passes.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forwardtune.errors import ExperimentError
from forwardtune.readout import Readout, fitted
from forwardtune.tasks.texts.blocks import blocks_of, reading
from forwardtune.tasks.texts.data import Text
from forwardtune.tasks.texts.padding import FAST_PASS, PASS, Row, Rows, buckets, pad
from forwardtune.tasks.texts.questions import Question, check_template, fill
from forwardtune.wide import WIDTH

SCALE, THRESHOLD = 10.0, 0.7
"""The cosine is multiplied by the one; above the other two texts count as alike."""

_SEVERAL_ROWS = "texts that are compared are several rows each, and cannot have lines of their own"


class Setup(ABC):
    """`answers` is the number of logits; where there is a `readout` they are what it makes of the features.

    The model has `depth` blocks, whose outputs are `hidden` wide, with `front` tokens of an adapter before the text's.
    """

    answers: int
    readout: Readout | None = None
    depth = hidden = front = 0
    by_block = 1
    """How many features a block has, of its width."""

    @property
    def own(self) -> int:
        """How many features there are without those of blocks."""
        return self.answers

    @property
    def more(self) -> int:
        """How many are those of blocks."""
        return self._read * self.by_block * self.hidden

    @property
    def _read(self) -> int:
        """How many blocks are read."""
        return min(self.depth, max(1, WIDTH // (self.by_block * self.hidden))) if self.hidden else 0

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """Those that are read, if the model has a list of them."""
        return blocks_of(model, self.depth, self._read) if self._read else ()

    def __init__(self, tokenizer: Any, max_length: int) -> None:
        self.tokenizer, self.max_length = tokenizer, max_length

    @property
    def _filler(self) -> int:
        """The token that rows are padded with; the attention mask hides it."""
        known = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        return next((token for token in known if token is not None), 0)

    @abstractmethod
    def encode(self, text: Text) -> Rows: ...

    @abstractmethod
    def features(
        self, model: nn.Module, examples: Sequence[Rows], *, together: bool = False, blocks: bool = False
    ) -> Tensor:
        """What the model computes of every example, in their order; `together` in one forward pass.

        It is their logits, unless a setup says otherwise, and with `blocks` what these compute as well.
        """

    def logits(self, model: nn.Module, examples: Sequence[Rows], *, together: bool = False) -> Tensor:
        """Of every example and answer."""
        if self.readout is None:
            return self.features(model, examples, together=together)
        blocks = self.readout.weight.shape[1] > self.own
        features = self.features(model, examples, together=together, blocks=blocks)
        with torch.autocast(features.device.type, enabled=False):  # thousands of terms in bfloat16 would drown slopes
            return self.readout(features)

    def fit(self, model: nn.Module, features: Tensor, targets: Tensor) -> None:
        """Makes the readout from examples, if that helps; targets are labels, or the probability of each answer."""
        as_they_are = Readout(torch.eye(self.answers), torch.zeros(self.answers))
        readout = fitted(features, targets, as_they_are)
        self.readout = None if readout is as_they_are else readout

    def _in_buckets(
        self,
        model: nn.Module,
        rows: Sequence[Row],
        read: Callable[[dict[str, Tensor], list[Row]], Tensor],
        together: bool,
    ) -> Tensor:
        """What `read` gets from the model for every row, computed bucket by bucket."""
        device = next(model.parameters()).device
        if together:
            return read(pad(rows, self._filler, device), list(rows))
        order, parts = [], []
        cost = FAST_PASS if torch.is_autocast_enabled(device.type) else PASS
        for bucket in buckets([len(row["input_ids"]) for row in rows], cost):
            chosen = [rows[i] for i in bucket]
            order += bucket
            parts.append(read(pad(chosen, self._filler, device), chosen))
        return torch.cat(parts)[torch.tensor(order).argsort().to(device)]


class Prompt(Setup):
    """With `masked` the answer fills a mask token after the text; without, it follows the text."""

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
        self.question, self.answers = Question(tokenizer, max_length, columns, template, masked), len(words)
        self.words = torch.tensor(_first_tokens(tokenizer, words))

    def encode(self, text: Text) -> Rows:
        return self.question.encode(text)

    def features(
        self, model: nn.Module, examples: Sequence[Rows], *, together: bool = False, blocks: bool = False
    ) -> Tensor:
        seen = self.blocks(model) if blocks else ()

        def read(inputs: dict[str, Tensor], rows: list[Row]) -> Tensor:
            indices = [self._answer_index(row["input_ids"], inputs["input_ids"].shape[1]) for row in rows]
            distinct = sorted(set(indices))
            with reading(seen, inputs["attention_mask"], self.front) as means:
                logits = _logits_at(model, inputs, torch.tensor(distinct))
            own = torch.tensor([distinct.index(index) for index in indices])
            return torch.cat([logits[torch.arange(len(rows)), own][:, self.words].float(), *means], 1)

        return self._in_buckets(model, [rows[0] for rows in examples], read, together)

    def _answer_index(self, ids: list[int], width: int) -> int:
        """Which token the answer is read at, counted from the end because adapters may put tokens in front."""
        mask = self.question.mask
        return (len(ids) if mask is None else len(ids) - ids[::-1].index(mask)) - 1 - width


class Similarity(Setup):
    """Two texts have two answers: different, and alike."""

    def __init__(
        self, tokenizer: Any, max_length: int, columns: Sequence[str], template: str, words: Sequence[str]
    ) -> None:
        super().__init__(tokenizer, max_length)
        self.answers = len(words)
        check_template(template, columns)
        if len(columns) == 2 and self.answers != 2:
            raise ExperimentError(
                f"two texts are alike or not; similarity cannot choose among {self.answers} classes: use another setup"
            )
        around = fill(template, columns, [""] * len(columns)).strip()
        self.by_block = len(columns)
        self.labels = [] if len(columns) == 2 else [self._row(f"{around} {word}.".strip()) for word in words]

    def encode(self, text: Text) -> Rows:
        return tuple(map(self._row, text))

    def _row(self, text: str) -> Row:
        ids = self.tokenizer(text, truncation=True, max_length=self.max_length)["input_ids"]
        return {"input_ids": ids or [self._filler]}

    @property
    def own(self) -> int:
        return self.hidden if self.labels else self.answers

    def features(
        self, model: nn.Module, examples: Sequence[Rows], *, together: bool = False, blocks: bool = False
    ) -> Tensor:
        """The embeddings of single texts; of pairs their logits and, of blocks, products and distances."""
        seen = self.blocks(model) if blocks else ()
        if self.labels:
            return self._embeddings(model, [rows[0] for rows in examples], together, seen)
        if together:
            raise ExperimentError(_SEVERAL_ROWS)
        both = self._embeddings(model, [rows[i] for i in (0, 1) for rows in examples], blocks=seen)
        width = both.shape[1] - len(seen) * self.hidden
        (first, u), (second, v) = (one.tensor_split([width], dim=1) for one in both.chunk(2))
        alike = SCALE * ((first * second).sum(1) - THRESHOLD)
        return torch.cat([torch.stack([torch.zeros_like(alike), alike], dim=1), u * v, (u - v).abs()], 1)

    def logits(self, model: nn.Module, examples: Sequence[Rows], *, together: bool = False) -> Tensor:
        if self.readout or not self.labels:
            return super().logits(model, examples, together=together)
        if together:
            raise ExperimentError(_SEVERAL_ROWS)
        embeddings = self._embeddings(model, [*(rows[0] for rows in examples), *self.labels])
        return SCALE * embeddings[: len(examples)] @ embeddings[len(examples) :].T

    def fit(self, model: nn.Module, features: Tensor, targets: Tensor) -> None:
        """The readout of single texts begins as the embeddings of the answers, which it takes the place of."""
        if not self.labels:
            super().fit(model, features, targets)
        else:
            answers = SCALE * self._embeddings(model, self.labels)
            self.readout = fitted(features, targets, Readout(answers, answers.new_zeros(self.answers)))

    def _embeddings(
        self, model: nn.Module, rows: Sequence[Row], together: bool = False, blocks: Sequence[nn.Module] = ()
    ) -> Tensor:
        def read(inputs: dict[str, Tensor], rows: list[Row]) -> Tensor:
            mask = inputs["attention_mask"].unsqueeze(-1).float()
            with reading(blocks, inputs["attention_mask"], self.front) as means:
                hidden = model(**inputs).last_hidden_state[:, -mask.shape[1] :].float()  # without an adapter's tokens
            return torch.cat([F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1), *means], 1)

        return self._in_buckets(model, rows, read, together)


class Head(Setup):
    """The logits are those of the model's own classification head; with a template it sees the text in that."""

    def __init__(
        self, tokenizer: Any, max_length: int, answers: int, columns: Sequence[str] = (), template: str = ""
    ) -> None:
        super().__init__(tokenizer, max_length)
        self.answers = answers
        self.question = Question(tokenizer, max_length, columns, template) if template else None

    def encode(self, text: Text) -> Rows:
        if self.question:
            return self.question.encode(text)
        encoded = self.tokenizer(*text, truncation=True, max_length=self.max_length)
        if not encoded["input_ids"]:
            return ({"input_ids": [self._filler]},)
        return ({name: list(encoded[name]) for name in ("input_ids", "token_type_ids") if name in encoded},)

    def features(
        self, model: nn.Module, examples: Sequence[Rows], *, together: bool = False, blocks: bool = False
    ) -> Tensor:
        return self._in_buckets(
            model, [rows[0] for rows in examples], lambda inputs, rows: model(**inputs).logits.float(), together
        )


class Language(Setup):
    """The logit of a text is the mean, over the tokens that follow others, of their log-probability in float32."""

    answers = 1

    def encode(self, text: Text) -> Rows:
        """The two texts of a pair follow each other. A first token that the model knows comes before every text."""
        ids: list[int] = self.tokenizer(" ".join(text), truncation=True, max_length=self.max_length)["input_ids"]
        start = self.tokenizer.bos_token_id
        if start is not None and ids[:1] != [start]:
            ids = [start, *ids][: self.max_length]
        if len(ids) < 2:
            raise ExperimentError(
                f"the text {' '.join(text)!r} is too short: no token in it follows another; leave it out, or add to it"
            )
        return ({"input_ids": ids},)

    def features(
        self, model: nn.Module, examples: Sequence[Rows], *, together: bool = False, blocks: bool = False
    ) -> Tensor:
        def read(inputs: dict[str, Tensor], rows: list[Row]) -> Tensor:
            ids = inputs["input_ids"]
            logits = _logits_at(model, inputs, torch.arange(-ids.shape[1], -1))
            means = []
            for row, own, nexts in zip(rows, logits, ids[:, 1:], strict=True):
                n = self.tokens((row,))
                means.append(F.cross_entropy(own[:n].float(), nexts[:n]))  # without what is padded
            return -torch.stack(means)[:, None]

        return self._in_buckets(model, [rows[0] for rows in examples], read, together)

    def next_tokens(self, examples: Sequence[Rows], device: torch.device) -> tuple[dict[str, Tensor], Tensor]:
        """The model's inputs, and the token that follows each; -1 where there is none."""
        inputs = pad([rows[0] for rows in examples], self._filler, device)
        follows = F.pad(inputs["attention_mask"][:, 1:], (0, 1)).bool()
        return inputs, F.pad(inputs["input_ids"][:, 1:], (0, 1)).masked_fill(~follows, -1)

    @staticmethod
    def tokens(example: Rows) -> int:
        """How many tokens of an example are predicted."""
        return len(example[0]["input_ids"]) - 1


def score_between(logits: Tensor, low: float, high: float) -> Tensor:
    """A score: the one logit of a head itself, or with two answers, the probability of the second from low to high."""
    return logits[:, 0] if logits.shape[1] == 1 else low + (high - low) * logits.softmax(1)[:, 1]


def _first_tokens(tokenizer: Any, words: Sequence[str]) -> list[int]:
    """The token that begins each word when it follows other words."""
    tokens = [tokenizer(f" {word}", add_special_tokens=False)["input_ids"] for word in words]
    if not all(tokens):
        raise ExperimentError(f"the word {words[tokens.index([])]!r} has no token; give another for the class")
    first = [ids[0] for ids in tokens]
    if len(set(first)) < len(first):
        same = [word for word, token in zip(words, first, strict=True) if first.count(token) > 1]
        raise ExperimentError(
            f"the words {', '.join(map(repr, same))} begin with the same token, so the model cannot choose between "
            "them; give other words for the classes"
        )
    return first


def _logits_at(model: nn.Module, inputs: dict[str, Tensor], at: Tensor) -> Tensor:
    """Logits at some tokens, counted from the end because adapters may put tokens in front."""
    kept = at.to(inputs["input_ids"].device)
    if _keeps_logits(model):
        return model(**inputs, logits_to_keep=kept).logits  # type: ignore[no-any-return]
    return model(**inputs).logits[:, kept]  # type: ignore[no-any-return]


def _keeps_logits(model: nn.Module) -> bool:
    """Whether the model can compute logits at some tokens only."""
    outer: Any = model
    inner = outer.get_base_model() if hasattr(outer, "get_base_model") else outer
    return "logits_to_keep" in inspect.signature(inner.forward).parameters
