"""The noise at memory speed on CPU tensors, compiled by numba.

One call moves the whole model: a plan lists chunks of tensors (address, dtype, place in the noise), threads share the
chunks, and each chunk is walked in blocks of 512 elements: words of Philox, floats of noise, sums, all in L1. A chunk
stays in L2 while all terms are added to it, so several directions cost one pass over memory.

Threads come from an ordinary pool, the kernel runs without the interpreter's lock: no threading layer that
cannot be forked or entered twice, and a thread count that can change from call to call and never changes a result.
"""

# Compiled functions have no annotations, and numba's own are incomplete.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="attr-defined,call-arg"

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import carray, njit, types
from numba.extending import intrinsic

from forwardtune.errors import BackendError
from forwardtune.noise import distributions as D
from forwardtune.noise import philox as P
from forwardtune.noise.backends import reference
from forwardtune.noise.backends.interface import Key, Slot, Term
from forwardtune.noise.backends.plan import DTYPES, Plan

u16, u32, u64, i32, i64 = np.uint16, np.uint32, np.uint64, np.int32, np.int64
f32, f64 = np.float32, np.float64

F32, F64, BF16, F16 = range(len(DTYPES))
RADEMACHER, UNIFORM, NORMAL = range(3)
KINDS = {"rademacher": RADEMACHER, "uniform": UNIFORM, "normal": NORMAL, "sphere": NORMAL}

CHUNK = 8 * D.RADEMACHER_TILE
"""Elements that one thread moves at a time; 256 KiB of float32."""
PARALLEL_FROM = 4 * CHUNK
"""Models below this many elements are moved by the calling thread alone: waking others costs more."""

_jit: Callable[[Any], Any] = njit(cache=True, nogil=True, boundscheck=False, error_model="numpy")


@intrinsic
def _pointer(typing_context: Any, address: Any, scalar: Any) -> Any:
    """An integer address as a pointer to the given scalar type."""
    signature = types.CPointer(scalar.instance_type)(address, scalar)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return signature, generate


# Philox in 64-bit lanes: only the low half of a lane counts, so that a round is two multiplications,
# two shifts and two exclusive ors, and nothing is packed or masked before the end.
_LANES, _WORDS, _LOW, _32 = u64(D.LANES), u64(D.TILE_WORDS), u64(P.MASK), u64(32)
_M0, _M1 = (u64(m) for m in P.MULTIPLIERS)


@_jit
def _philox(words, block, direction, parameter, step, keys):
    c1 = direction | (block >> _32) << u64(16)
    for lane in range(_LANES):
        x0, x1, x2, x3 = block + lane, c1, parameter, step
        for r in range(P.ROUNDS):
            p0, p1 = (x0 & _LOW) * _M0, (x2 & _LOW) * _M1
            x0, x1, x2, x3 = (p1 >> _32) ^ x1 ^ keys[r, 0], p1, (p0 >> _32) ^ x3 ^ keys[r, 1], p0
        words[lane] = u32(x0)
        words[lane + _LANES] = u32(x1)
        words[lane + u64(2) * _LANES] = u32(x2)
        words[lane + u64(3) * _LANES] = u32(x3)


@cache
def _round_keys(seed: int) -> Any:
    """The keys of all rounds, as Philox raises them from the seed."""
    k0, k1 = Key(seed, 0, "rademacher").seed_words
    raised = [((k0 + r * P.WEYL[0]) & P.MASK, (k1 + r * P.WEYL[1]) & P.MASK) for r in range(P.ROUNDS)]
    return np.array(raised, u64)


@_jit
def _signs(noise, word):
    for j in range(u64(noise.size)):  # a count that the compiler knows would be unrolled, not vectorised
        noise[j] = u32(u32(0x3F800000) | u32(u32(word << u32(u32(31) - u32(j))) & u32(0x80000000))).view(f32)


@_jit
def _rademacher(noise, words):
    for k in range(D.BLOCK // 32):
        _signs(noise[32 * k : 32 * k + 32], words[k])


@_jit
def _add_signs(x, word, scale):
    for j in range(_32):
        x[j] += u32(scale ^ u32(u32(word << u32(u32(31) - u32(j))) & u32(0x80000000))).view(f32)


@_jit
def _add_rademacher(x, words, scale):
    """The signs of a whole block go straight into float32 sums: the noise itself is never written."""
    for k in range(D.BLOCK // 32):
        _add_signs(x[32 * k : 32 * k + 32], words[k], f32(scale).view(u32))


_UNIFORM_SCALE = f32(D.UNIFORM_SCALE)


@_jit
def _uniform(noise, words):
    for j in range(_WORDS):
        word = words[j]
        noise[j] = f32(i32(i32(u32(word << u32(16))) >> i32(15)) | i32(1)) * _UNIFORM_SCALE
        noise[j + _WORDS] = f32(i32(i32(word) >> i32(15)) | i32(1)) * _UNIFORM_SCALE


_L0, _L1, _L2, _L3, _L4, _L5, _L6 = (f32(c) for c in D.LOG)
_S0, _S1, _S2, _S3 = (f32(c) for c in D.SIN)
_C0, _C1, _C2, _C3 = (f32(c) for c in D.COS)
_LN2, _ONE, _MINUS_TWO, _ANGLE, _HALF_BITS = f32(D.LN2), f32(1), f32(-2), f32(2.0**-15), i32(D.SQRT_HALF_BITS)


@_jit
def _normal(noise, words):
    for j in range(_WORDS):
        word = words[j]
        bits = i32(f32(i32(u32(word >> u32(1)) | u32(1))).view(i32) - _HALF_BITS)
        exponent = f32(i32(bits >> i32(23)) - i32(31))
        f = i32(i32(bits & i32(0x7FFFFF)) + _HALF_BITS).view(f32) - _ONE
        log = f * ((((((_L6 * f + _L5) * f + _L4) * f + _L3) * f + _L2) * f + _L1) * f + _L0)
        radius = np.sqrt((exponent * _LN2 + log) * _MINUS_TWO)

        x = f32(i32(u32(u32(word >> u32(1)) & u32(0x7FFE)) + u32(1))) * _ANGLE
        y = x * x
        cosine = (_ONE - y) * (((_C3 * y + _C2) * y + _C1) * y + _C0)
        sine = x * (((_S3 * y + _S2) * y + _S1) * y + _S0)
        noise[j] = (-radius if word & u32(1) else radius) * cosine
        noise[j + _WORDS] = (-radius if word & u32(2) else radius) * sine


@_jit
def _fill(noise, words, kind):
    if kind == RADEMACHER:
        _rademacher(noise, words)
    elif kind == UNIFORM:
        _uniform(noise, words)
    else:
        _normal(noise, words)


@_jit
def _add_f32(x, noise, scale):
    for j in range(u64(x.size)):
        x[j] += noise[j] * scale


@_jit
def _add_twice_f32(x, noise, first, second):
    for j in range(u64(x.size)):
        x[j] = (x[j] + noise[j] * first) + noise[j] * second


@_jit
def _add_f64(x, noise, scale):
    for j in range(u64(x.size)):
        x[j] += f64(noise[j]) * scale


@_jit
def _add_bf16(x, noise, scale):
    for j in range(u64(x.size)):
        total = u32(u32(x[j]) << u32(16)).view(f32) + noise[j] * scale
        bits = f32(total).view(u32)
        even = u32(bits + u32(0x7FFF) + u32(u32(bits >> u32(16)) & u32(1)))
        x[j] = u16(u32(even >> u32(16))) if total == total else u16(0x7FC0)


@_jit
def _add_f16(x, noise, scale):
    for j in range(u64(x.size)):
        half = u32(x[j])
        # to float32: shift into place and let a multiplication mend the exponent, also of subnormals
        magnitude = f32(u32(u32(half & u32(0x7FFF)) << u32(13)).view(f32) * f32(2.0**112))
        full = u32(f32(magnitude).view(u32) | u32(u32(half & u32(0x8000)) << u32(16)))
        if u32(half & u32(0x7C00)) == u32(0x7C00):
            full = u32(full | u32(0x7F800000))
        total = u32(full).view(f32) + noise[j] * scale
        # and back, to nearest even: normal numbers by integer rounding, subnormal ones by adding one half
        bits = f32(total).view(u32)
        sign = u32(u32(bits & u32(0x80000000)) >> u32(16))
        bits = u32(bits & u32(0x7FFFFFFF))
        rounded = u32(u32(bits + u32(0xC8000FFF) + u32(u32(bits >> u32(13)) & u32(1))) >> u32(13))
        tiny = u32(f32(f32(u32(bits).view(f32) + f32(0.5))).view(u32) - u32(0x3F000000))
        result = tiny if bits < u32(0x38800000) else rounded
        result = u32(0x7C00) if bits >= u32(0x47800000) else result
        result = u32(0x7E00) if bits > u32(0x7F800000) else result
        x[j] = u16(u32(result | sign))


@_jit
def _add(address, dtype, count, noise, scale):
    if dtype == F32:
        _add_f32(carray(_pointer(address, f32), (count,)), noise, f32(scale))
    elif dtype == F64:
        _add_f64(carray(_pointer(address, f64), (count,)), noise, scale)
    elif dtype == BF16:
        _add_bf16(carray(_pointer(address, u16), (count,)), noise, f32(scale))
    else:
        _add_f16(carray(_pointer(address, u16), (count,)), noise, f32(scale))


@_jit
def _copy(target, source, dtype):
    if dtype == F64:
        carray(_pointer(target, f64), (1,))[0] = carray(_pointer(source, f64), (1,))[0]
    elif dtype == F32:
        carray(_pointer(target, f32), (1,))[0] = carray(_pointer(source, f32), (1,))[0]
    else:
        carray(_pointer(target, u16), (1,))[0] = carray(_pointer(source, u16), (1,))[0]


@_jit
def _exchange(address, packed, dtype, count, start, shape, strides, out):
    """Elements `start` onwards of a strided tensor, copied to packed memory or (`out`) back."""
    size = i64(8) if dtype == F64 else i64(4) if dtype == F32 else i64(2)
    position = np.empty(shape.size, i64)
    place, rest = address, start
    for axis in range(shape.size - 1, -1, -1):
        position[axis] = rest % shape[axis]
        rest //= shape[axis]
        place += position[axis] * strides[axis]
    for j in range(count):
        if out:
            _copy(place, packed + j * size, dtype)
        else:
            _copy(packed + j * size, place, dtype)
        for axis in range(shape.size - 1, -1, -1):
            place += strides[axis]
            position[axis] += 1
            if position[axis] < shape[axis]:
                break
            place -= position[axis] * strides[axis]
            position[axis] = 0


@_jit
def _walk(address, dtype, count, noise, back, forth):
    """Both sums of a term, on a stretch that stays in the cache."""
    if dtype == F32 and back != 0.0 and forth != 0.0:
        _add_twice_f32(carray(_pointer(address, f32), (count,)), noise, f32(-back), f32(forth))
        return
    if back != 0.0:
        _add(address, dtype, count, noise, -back)
    if forth != 0.0:
        _add(address, dtype, count, noise, forth)


@_jit
def _move(chunks, shapes, strides, first, last, kind, step, keys, directions, offsets):
    """Walks every term in chunks `first` to `last` of the plan; `offsets` has one (back, forth) a term and group."""
    tile = np.empty(D.TILE_WORDS, u32)
    noise = np.empty(D.BLOCK, f32)
    packed = np.empty(D.BLOCK, f64)
    words_a_block = D.BLOCK // 32 if kind == RADEMACHER else D.TILE_WORDS
    for c in range(first, last):
        address, count, start, parameter, group, dtype, size, layout = chunks[c]
        for term in range(directions.size):
            back, forth = offsets[term, 0, group], offsets[term, 1, group]
            if back == forth:
                continue
            for low in range(0, count, D.BLOCK):
                n = min(D.BLOCK, count - low)
                number = (start + low) // D.BLOCK * words_a_block
                at = number % D.TILE_WORDS
                if at == 0:
                    _philox(tile, u64(number // 4), directions[term], u64(parameter), step, keys)
                words = tile[at : at + words_a_block]
                if kind == RADEMACHER and dtype == F32 and n == D.BLOCK and layout < 0:
                    x = carray(_pointer(address + low * size, f32), (n,))
                    if back != 0.0:
                        _add_rademacher(x, words, -back)
                    if forth != 0.0:
                        _add_rademacher(x, words, forth)
                    continue
                _fill(noise, words, kind)
                if layout < 0:
                    _walk(address + low * size, dtype, n, noise, back, forth)
                else:
                    shape, stride = shapes[layout], strides[layout]
                    _exchange(address, packed.ctypes.data, dtype, n, start + low, shape, stride, False)
                    _walk(packed.ctypes.data, dtype, n, noise, back, forth)
                    _exchange(address, packed.ctypes.data, dtype, n, start + low, shape, stride, True)


@_jit
def _square_sum(noise):
    total = i32(0)
    for j in range(u64(noise.size)):
        total = i32(total + i32(noise[j] * noise[j] * f32(D.FIXED_POINT) + f32(0.5)))
    return total


@_jit
def _squares(chunks, first, last, step, keys, direction):
    words = np.empty(D.TILE_WORDS, u32)
    noise = np.empty(D.BLOCK, f32)
    total = i64(0)
    for c in range(first, last):
        count, start, parameter = chunks[c, 1], chunks[c, 2], chunks[c, 3]
        for low in range(0, count, D.BLOCK):
            tile = (start + low) // D.BLOCK
            _philox(words, u64(tile * D.LANES), direction, u64(parameter), step, keys)
            _normal(noise, words)
            total += i64(_square_sum(noise[: min(D.BLOCK, count - low)]))
    return total


@cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """One pool a process (threads do not survive a fork) and thread count."""
    return ThreadPoolExecutor(threads, thread_name_prefix="forwardtune")


@cache
def _self_test() -> None:
    """Compares small tensors with the reference: compiled code from another version's cache must not run."""
    for name in D.DISTRIBUTIONS:
        ours, theirs = ([torch.ones(700, dtype=dtype) for dtype in DTYPES] for _ in range(2))
        slots = [[Slot(tensor, number, 0) for number, tensor in enumerate(part)] for part in (ours, theirs)]
        fast, slow = CpuNumba(slots[0], tested=True), reference.Reference(slots[1])
        key = Key(1, 2, name)
        for backend in (fast, slow):
            backend.walk(key, [Term(3, [0.1], [0.2])])
        same = fast.squares(key, 3) == slow.squares(key, 3) if name == "sphere" else True
        if not same or not all(map(torch.equal, ours, theirs)):
            raise BackendError(
                f"the compiled {name} noise differs from the reference; numba's cache may be out of date: "
                f"delete {Path(__file__).with_name('__pycache__')} (or NUMBA_CACHE_DIR) and try again"
            )


class CpuNumba:
    """Moves CPU tensors of any layout, with as many threads as torch uses."""

    name = "numba"

    @staticmethod
    def runs_on(device: torch.device) -> bool:
        return device.type == "cpu"

    def __init__(self, slots: Sequence[Slot], *, tested: bool = False) -> None:
        if not tested:
            _self_test()
        self.plan = Plan(slots, CHUNK)

    def walk(self, key: Key, terms: Sequence[Term]) -> None:
        directions = np.array([term.direction for term in terms], u64)
        offsets = np.array([(term.back, term.forth) for term in terms], f64)
        kind, step, keys = KINDS[key.distribution], u64(key.step), _round_keys(key.seed)
        p = self.plan
        self._share(
            lambda first, last: _move(p.chunks, p.shapes, p.strides, first, last, kind, step, keys, directions, offsets)
        )

    def squares(self, key: Key, direction: int) -> int:
        step, keys, number = u64(key.step), _round_keys(key.seed), u64(direction)
        return sum(self._share(lambda first, last: _squares(self.plan.chunks, first, last, step, keys, number)))

    def _share(self, work: Callable[[int, int], Any]) -> list[Any]:
        """Runs `work` over ranges of the chunks; of many, several a thread, so that a slow one holds nobody up."""
        n, threads = len(self.plan.chunks), torch.get_num_threads()
        if threads == 1 or self.plan.elements < PARALLEL_FROM:
            return [work(0, n)]
        parts = max(threads, min(8 * threads, n // 16))
        bounds = [n * i // parts for i in range(parts + 1)]
        return list(_pool(os.getpid(), threads).map(work, bounds[:-1], bounds[1:]))
