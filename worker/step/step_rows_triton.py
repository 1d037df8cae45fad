"""Kernels of step_rows.py."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.ops.jit import gdc_launch_dependents, gdc_wait, tl, triton
from worker.ops.launch import aligned, overlap, power_of_two
from worker.step.step_rows import RowColumns, StepRows

BLOCK_PAGES = 256


@triton.jit(do_not_specialize=["start", "stride", "num_pages"])
def _read_rows_kernel(
    rows, active, seq_len, last_token, max_len, page_table, drafts, ints, seq_lens, valid, table,
    start, stride, num_pages, stride_table, stride_drafts,
    WIDTH: tl.constexpr, WIDTH_2: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_PAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (n, blocks of pages). ints: i64: live [n]; from `start` on, `stride` apart: position,
    next position, token, slot, each [n, WIDTH]."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    at, part = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + at)
    is_active = tl.load(active + row)
    live = tl.where(is_active != 0, row, 0)
    columns = part * BLOCK_PAGES + tl.arange(0, BLOCK_PAGES)
    here = columns < num_pages
    pages = tl.load(page_table + live * stride_table + columns, mask=here, other=0)
    tl.store(table + at.to(tl.int64) * num_pages + columns, pages, mask=here)
    if part == 0:
        first = tl.load(seq_len + live)
        window = tl.arange(0, WIDTH_2)
        inside = window < WIDTH
        position = first + window
        owned = inside & (live > 0)
        last = tl.load(max_len + live) - 1
        known = tl.where(live > 0, tl.minimum(position, last), position)
        in_table = tl.minimum(position // PAGE_SIZE, num_pages - 1)
        page_at = page_table + live * stride_table + in_table
        page = tl.load(page_at, mask=owned, other=0).to(tl.int64)
        draft_at = drafts + live * stride_drafts + window - 1
        draft = tl.load(draft_at, mask=inside & (window > 0), other=0)
        token = tl.where(window == 0, tl.load(last_token + live), tl.maximum(draft, 0))
        slot = tl.where(owned, page * PAGE_SIZE + position % PAGE_SIZE, 0)
        out = ints + start + at * WIDTH + window
        tl.store(ints + at, live)
        tl.store(out, known, mask=inside)
        tl.store(out + stride, position + 1, mask=inside)
        tl.store(out + 2 * stride, token, mask=inside)
        tl.store(out + 3 * stride, slot, mask=inside)
        tl.store(seq_lens + at, (first + WIDTH).to(tl.int32))
        tl.store(valid + at, tl.load(active + live))


def read_rows_triton(
    rows: Tensor, columns: RowColumns, page_size: int, num_pages: int, width: int = 1
) -> StepRows:
    assert num_pages <= columns.page_table.shape[1]
    n, device = len(rows), rows.device
    start, stride = aligned(n), aligned(n * width)
    ints = torch.empty(start + 4 * stride, dtype=torch.int64, device=device)
    seq_lens = torch.empty(n, dtype=torch.int32, device=device)
    valid = torch.empty(n, dtype=torch.bool, device=device)
    table = torch.empty(n, num_pages, dtype=torch.int32, device=device)
    _read_rows_kernel[(n, -(-num_pages // BLOCK_PAGES))](
        rows, columns.active.view(torch.uint8), columns.seq_len, columns.last_token,
        columns.max_len, columns.page_table, columns.drafts, ints, seq_lens,
        valid.view(torch.uint8), table,
        start, stride, num_pages, columns.page_table.stride(0), columns.drafts.stride(0),
        **overlap(
            rows, WIDTH=width, WIDTH_2=power_of_two(width), PAGE_SIZE=page_size,
            BLOCK_PAGES=BLOCK_PAGES, num_warps=1,
        ),
    )  # fmt: skip
    each = ints[start:].view(4, stride)[:, : n * width]
    positions, following, tokens, slots = each.unbind()
    return StepRows(ints[:n], valid, positions, following, tokens, seq_lens, slots, table)
