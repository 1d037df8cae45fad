"""The kernel of swiglu.py."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.ops.jit import gdc_launch_dependents, gdc_wait, tl, triton
from worker.ops.launch import overlap

# Columns of one program. From MANY_ROWS rows on the wide block is faster: for 2048 rows of the
# Qwen3-8B shape on an H200 it saves 10 of 36 us (benchmarks/results/kernels.md).
BLOCK, WIDE_BLOCK = 1024, 2048


MANY_ROWS = 1024


@triton.jit
def silu_and_mul(gate, up, dtype):
    """silu(gate) · up of f32; silu is rounded to `dtype` before the product, as in torch."""
    return tl.div_rn(gate, 1.0 + tl.exp(-gate)).to(dtype).to(tl.float32) * up


@triton.jit
def _swiglu_kernel(gate_up, out, stride, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Grid (rows, blocks of width)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    dtype = out.dtype.element_ty
    gate = tl.load(gate_up + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, silu_and_mul(gate, up, dtype).to(dtype), mask=inside)


def swiglu_triton(gate_up: Tensor) -> Tensor:
    width = gate_up.shape[-1] // 2
    rows = gate_up.reshape(-1, 2 * width)
    assert rows.stride(1) == 1
    out = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype, device=gate_up.device)
    block = WIDE_BLOCK if rows.shape[0] >= MANY_ROWS else BLOCK
    _swiglu_kernel[(rows.shape[0], -(-width // block))](
        rows, out, rows.stride(0), width, **overlap(gate_up, BLOCK=block, num_warps=4)
    )
    return out
