"""Rows of different lengths as tensors: split into buckets of similar length, and padded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

PASS, FAST_PASS = 24, 100
"""What a pass costs beside its tokens, in tokens, and with forward passes in bfloat16, where tokens cost less; measured
on a CPU with models of 15 and 22 million weights."""

Row = dict[str, list[int]]
"""One sequence, as the tokenizer returns it."""
Rows = tuple[Row, ...]
"""One example, as the tokenizer returns it: one sequence, or two that are embedded separately."""


def buckets(lengths: Sequence[int], cost: int = PASS) -> list[list[int]]:
    """The indices of rows, split so that the tokens of all padded buckets, and the cost of each, are fewest.

    >>> buckets([10, 60, 9, 61])
    [[2, 0], [1, 3]]
    """
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    best = [(0, 0)]  # for the shortest rows up to each: the cost, and where their last bucket begins
    for end, longest in enumerate(order, 1):
        best.append(min((best[at][0] + (end - at) * lengths[longest] + cost, at) for at in range(end)))
    split, end = [], len(order)
    while end:
        start = best[end][1]
        split.append(order[start:end])
        end = start
    return split[::-1]


def pad(rows: Sequence[Row], filler: int, device: torch.device) -> dict[str, Tensor]:
    """Rows as tensors padded on the right, with their attention mask.

    >>> pad([{"input_ids": [5, 6, 7]}, {"input_ids": [8]}], 0, torch.device("cpu"))
    {'input_ids': tensor([[5, 6, 7],
            [8, 0, 0]]), 'attention_mask': tensor([[1, 1, 1],
            [1, 0, 0]])}
    """
    columns = {name: [torch.tensor(row[name], dtype=torch.long) for row in rows] for name in rows[0]}
    columns["attention_mask"] = [torch.ones_like(ids) for ids in columns["input_ids"]]
    fillers = {"input_ids": filler}
    return {
        name: pad_sequence(column, batch_first=True, padding_value=fillers.get(name, 0)).to(device)
        for name, column in columns.items()
    }
