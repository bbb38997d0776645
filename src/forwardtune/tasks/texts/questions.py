"""Templates that texts go into."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from forwardtune.errors import ExperimentError
from forwardtune.tasks.texts.data import Text
from forwardtune.tasks.texts.padding import Rows


class Question:
    """A template that a text goes into, up to where the answer is read: its end, or with `masked` a mask token."""

    def __init__(
        self, tokenizer: Any, max_length: int, columns: Sequence[str], template: str, masked: bool = False
    ) -> None:
        self.tokenizer, self.max_length, self.columns, self.template = tokenizer, max_length, columns, template
        check_template(template, columns)
        if masked and tokenizer.mask_token is None:
            raise ExperimentError("the tokenizer of this masked language model has no mask token; use another setup")
        self.mask = tokenizer.mask_token_id if masked else None
        self.ending = f" {tokenizer.mask_token}." if masked else ""
        if len(self._ids(tuple("" for _ in columns))) >= max_length:
            raise ExperimentError(f"the template alone has {max_length} tokens or more; raise the maximum length")

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
            if start is not None and start != end and ids[:1] != [start]:  # Llama always saw one in its training
                ids = [start, *ids]
        return ids


def fill(template: str, columns: Sequence[str], text: Sequence[str]) -> str:
    """A template with the texts in place of `{column}`.

    >>> fill("{review} It was", ["review"], ["a warm film"])
    'a warm film It was'
    """
    cells = dict(zip(columns, text, strict=True))
    return re.sub(r"\{([^{}]*)\}", lambda match: cells[match[1]], template)


def check_template(template: str, columns: Sequence[str]) -> None:
    """A template must hold every text, and nothing else in braces."""
    names = re.findall(r"\{([^{}]*)\}", template)
    for name in names:
        if name not in columns:
            holds = ", ".join(f"{{{column}}}" for column in columns)
            raise ExperimentError(f"the template {template!r} asks for {name!r}; it can hold {holds}")
    for column in columns:
        if column not in names:
            raise ExperimentError(f"the template {template!r} does not hold {{{column}}}; add it")
