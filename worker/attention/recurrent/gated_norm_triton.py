"""Kernel of delta_net.gated_norm, in place."""

from torch import Tensor

from worker.attention.recurrent.delta_net import DeltaShape, DeltaWeights
from worker.ops.jit import enter, tl, triton
from worker.ops.launch import overlap

ROWS = 8  # heads of tokens of a program; 4 take 1.6 times as long for 8,192 tokens


@triton.jit
def _gated_norm_kernel(
    o, z, weight, num_tokens, stride_z, num_rows, eps,
    HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tokens · HEADS / ROWS); heads of tokens from num_tokens[0] on become zero."""
    DTYPE: tl.constexpr = o.dtype.element_ty
    lanes = tl.arange(0, DIM)[None, :]
    scale = tl.load(weight + lanes).to(tl.float32)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    enter(PDL)
    real = row < num_rows
    if num_tokens is not None:
        real &= row // HEADS < tl.load(num_tokens)
    out = o + row.to(tl.int64) * DIM + lanes
    x = tl.load(out, mask=real, other=0.0).to(tl.float32)
    gate_at = z + (row // HEADS).to(tl.int64) * stride_z + row % HEADS * DIM + lanes
    gate = tl.load(gate_at, mask=real, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
    x = (x.to(DTYPE).to(tl.float32) * scale).to(DTYPE).to(tl.float32)
    x *= gate / (1.0 + tl.exp(-gate))
    tl.store(out, x.to(DTYPE), mask=(row < num_rows) & (lanes >= 0))


def gated_norm_triton(
    o: Tensor, z: Tensor, weights: DeltaWeights, shape: DeltaShape, num_tokens: Tensor | None = None
) -> None:
    """o: [n, value_width], changed; z: the same shape, rows strided.

    num_tokens: [1] i32; rows behind so many become zero; None: there are none.
    """
    num_rows = len(o) * shape.value_heads
    _gated_norm_kernel[(-(-num_rows // ROWS),)](
        o, z, weights.norm, num_tokens, z.stride(0), num_rows, weights.eps,
        **overlap(o, HEADS=shape.value_heads, DIM=shape.value_dim, ROWS=ROWS, num_warps=4),
    )  # fmt: skip
