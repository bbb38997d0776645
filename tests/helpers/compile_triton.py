"""Compiles the triton kernels for a GPU that need not be present; its own process, without triton's interpreter."""

import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from forwardtune.noise.backends import cuda_triton
from forwardtune.noise.backends.kinds import NORMAL, RADEMACHER, UNIFORM

TABLES = dict.fromkeys(("table", "shapes", "strides", "steps", "directions"), "*i64")
TABLES |= dict.fromkeys(("scales", "lengths", "offsets"), "*fp64")
SCALARS = dict.fromkeys(("terms", "groups", "k0", "k1"), "i64")
CONSTANTS = ("kind", "dtype", "compute", "dims")


def variants():
    """Every distribution, every dtype, contiguous and strided memory, and the sphere's kernel."""
    kinds = (RADEMACHER, UNIFORM, NORMAL)
    moves = [(kind, tl.float32, tl.float32, dims) for kind in kinds for dims in (0, 4)]
    moves += [(NORMAL, tl.bfloat16, tl.float32, 0), (NORMAL, tl.float16, tl.float32, 0)]
    moves += [(kind, tl.float64, tl.float64, 0) for kind in kinds]
    for values in moves:
        signature = TABLES | SCALARS | dict.fromkeys(CONSTANTS, "constexpr")
        yield ASTSource(cuda_triton._move, signature, constexprs=dict(zip(CONSTANTS, values, strict=True)))
    signature = {"table": "*i64", "totals": "*i64", "direction": "i64", "step": "i64", "k0": "i64", "k1": "i64"}
    yield ASTSource(cuda_triton._squares, signature)


if __name__ == "__main__":
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    for source in variants():
        ptx = triton.compile(source, target=target, options=cuda_triton.OPTIONS).asm["ptx"]
        fused, approximate, flushed = ptx.count("fma."), ptx.count("approx"), ptx.count(".ftz")
        print(source.fn.__name__, len(ptx), fused, approximate, flushed)
