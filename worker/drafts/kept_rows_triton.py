"""Kernels of kept_rows.py."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.ops.jit import enter, tl, triton
from worker.ops.launch import aligned, overlap, power_of_two
from worker.step.rows import RowColumns, SampledRows


@triton.jit(do_not_specialize=["stride"])
def _kept_rows_kernel(
    rows, position, valid, drawn, page_table, out, stride, stride_table,
    WIDTH: tl.constexpr, WIDTH_2: tl.constexpr, PAGES: tl.constexpr, PAGE_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (n). out: i64 [2, stride]: positions, slots, each [n, WIDTH]."""
    enter(PDL)
    i = tl.program_id(0)
    row, was_live = tl.load(rows + i), tl.load(valid + i) != 0
    place = tl.arange(0, WIDTH_2)
    window = place < WIDTH
    at = tl.load(position + i * WIDTH + place, mask=window, other=1) - 1
    num = tl.load(drawn + i * (2 * WIDTH + 1) + WIDTH)
    kept = window & was_live & (place < num)
    in_table = tl.minimum(at // PAGE_SIZE, PAGES - 1)
    page = tl.load(page_table + row * stride_table + in_table, mask=kept, other=0).to(tl.int64)
    to = out + i * WIDTH + place
    tl.store(to, tl.where(kept, at, 0), mask=window)
    tl.store(to + stride, tl.where(kept, page * PAGE_SIZE + at % PAGE_SIZE, 0), mask=window)


def kept_rows_triton(
    sampled: SampledRows, drawn: Tensor, columns: RowColumns, page_size: int
) -> tuple[Tensor, Tensor]:
    rows, position, valid, width = sampled.rows, sampled.position, sampled.valid, sampled.width
    assert all(each.is_contiguous() for each in (rows, position, valid, drawn))
    n, num_tokens = len(rows), len(position)
    out = torch.empty(2, aligned(num_tokens), dtype=torch.int64, device=rows.device)
    _kept_rows_kernel[(n,)](
        rows, position, valid.view(torch.uint8), drawn, columns.page_table, out,
        out.stride(0), columns.page_table.stride(0),
        **overlap(
            rows, WIDTH=width, WIDTH_2=power_of_two(width), PAGES=columns.page_table.shape[1],
            PAGE_SIZE=page_size, num_warps=1,
        ),
    )  # fmt: skip
    positions, slots = out[:, :num_tokens].unbind()
    return positions, slots
