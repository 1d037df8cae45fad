"""Which tokens of a step's windows the rows keep: those whose KV is in the text from now on.

A row that had KV of L tokens and keeps a of its draws has now KV of its window's first a tokens,
at positions L to L + a - 1. What lies behind them in the window is of drafts that were refused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from worker.ops.jit import gdc_launch_dependents, gdc_wait, tl, triton
from worker.ops.launch import aligned, overlap, power_of_two
from worker.step.step_rows import RowColumns


def kept_rows_ref(
    rows: Tensor,
    position: Tensor,
    valid: Tensor,
    drawn: Tensor,
    columns: RowColumns,
    page_size: int,
) -> tuple[Tensor, Tensor]:
    """Place the tokens of a step's windows; those that are not kept go to the sink.

    Tokens are kept of rows that were live when the step began, whether it ended them or not: their
    pages may serve others.

    Args:
        rows: [n] i64, as accept_rows had them.
        position: [n * width] i64, of each draw.
        valid: [n] bool, live when the step began.
        drawn: [n, 2 * width + 1] i64, what accept_rows returned.
        columns: of the rows' pages.
        page_size: tokens a page.

    Returns:
        Position (0 of what is not kept) and slot (0 likewise) of each, [n * width] i64 both.
    """
    n, width = len(rows), len(position) // len(rows)
    at = position.view(n, width) - 1
    place = torch.arange(width, device=rows.device)
    kept = valid[:, None] & (place < drawn[:, width : width + 1])
    table = columns.page_table[rows].to(torch.int64)
    page = table.gather(1, (at // page_size).clamp(0, table.shape[1] - 1))
    slots = page * page_size + at % page_size
    return torch.where(kept, at, 0).view(-1), torch.where(kept, slots, 0).view(-1)


@triton.jit(do_not_specialize=["stride"])
def _kept_rows_kernel(
    rows, position, valid, drawn, page_table, out, stride, stride_table,
    WIDTH: tl.constexpr, WIDTH_2: tl.constexpr, PAGES: tl.constexpr, PAGE_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (n). out: i64 [2, stride]: positions, slots, each [n, WIDTH]."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
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
    rows: Tensor,
    position: Tensor,
    valid: Tensor,
    drawn: Tensor,
    columns: RowColumns,
    page_size: int,
) -> tuple[Tensor, Tensor]:
    """See kept_rows_ref; one launch."""
    n, num_tokens = len(rows), len(position)
    width = num_tokens // n
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


def kept_rows(
    rows: Tensor,
    position: Tensor,
    valid: Tensor,
    drawn: Tensor,
    columns: RowColumns,
    page_size: int,
) -> tuple[Tensor, Tensor]:
    """kept_rows_ref, on CUDA by one kernel."""
    assert all(each.is_contiguous() for each in (rows, position, valid, drawn))
    op = kept_rows_triton if rows.is_cuda else kept_rows_ref
    return op(rows, position, valid, drawn, columns, page_size)
