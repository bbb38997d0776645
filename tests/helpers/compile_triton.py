"""Compiles the triton kernels for a GPU that need not be present; its own process, without triton's interpreter."""

import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from forwardtune.noise.backends import cuda_triton, triton_outer
from forwardtune.noise.backends.kinds import NORMAL, RADEMACHER, UNIFORM

TABLES = dict.fromkeys(("table", "shapes", "strides", "steps", "directions"), "*i64")
TABLES |= dict.fromkeys(("scales", "lengths", "offsets"), "*fp64")
SCALARS = dict.fromkeys(("terms", "groups", "k0", "k1", "r0", "r1"), "i64")
CONSTANTS = ("kind", "dtype", "compute", "dims", "stochastic")
OUTER = dict.fromkeys(("count", "width", "height", "lines", "parameter", "step", "r0", "r1"), "i64")
OUTER_CONSTANTS = ("compute", "stochastic", "undone")


def variants():
    """Every distribution, dtype and rounding, contiguous and strided memory, sums of products, the sphere's kernel."""
    kinds, short = (RADEMACHER, UNIFORM, NORMAL), (tl.bfloat16, tl.float16)
    moves = [(kind, tl.float32, tl.float32, dims, False) for kind in kinds for dims in (0, 4)]
    moves += [(NORMAL, dtype, tl.float32, 0, False) for dtype in short]
    moves += [(RADEMACHER, dtype, tl.float32, 0, True) for dtype in short]
    moves += [(kind, tl.float64, tl.float64, 0, False) for kind in kinds]
    for values in moves:
        signature = TABLES | SCALARS | dict.fromkeys(CONSTANTS, "constexpr")
        yield ASTSource(cuda_triton._move, signature, constexprs=dict(zip(CONSTANTS, values, strict=True)))
    for name, compute, stochastic in (("fp32", "fp32", False), ("fp64", "fp64", False), ("bf16", "fp32", True)):
        factors = dict.fromkeys(("rows", "columns", "offsets"), f"*{compute}")
        signature = {"weights": f"*{name}"} | factors | OUTER | dict.fromkeys(OUTER_CONSTANTS, "constexpr")
        types = {"fp32": tl.float32, "fp64": tl.float64}
        values = zip(OUTER_CONSTANTS, (types[compute], stochastic, stochastic), strict=True)
        yield ASTSource(triton_outer._add_outer, signature, constexprs=dict(values))
    signature = {"table": "*i64", "totals": "*i64", "direction": "i64", "step": "i64", "k0": "i64", "k1": "i64"}
    yield ASTSource(cuda_triton._squares, signature)


if __name__ == "__main__":
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    for source in variants():
        ptx = triton.compile(source, target=target, options=cuda_triton.OPTIONS).asm["ptx"]
        fused, approximate, flushed = ptx.count("fma."), ptx.count("approx"), ptx.count(".ftz")
        print(source.fn.__name__, len(ptx), fused, approximate, flushed)
