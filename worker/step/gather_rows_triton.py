"""Kernels of gather_rows.py."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.ops.jit import gdc_launch_dependents, gdc_wait, tl, triton
from worker.ops.launch import aligned, overlap, power_of_two
from worker.step.gather_rows import Floats, Gathered, Ints

BLOCK = 32


@triton.jit(do_not_specialize=["n", "stride"])
def _gather_rows_kernel(
    rows, int0, int1, int2, int3, float0, float1, float2, float3, float4, float5, table,
    ints, floats, picked, n, stride,
    WIDTH: tl.constexpr, WIDTH_2: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ints: [4, stride]; floats: [6, stride]; picked: [n, WIDTH]."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    row = tl.load(rows + at, mask=here, other=0)
    tl.store(ints + at, tl.load(int0 + row, mask=here), mask=here)
    tl.store(ints + stride + at, tl.load(int1 + row, mask=here), mask=here)
    tl.store(ints + 2 * stride + at, tl.load(int2 + row, mask=here), mask=here)
    tl.store(ints + 3 * stride + at, tl.load(int3 + row, mask=here), mask=here)
    tl.store(floats + at, tl.load(float0 + row, mask=here), mask=here)
    tl.store(floats + stride + at, tl.load(float1 + row, mask=here), mask=here)
    tl.store(floats + 2 * stride + at, tl.load(float2 + row, mask=here), mask=here)
    tl.store(floats + 3 * stride + at, tl.load(float3 + row, mask=here), mask=here)
    tl.store(floats + 4 * stride + at, tl.load(float4 + row, mask=here), mask=here)
    tl.store(floats + 5 * stride + at, tl.load(float5 + row, mask=here), mask=here)
    cols = tl.arange(0, WIDTH_2)
    both = here[:, None] & (cols < WIDTH)[None, :]
    found = tl.load(table + row[:, None] * WIDTH + cols[None, :], mask=both)
    tl.store(picked + at[:, None] * WIDTH + cols[None, :], found, mask=both)


def gather_rows_triton(ints: Ints, floats: Floats, table: Tensor, rows: Tensor) -> Gathered:
    assert all(each.is_contiguous() for each in (*ints, *floats, table, rows))
    n, width = len(rows), table.shape[1]
    stride = aligned(n)
    out_ints = torch.empty(len(ints), stride, dtype=torch.int64, device=rows.device)
    out_floats = torch.empty(len(floats), stride, dtype=torch.float32, device=rows.device)
    picked = torch.empty(n, width, dtype=torch.int64, device=rows.device)
    _gather_rows_kernel[(-(-n // BLOCK),)](
        rows, *ints, *floats, table, out_ints, out_floats, picked, n, stride,
        **overlap(rows, WIDTH=width, WIDTH_2=power_of_two(width), BLOCK=BLOCK, num_warps=1),
    )  # fmt: skip
    return out_ints[:, :n].unbind(), out_floats[:, :n].unbind(), picked
