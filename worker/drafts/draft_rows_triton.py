"""Kernels of draft_rows.py."""

import torch
from torch import Tensor

from worker.drafts.draft_rows import DraftSteps
from worker.ops.jit import enter, tl, triton
from worker.ops.launch import aligned, overlap
from worker.step.rows import RowColumns, SampledRows


@triton.jit(do_not_specialize=["stride", "stride_rows"])
def _draft_rows_kernel(
    rows, position, valid, drawn, active, seq_len, max_len, page_table, kept, last, ahead, lens,
    stride, stride_rows, stride_table,
    WIDTH: tl.constexpr, NUM: tl.constexpr, PAGES: tl.constexpr, PAGE_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (n). kept: i64 [4, stride], the first four fields; ahead: i64 [2, NUM, stride_rows]."""
    enter(PDL)
    i = tl.program_id(0)
    row, was_live = tl.load(rows + i), tl.load(valid + i) != 0
    table, longest = page_table + row * stride_table, tl.load(max_len + row)
    place = tl.arange(0, triton.next_power_of_2(WIDTH))
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
        step = tl.arange(0, triton.next_power_of_2(NUM))
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
    sampled: SampledRows, drawn: Tensor, columns: RowColumns, page_size: int
) -> DraftSteps:
    rows, position, valid, width = sampled.rows, sampled.position, sampled.valid, sampled.width
    assert all(each.is_contiguous() for each in (rows, position, valid, drawn))
    n, num_tokens, num_drafts = len(rows), len(position), width - 1
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
            rows, WIDTH=width, NUM=num_drafts, PAGES=columns.page_table.shape[1],
            PAGE_SIZE=page_size, num_warps=1,
        ),
    )  # fmt: skip
    tokens, positions, slots, tail_pages = kept[:, :num_tokens].unbind()
    ahead_positions, ahead_slots = ahead[..., :n].unbind()
    return DraftSteps(
        tokens, positions, slots, tail_pages, last, ahead_positions, ahead_slots, lens[:, :n]
    )


@triton.jit(do_not_specialize=["stride"])
def _kept_rows_kernel(
    rows, position, valid, drawn, page_table, out, stride, stride_table,
    WIDTH: tl.constexpr, PAGES: tl.constexpr, PAGE_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (n). out: i64 [2, stride]: positions, slots, each [n, WIDTH]."""
    enter(PDL)
    i = tl.program_id(0)
    row, was_live = tl.load(rows + i), tl.load(valid + i) != 0
    place = tl.arange(0, triton.next_power_of_2(WIDTH))
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
            rows, WIDTH=width, PAGES=columns.page_table.shape[1], PAGE_SIZE=page_size, num_warps=1
        ),
    )  # fmt: skip
    positions, slots = out[:, :num_tokens].unbind()
    return positions, slots
