"""Fingerprints of weights (SHA-256), so that no run is applied to weights that it did not start from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from forwardtune.packed import parts_of

PIECE = 1 << 24
"""A strided tensor is copied in pieces of at most so many elements."""


def digest(tensor: Tensor) -> str:
    """The first 128 bits of the SHA-256 of a tensor's elements in row-major order; of packed weights, as packed."""
    state = hashlib.sha256()
    for part in parts_of(tensor.detach()):
        for piece in _pieces(part):
            state.update(piece.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()[:32]


def digests(tensors: Iterable[Tensor]) -> list[str]:
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return list(pool.map(digest, tensors))


def combined(parts: Iterable[str]) -> str:
    """One fingerprint of several."""
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:32]


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    if tensor.numel() <= PIECE or tensor.is_contiguous():
        if tensor.numel():
            yield tensor
        return
    for part in tensor:
        yield from _pieces(part)
