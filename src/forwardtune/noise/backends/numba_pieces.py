"""The compiled pieces of the CPU backend: Philox words, noise as floats, rounded sums, strided copies.

Each handles at most a block of 512 elements in L1; `cpu_numba` puts them together.
"""

# Compiled functions have no annotations, and numba's own are incomplete.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="attr-defined,call-arg"

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic

from forwardtune.errors import warn
from forwardtune.noise import distributions as D
from forwardtune.noise import philox as P
from forwardtune.noise.backends.chunks import DTYPES
from forwardtune.noise.backends.kinds import RADEMACHER, UNIFORM
from forwardtune.noise.types import Key

u16, u32, u64, i32, i64 = np.uint16, np.uint32, np.uint64, np.int32, np.int64
f32, f64 = np.float32, np.float64

F32, F64, BF16, F16 = range(len(DTYPES))

_compiled = partial(njit, nogil=True, boundscheck=False, error_model="numpy")


def jit(function: Callable[..., Any]) -> Any:
    """A compiled function; kept on disk, unless there is no folder for it (a read-only install without a home)."""
    try:
        return _compiled(cache=True)(function)
    except RuntimeError:
        _warn_of_no_cache()
        return _compiled()(function)


@cache
def _warn_of_no_cache() -> None:
    warn(
        "numba has no folder to keep compiled code in, so it is compiled anew in every process, which takes some "
        "seconds; set NUMBA_CACHE_DIR to a writable folder"
    )


@intrinsic
def pointer(typing_context: Any, address: Any, scalar: Any) -> Any:
    """An integer address as a pointer to the given scalar type."""
    signature = types.CPointer(scalar.instance_type)(address, scalar)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return signature, generate


# Philox in 64-bit lanes: only the low half of a lane is used, so that a round is two multiplications, two shifts and
# two exclusive ors, and nothing is packed or masked before the end.
_LANES, _WORDS, _LOW, _32 = u64(D.LANES), u64(D.TILE_WORDS), u64(P.MASK), u64(32)
_M0, _M1 = (u64(m) for m in P.MULTIPLIERS)


@jit
def philox(words, block, direction, parameter, step, keys):
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
def round_keys(seed: int) -> Any:
    """The keys of all rounds, which Philox derives from the seed."""
    k0, k1 = Key(seed, 0, "rademacher").seed_words
    keys = [((k0 + r * P.WEYL[0]) & P.MASK, (k1 + r * P.WEYL[1]) & P.MASK) for r in range(P.ROUNDS)]
    return np.array(keys, u64)


@jit
def signs(noise, word):
    for j in range(u64(noise.size)):  # a count that the compiler knows would be unrolled, not vectorised
        noise[j] = u32(u32(0x3F800000) | u32(u32(word << u32(u32(31) - u32(j))) & u32(0x80000000))).view(f32)


@jit
def rademacher(noise, words):
    for k in range(D.BLOCK // 32):
        signs(noise[32 * k : 32 * k + 32], words[k])


@jit
def _add_two_signs(address, word, c0, c1):
    x = carray(pointer(address, f32), (32,))
    for j in range(_32):
        sign = u32(u32(word << u32(u32(31) - u32(j))) & u32(0x80000000))
        x[j] = (x[j] + u32(f32(c0).view(u32) ^ sign).view(f32)) + u32(f32(c1).view(u32) ^ sign).view(f32)


@jit
def _add_five_signs(address, word, c0, c1, c2, c3, c4):
    x = carray(pointer(address, f32), (32,))
    for j in range(_32):
        sign = u32(u32(word << u32(u32(31) - u32(j))) & u32(0x80000000))
        y = u32(f32(x[j]).view(u32) ^ sign).view(f32)
        y = (((y + c0) + c1) + c2) + c3
        x[j] = u32(f32(y).view(u32) ^ sign).view(f32) + u32(f32(c4).view(u32) ^ sign).view(f32)


@jit
def add_rademacher(address, words, sums, count):
    """At most five sums one after the other in a register, 32 elements per word: the noise itself is never stored.

    Rounding is symmetric, so the sign is applied to the weight instead of to each offset, and undone before the last
    sum, whose zeros are thus +0.0 as they should be. Offsets of -0.0 change nothing; at least one must not be zero.
    """
    c0, c1, c2, c3, c4 = f32(sums[0]), f32(sums[1]), f32(sums[2]), f32(sums[3]), f32(sums[4])
    if count > 2:
        for k in range(u64(words.size)):
            _add_five_signs(address + u64(128) * k, words[k], c0, c1, c2, c3, c4)
    else:
        for k in range(u64(words.size)):
            _add_two_signs(address + u64(128) * k, words[k], c0, c1)


_UNIFORM_SCALE = f32(D.UNIFORM_SCALE)


@jit
def uniform(noise, words):
    for j in range(_WORDS):
        word = words[j]
        noise[j] = f32(i32(i32(u32(word << u32(16))) >> i32(15)) | i32(1)) * _UNIFORM_SCALE
        noise[j + _WORDS] = f32(i32(i32(word) >> i32(15)) | i32(1)) * _UNIFORM_SCALE


_L0, _L1, _L2, _L3, _L4, _L5, _L6 = (f32(c) for c in D.LOG)
_S0, _S1, _S2, _S3 = (f32(c) for c in D.SIN)
_C0, _C1, _C2, _C3 = (f32(c) for c in D.COS)
_LN2, _ONE, _MINUS_TWO, _ANGLE, _HALF_BITS = f32(D.LN2), f32(1), f32(-2), f32(2.0**-15), i32(D.SQRT_HALF_BITS)


@jit
def normal(noise, words):
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


@jit
def fill(noise, words, kind):
    if kind == RADEMACHER:
        rademacher(noise, words)
    elif kind == UNIFORM:
        uniform(noise, words)
    else:
        normal(noise, words)


@jit
def add_f32(x, noise, scale):
    for j in range(u64(x.size)):
        x[j] += noise[j] * scale


@jit
def add_twice_f32(x, noise, first, second):
    for j in range(u64(x.size)):
        x[j] = (x[j] + noise[j] * first) + noise[j] * second


@jit
def add_five_f32(x, noise, c0, c1, c2, c3, c4):
    for j in range(u64(x.size)):
        s = noise[j]
        x[j] = ((((x[j] + s * c0) + s * c1) + s * c2) + s * c3) + s * c4


@jit
def add_f64(x, noise, scale):
    for j in range(u64(x.size)):
        x[j] += f64(noise[j]) * scale


@jit
def add_bf16(x, noise, scale):
    for j in range(u64(x.size)):
        total = u32(u32(x[j]) << u32(16)).view(f32) + noise[j] * scale
        bits = f32(total).view(u32)
        even = u32(bits + u32(0x7FFF) + u32(u32(bits >> u32(16)) & u32(1)))
        x[j] = u16(u32(even >> u32(16))) if total == total else u16(0x7FC0)


@jit
def _from_f16(half):
    """To float32: shift the bits and let a multiplication correct the exponent, also of subnormals."""
    magnitude = f32(u32(u32(half & u32(0x7FFF)) << u32(13)).view(f32) * f32(2.0**112))
    full = u32(f32(magnitude).view(u32) | u32(u32(half & u32(0x8000)) << u32(16)))
    if u32(half & u32(0x7C00)) == u32(0x7C00):
        full = u32(full | u32(0x7F800000))
    return u32(full).view(f32)


@jit
def add_f16(x, noise, scale):
    for j in range(u64(x.size)):
        total = _from_f16(u32(x[j])) + noise[j] * scale
        # back to nearest even: normal numbers by integer rounding, subnormal ones by adding one half
        bits = f32(total).view(u32)
        sign = u32(u32(bits & u32(0x80000000)) >> u32(16))
        bits = u32(bits & u32(0x7FFFFFFF))
        rounded = u32(u32(bits + u32(0xC8000FFF) + u32(u32(bits >> u32(13)) & u32(1))) >> u32(13))
        tiny = u32(f32(f32(u32(bits).view(f32) + f32(0.5))).view(u32) - u32(0x3F000000))
        result = tiny if bits < u32(0x38800000) else rounded
        result = u32(0x7C00) if bits >= u32(0x47800000) else result
        result = u32(0x7E00) if bits > u32(0x7F800000) else result
        x[j] = u16(u32(result | sign))


@jit
def add(address, dtype, count, noise, scale):
    if dtype == F32:
        add_f32(carray(pointer(address, f32), (count,)), noise, f32(scale))
    elif dtype == F64:
        add_f64(carray(pointer(address, f64), (count,)), noise, scale)
    elif dtype == BF16:
        add_bf16(carray(pointer(address, u16), (count,)), noise, f32(scale))
    else:
        add_f16(carray(pointer(address, u16), (count,)), noise, f32(scale))


@jit
def multiply(change, noise, scale):
    for j in range(u64(change.size)):
        change[j] = noise[j] * scale


@jit
def rounding_bits(bits, words, flip):
    """Sixteen bits for each element of a block, which `flip` (0 or 0xFFFF) may turn over."""
    for j in range(_WORDS):
        bits[j] = u32(u32(words[j] & u32(0xFFFF)) ^ flip)
        bits[j + _WORDS] = u32(u32(words[j] >> u32(16)) ^ flip)


@jit
def round_bf16(x, change, bits):
    """Adds a float32 change, and rounds up in magnitude where the bits carry."""
    for j in range(u64(x.size)):
        total = u32(u32(x[j]) << u32(16)).view(f32) + change[j]
        whole = f32(total).view(u32)
        sign = u32(u32(whole & u32(0x80000000)) >> u32(16))
        carried = u32(u32(u32(whole & u32(0x7FFFFFFF)) + bits[j]) >> u32(16))
        x[j] = u16(u32((carried if total == total else u32(0x7FC0)) | sign))


@jit
def round_f16(x, change, bits):
    for j in range(u64(x.size)):
        total = _from_f16(u32(x[j])) + change[j]
        whole = f32(total).view(u32)
        sign = u32(u32(whole & u32(0x80000000)) >> u32(16))
        whole = u32(whole & u32(0x7FFFFFFF))
        carried = u32(u32(whole + u32(bits[j] >> u32(3)) - u32(0x38000000)) >> u32(13))
        # subnormal: units of 2^-24, and 16 bits below
        fixed = u32(i32(u32(min(whole, u32(0x38800000))).view(f32) * f32(2.0**40)))
        tiny = u32(u32(fixed + bits[j]) >> u32(16))
        result = tiny if whole < u32(0x38800000) else carried
        result = u32(0x7C00) if whole >= u32(0x47800000) else result
        result = u32(0x7E00) if whole > u32(0x7F800000) else result
        x[j] = u16(u32(result | sign))


@jit
def add_rounded(address, dtype, count, change, bits):
    """Adds a change to elements of 16 bits, rounded stochastically."""
    x = carray(pointer(address, u16), (count,))
    if dtype == BF16:
        round_bf16(x, change, bits)
    else:
        round_f16(x, change, bits)


@jit
def copy(target, source, dtype):
    if dtype == F64:
        carray(pointer(target, f64), (1,))[0] = carray(pointer(source, f64), (1,))[0]
    elif dtype == F32:
        carray(pointer(target, f32), (1,))[0] = carray(pointer(source, f32), (1,))[0]
    else:
        carray(pointer(target, u16), (1,))[0] = carray(pointer(source, u16), (1,))[0]


@jit
def exchange(address, packed, dtype, count, start, shape, strides, out):
    """Elements `start` onwards of a strided tensor, copied to packed memory or (`out`) back."""
    size = i64(8) if dtype == F64 else i64(4) if dtype == F32 else i64(2)
    index = np.empty(shape.size, i64)
    element, rest = address, start
    for axis in range(shape.size - 1, -1, -1):
        index[axis] = rest % shape[axis]
        rest //= shape[axis]
        element += index[axis] * strides[axis]
    for j in range(count):
        if out:
            copy(element, packed + j * size, dtype)
        else:
            copy(packed + j * size, element, dtype)
        for axis in range(shape.size - 1, -1, -1):
            element += strides[axis]
            index[axis] += 1
            if index[axis] < shape[axis]:
                break
            element -= index[axis] * strides[axis]
            index[axis] = 0
