"""Philox-4x32-10, the counter-based generator behind all noise.

A bijection of a 128-bit counter under a 64-bit key (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC 2011). There is no state: the same counter and key give the same four words anywhere.
"""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

Word = TypeVar("Word", int, Tensor)


def philox(c0: Word, c1: Word, c2: Word, c3: Word, k0: int, k1: int) -> tuple[Word, Word, Word, Word]:
    """Four 32-bit words for a counter of four 32-bit words, under a key of two.

    The words are Python integers, or int64 tensors that broadcast (64-bit products may wrap: the bits that are used
    survive).

    >>> [f"{w:08x}" for w in philox(0, 0, 0, 0, 0, 0)]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    for _ in range(ROUNDS):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (p1 >> 32 & MASK) ^ c1 ^ k0,
            p1 & MASK,
            (p0 >> 32 & MASK) ^ c3 ^ k1,
            p0 & MASK,
        )
        k0, k1 = k0 + WEYL[0] & MASK, k1 + WEYL[1] & MASK
    return c0, c1, c2, c3
