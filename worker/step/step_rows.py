"""What the rows of a decode step read of the state: a verify window of W tokens each.

Row j of a window is the token at position L + j, where L is the request's KV length: the last drawn
token for j = 0, then its drafts. W = 1 is plain decode. `accept_rows` is the step's other end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from worker.ops.jit import gdc_launch_dependents, gdc_wait, tl, triton
from worker.ops.launch import aligned, overlap, power_of_two

BLOCK_PAGES = 256


@dataclass(slots=True, frozen=True)
class RowColumns:
    """Columns of the step state, [num_rows + 1, ...], contiguous. Row 0 is the sink."""

    active: Tensor  # bool
    seq_len: Tensor  # i64
    last_token: Tensor  # i64
    max_len: Tensor  # i64
    page_table: Tensor  # i32 [num_rows + 1, max_pages]
    # i64 [num_rows + 1, widest window - 1]: proposals for the positions behind last_token's, of the
    # next step; -1 = none, which no draw equals
    drafts: Tensor

    def of_rows(self) -> tuple[Tensor, ...]:
        """What steps change."""
        return self.active, self.seq_len, self.last_token, self.drafts


@dataclass(slots=True, frozen=True)
class StepRows:
    """What a decode step reads of its n rows; an inactive row reads as row 0, the sink."""

    live: Tensor  # [n] i64
    valid: Tensor  # [n] bool; active
    positions: Tensor  # [n * width] i64; of the input tokens
    next_positions: Tensor  # [n * width] i64; of the tokens to be drawn
    input_ids: Tensor  # [n * width] i64
    seq_lens: Tensor  # [n] i32; KV length with the whole window
    slots: Tensor  # [n * width] i64; where the tokens' KV goes
    table: Tensor  # [n, num_pages] i32


def read_rows_ref(
    rows: Tensor, columns: RowColumns, page_size: int, num_pages: int, width: int = 1
) -> StepRows:
    """Read windows of `width` tokens of `rows` [n] i64, with at most `num_pages` pages of each.

    Where there is no draft the window has token 0. A window may pass its row's max_len: the slots
    are the row's own, and positions stay below it, as the model has no others. Inactive rows write
    to the sink.
    """
    live = rows * columns.active[rows]
    positions = columns.seq_len[live][:, None] + torch.arange(width, device=rows.device)
    table = columns.page_table[live, :num_pages]
    page = table.gather(1, (positions // page_size).clamp(max=num_pages - 1)).to(torch.int64)
    is_live, last = (live > 0)[:, None], columns.max_len[live][:, None] - 1
    drafts = columns.drafts[live, : width - 1].clamp(min=0)
    return StepRows(
        live,
        columns.active[live],
        torch.where(is_live, torch.minimum(positions, last), positions).view(-1),
        positions.view(-1) + 1,
        torch.cat((columns.last_token[live][:, None], drafts), 1).view(-1),
        (positions[:, -1] + 1).to(torch.int32),
        torch.where(is_live, page * page_size + positions % page_size, 0).view(-1),
        table,
    )


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
    """See read_rows_ref; one launch."""
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


def read_rows(
    rows: Tensor, columns: RowColumns, page_size: int, num_pages: int, width: int = 1
) -> StepRows:
    """read_rows_ref, on CUDA by one kernel."""
    assert num_pages <= columns.page_table.shape[1]
    op = read_rows_triton if rows.is_cuda else read_rows_ref
    return op(rows, columns, page_size, num_pages, width)
