"""Where a chain drafter's rows of a decode step go: those it keeps, and those it proposes with.

A draft row of slot t is made of token t and the feature of token t - 1. A row that had KV of L
tokens and keeps a of its draws has now KV of L' = L + a, and its draft rows are:

    slot        L + 1     ...     L' - 1         L'              L' + 1      L' + 2   ...
    token       draw 0    ...     draw a - 2     draw a - 1      draft 1     draft 2
    feature     of L      ...     of L' - 2      of L' - 1       the drafter's own
                kept: features of the model      proposes 1      proposes 2  proposes 3
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from worker.ops.jit import gdc_launch_dependents, gdc_wait, tl, triton
from worker.ops.launch import aligned, overlap, power_of_two
from worker.step.step_rows import RowColumns


class DraftSteps(NamedTuple):
    """The draft rows of a decode step of n rows and windows of `width`; slot 0 is the sink."""

    # [n * width] i64 each, of what was drawn: the token, its position (0 if it does not count), its
    # slot, and the page whose tail becomes the feature of the token before it (0: of none).
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    tail_pages: Tensor
    last: Tensor  # [n] i64: index of each row's last draw that counts
    # [num_drafts, n], of the rows that propose: positions and slots i64, KV lengths with them i32;
    # slot 0: nothing is proposed
    draft_positions: Tensor
    draft_slots: Tensor
    draft_lens: Tensor


def draft_rows_ref(
    rows: Tensor,
    position: Tensor,
    valid: Tensor,
    drawn: Tensor,
    columns: RowColumns,
    page_size: int,
    num_drafts: int,
) -> DraftSteps:
    """Place the draft rows of a step.

    Rows are kept of those that were live when the step began, whether it ended them or not: their
    pages may serve others. Nothing is proposed for rows that ended, nor for positions at or beyond
    a row's maximum; what would be goes to the sink. Position 0 has no row.

    Args:
        rows: [n] i64, as accept_rows had them.
        position: [n * width] i64, of each draw.
        valid: [n] bool, live when the step began.
        drawn: [n, 2 * width + 1] i64, what accept_rows returned.
        columns: after accept_rows.
        page_size: tokens a page.
        num_drafts: rows that propose, one after the other.
    """
    n, width = len(rows), len(position) // len(rows)
    place = torch.arange(width, device=rows.device)
    num = drawn[:, width : width + 1]
    at, longest = position.view(n, width), columns.max_len[rows][:, None]
    kept = valid[:, None] & (place < num) & (at > 0)
    table = columns.page_table[rows].to(torch.int64)

    def page_of(positions: Tensor) -> Tensor:
        return table.gather(1, (positions // page_size).clamp(0, table.shape[1] - 1))

    stored = kept & (at < longest)
    slots = page_of(at) * page_size + at % page_size
    ends = (at % page_size == 0) | (place == num - 1)
    active = columns.active[rows][:, None]
    first = torch.where(active, columns.seq_len[rows][:, None], 0)
    ahead = first + torch.arange(num_drafts, device=rows.device)
    inside = active & (ahead + 1 < longest)
    draft_slots = page_of(ahead) * page_size + ahead % page_size
    last = torch.arange(0, n * width, width, device=rows.device) + (num[:, 0] - 1).clamp(min=0)
    return DraftSteps(
        drawn[:, :width].flatten().contiguous(),
        torch.where(stored, at, 0).view(-1),
        torch.where(stored, slots, 0).view(-1),
        torch.where(kept & ends, page_of(at - 1), 0).view(-1),
        last,
        torch.where(inside, ahead, 0).T.contiguous(),
        torch.where(inside, draft_slots, 0).T.contiguous(),
        torch.where(inside, ahead + 1, 1).T.to(torch.int32).contiguous(),
    )


@triton.jit(do_not_specialize=["stride", "stride_rows"])
def _draft_rows_kernel(
    rows, position, valid, drawn, active, seq_len, max_len, page_table, kept, last, ahead, lens,
    stride, stride_rows, stride_table,
    WIDTH: tl.constexpr, WIDTH_2: tl.constexpr, NUM: tl.constexpr, NUM_2: tl.constexpr,
    PAGES: tl.constexpr, PAGE_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (n). kept: i64 [4, stride], the first four fields; ahead: i64 [2, NUM, stride_rows]."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    i = tl.program_id(0)
    row, was_live = tl.load(rows + i), tl.load(valid + i) != 0
    table, longest = page_table + row * stride_table, tl.load(max_len + row)
    place = tl.arange(0, WIDTH_2)
    window = place < WIDTH
    at = tl.load(position + i * WIDTH + place, mask=window, other=0)
    line = drawn + i * (2 * WIDTH + 1)
    token, num = tl.load(line + place, mask=window, other=0), tl.load(line + WIDTH)
    counts = window & was_live & (place < num) & (at > 0)
    stored = counts & (at < longest)
    page = tl.load(table + tl.minimum(at // PAGE_SIZE, PAGES - 1), mask=stored, other=0)
    ends = counts & ((at % PAGE_SIZE == 0) | (place == num - 1))
    before = tl.minimum((at - 1) // PAGE_SIZE, PAGES - 1)
    tail = tl.load(table + before, mask=ends, other=0)
    slot = page.to(tl.int64) * PAGE_SIZE + at % PAGE_SIZE
    out = kept + i * WIDTH + place
    tl.store(out, token, mask=window)
    tl.store(out + stride, tl.where(stored, at, 0), mask=window)
    tl.store(out + 2 * stride, tl.where(stored, slot, 0), mask=window)
    tl.store(out + 3 * stride, tail.to(tl.int64), mask=window)
    tl.store(last + i, i * WIDTH + tl.maximum(num - 1, 0))
    if NUM > 0:
        step = tl.arange(0, NUM_2)
        proposes = step < NUM
        here = tl.load(seq_len + row) + step
        inside = proposes & (tl.load(active + row) != 0) & (here + 1 < longest)
        page = tl.load(table + tl.minimum(here // PAGE_SIZE, PAGES - 1), mask=inside, other=0)
        slot = page.to(tl.int64) * PAGE_SIZE + here % PAGE_SIZE
        there = step * stride_rows + i
        tl.store(ahead + there, tl.where(inside, here, 0), mask=proposes)
        tl.store(ahead + NUM * stride_rows + there, tl.where(inside, slot, 0), mask=proposes)
        tl.store(lens + there, tl.where(inside, here + 1, 1).to(tl.int32), mask=proposes)


def draft_rows_triton(
    rows: Tensor,
    position: Tensor,
    valid: Tensor,
    drawn: Tensor,
    columns: RowColumns,
    page_size: int,
    num_drafts: int,
) -> DraftSteps:
    """See draft_rows_ref; one launch."""
    n, num_tokens = len(rows), len(position)
    width = num_tokens // n
    stride, stride_rows = aligned(num_tokens), aligned(n)
    kept = torch.empty(4, stride, dtype=torch.int64, device=rows.device)
    last = torch.empty(n, dtype=torch.int64, device=rows.device)
    ahead = torch.empty(2, num_drafts, stride_rows, dtype=torch.int64, device=rows.device)
    lens = torch.empty(num_drafts, stride_rows, dtype=torch.int32, device=rows.device)
    _draft_rows_kernel[(n,)](
        rows, position, valid.view(torch.uint8), drawn, columns.active.view(torch.uint8),
        columns.seq_len, columns.max_len, columns.page_table, kept, last, ahead, lens,
        stride, stride_rows, columns.page_table.stride(0),
        **overlap(
            rows, WIDTH=width, WIDTH_2=power_of_two(width), NUM=num_drafts,
            NUM_2=power_of_two(max(num_drafts, 1)), PAGES=columns.page_table.shape[1],
            PAGE_SIZE=page_size, num_warps=1,
        ),
    )  # fmt: skip
    tokens, positions, slots, tail_pages = kept[:, :num_tokens].unbind()
    ahead_positions, ahead_slots = ahead[..., :n].unbind()
    return DraftSteps(
        tokens, positions, slots, tail_pages, last, ahead_positions, ahead_slots, lens[:, :n]
    )


def draft_rows(
    rows: Tensor,
    position: Tensor,
    valid: Tensor,
    drawn: Tensor,
    columns: RowColumns,
    page_size: int,
    num_drafts: int,
) -> DraftSteps:
    """draft_rows_ref, on CUDA by one kernel."""
    assert all(each.is_contiguous() for each in (rows, position, valid, drawn))
    op = draft_rows_triton if rows.is_cuda else draft_rows_ref
    return op(rows, position, valid, drawn, columns, page_size, num_drafts)
