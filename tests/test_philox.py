"""Philox against the known-answer vectors of its authors' library."""

import numpy as np
import pytest
import torch

from forwardtune.noise.backends import numba_pieces
from forwardtune.noise.philox import philox

KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(counter, key, answer):
    assert philox(*counter, *key) == answer
    tensors = [torch.tensor([word, 0]) for word in counter]
    assert tuple(int(word[0]) for word in philox(*tensors, *key)) == answer


def test_numba_tile_matches_single_counters():
    block, direction, parameter, step, seed = 64 * 12345 + (7 << 32), 9, 2**31 + 5, 2**32 - 1, (0xDEADBEEF, 0x12345678)
    words = np.empty(256, np.uint32)
    keys = numba_pieces.round_keys(seed[0] | seed[1] << 32)
    numba_pieces.philox(words, *(np.uint64(n) for n in (block, direction, parameter, step)), keys)
    for lane in (0, 1, 17, 63):
        expected = philox((block + lane) & 0xFFFFFFFF, 7 << 16 | direction, parameter, step, *seed)
        assert tuple(int(words[64 * w + lane]) for w in range(4)) == expected
