"""Compiles the triton kernels for a GPU that need not be there; a process of its own, for the interpreter is off."""

import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from forwardtune.noise.backends import cuda_triton

TABLES = dict.fromkeys(("chunks", "shapes", "strides", "directions"), "*i64") | {"offsets": "*fp64"}
SCALARS = dict.fromkeys(("terms", "groups", "step", "k0", "k1"), "i64")
CONSTANTS = ("kind", "dtype", "compute", "dims")
KINDS = sorted(set(cuda_triton.KINDS.values()))


def variants():
    """Every distribution, every dtype, contiguous and strided memory, and the sphere's kernel."""
    moves = [(kind, tl.float32, tl.float32, dims) for kind in KINDS for dims in (0, 4)]
    moves += [(KINDS[-1], tl.bfloat16, tl.float32, 0), (KINDS[-1], tl.float16, tl.float32, 0)]
    moves += [(kind, tl.float64, tl.float64, 0) for kind in KINDS]
    for values in moves:
        signature = TABLES | SCALARS | dict.fromkeys(CONSTANTS, "constexpr")
        yield ASTSource(cuda_triton._move, signature, constexprs=dict(zip(CONSTANTS, values, strict=True)))
    signature = {"chunks": "*i64", "totals": "*i64", "direction": "i64", "step": "i64", "k0": "i64", "k1": "i64"}
    yield ASTSource(cuda_triton._squares, signature)


if __name__ == "__main__":
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    for source in variants():
        ptx = triton.compile(source, target=target, options=cuda_triton.OPTIONS).asm["ptx"]
        fused, approximate, flushed = ptx.count("fma."), ptx.count("approx"), ptx.count(".ftz")
        print(source.fn.__name__, len(ptx), fused, approximate, flushed)
