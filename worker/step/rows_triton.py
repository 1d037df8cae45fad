"""Kernels of rows.py."""

import torch
from torch import Tensor

from worker.ops.jit import enter, tl, triton
from worker.ops.launch import aligned, overlap
from worker.step.rows import Floats, Gathered, Ints, RowColumns, SampledRows, StepRows

BLOCK_PAGES = 256


@triton.jit(do_not_specialize=["start", "stride", "num_pages"])
def _read_rows_kernel(
    rows, active, seq_len, last_token, max_len, page_table, drafts, ints, seq_lens, valid, table,
    start, stride, num_pages, stride_table, stride_drafts,
    WIDTH: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_PAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (n, blocks of pages). ints: i64: live [n]; from `start` on, `stride` apart: position,
    next position, token, slot: [n, WIDTH]."""
    enter(PDL)
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
        window = tl.arange(0, triton.next_power_of_2(WIDTH))
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
            rows, WIDTH=width, PAGE_SIZE=page_size, BLOCK_PAGES=BLOCK_PAGES, num_warps=1
        ),
    )  # fmt: skip
    parts = ints[start:].view(4, stride)[:, : n * width]
    positions, following, tokens, slots = parts.unbind()
    return StepRows(ints[:n], valid, positions, following, tokens, seq_lens, slots, table)


@triton.jit
def _accept_rows_kernel(
    rows, position, valid, draws, stop_ids, min_len, active, seq_len, last_token, max_len, folded,
    drafts, num_accepted, result, stride_drafts,
    WIDTH: tl.constexpr, STOPS: tl.constexpr, DRAFTS: tl.constexpr, FORCED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (n). DRAFTS: columns of `drafts`, at least WIDTH - 1."""
    enter(PDL)
    at = tl.program_id(0)
    row, counts = tl.load(rows + at), tl.load(valid + at) != 0
    place = tl.arange(0, triton.next_power_of_2(WIDTH))
    inside = place < WIDTH
    first = tl.load(position + at * WIDTH)
    here = first + place
    drew = tl.load(draws + at * WIDTH + place, mask=inside, other=-1)
    columns = tl.arange(0, triton.next_power_of_2(STOPS))
    ids = tl.load(stop_ids + at * WIDTH * STOPS + columns, mask=columns < STOPS, other=-1)
    equal = (ids[None, :] == drew[:, None]).to(tl.int32)
    last = (tl.sum(equal, 1) > 0) & (here >= tl.load(min_len + at * WIDTH))
    last = last | (here + 1 >= tl.load(max_len + row))
    has_draft = place < WIDTH - 1
    draft = tl.load(drafts + row * stride_drafts + place, mask=has_draft, other=-1)
    wrong = drew != draft
    if FORCED:
        wrong = place >= tl.load(num_accepted + at * WIDTH)
    # The first place whose draw is the last to count: it ends the row, or no draft equals it.
    num = tl.min(tl.where(last | wrong | (place >= WIDTH - 1), place, WIDTH - 1), 0) + 1
    is_end = place == num - 1
    token = tl.sum(tl.where(is_end, drew, 0), 0)
    finished = tl.sum((is_end & last).to(tl.int32), 0) > 0
    tl.store(seq_len + row, first + num - 1, mask=counts)
    tl.store(folded + row, first - (WIDTH > 1), mask=counts)
    tl.store(last_token + row, token, mask=counts)
    tl.store(active + row, (~finished).to(tl.uint8), mask=counts)
    if DRAFTS > 0:
        all_drafts = tl.arange(0, triton.next_power_of_2(DRAFTS))
        none = tl.full(all_drafts.shape, -1, tl.int64)
        tl.debug_barrier()  # the drafts above have been read
        tl.store(drafts + row * stride_drafts + all_drafts, none, mask=all_drafts < DRAFTS)
    out = result + at * (2 * WIDTH + 1)
    tl.store(out + place, drew, mask=inside)
    tl.store(out + WIDTH, tl.where(counts, num, 0).to(tl.int64))
    tl.store(out + WIDTH + 1, finished.to(tl.int64))
    tl.store(out + WIDTH + 2 + place, draft, mask=has_draft)


def accept_rows_triton(
    sampled: SampledRows,
    draws: Tensor,
    stop_ids: Tensor,
    min_len: Tensor,
    columns: RowColumns,
    num_accepted: Tensor | None = None,
) -> Tensor:
    """One launch. Rows that are not valid are inactive already."""
    rows, position, valid, width = sampled.rows, sampled.position, sampled.valid, sampled.width
    assert all(x.is_contiguous() for x in (rows, position, valid, draws, stop_ids, min_len))
    n = len(rows)
    result = torch.empty(n, 2 * width + 1, dtype=torch.int64, device=rows.device)
    _accept_rows_kernel[(n,)](
        rows, position, valid.view(torch.uint8), draws, stop_ids, min_len,
        columns.active.view(torch.uint8), columns.seq_len, columns.last_token, columns.max_len,
        columns.folded, columns.drafts, position if num_accepted is None else num_accepted, result,
        columns.drafts.stride(0),
        **overlap(
            rows, WIDTH=width, STOPS=stop_ids.shape[1], DRAFTS=columns.drafts.shape[1],
            FORCED=num_accepted is not None, num_warps=1,
        ),
    )  # fmt: skip
    return result


BLOCK = 32


@triton.jit(do_not_specialize=["n", "stride"])
def _gather_rows_kernel(
    rows, int0, int1, int2, int3, float0, float1, float2, float3, float4, float5, table,
    ints, floats, picked, n, stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ints: [4, stride]; floats: [6, stride]; picked: [n, WIDTH]."""
    enter(PDL)
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
    cols = tl.arange(0, triton.next_power_of_2(WIDTH))
    both = here[:, None] & (cols < WIDTH)[None, :]
    found = tl.load(table + row[:, None] * WIDTH + cols[None, :], mask=both)
    tl.store(picked + at[:, None] * WIDTH + cols[None, :], found, mask=both)


def gather_rows_triton(ints: Ints, floats: Floats, table: Tensor, rows: Tensor) -> Gathered:
    assert all(x.is_contiguous() for x in (*ints, *floats, table, rows))
    n, width = len(rows), table.shape[1]
    stride = aligned(n)
    out_ints = torch.empty(len(ints), stride, dtype=torch.int64, device=rows.device)
    out_floats = torch.empty(len(floats), stride, dtype=torch.float32, device=rows.device)
    picked = torch.empty(n, width, dtype=torch.int64, device=rows.device)
    _gather_rows_kernel[(-(-n // BLOCK),)](
        rows, *ints, *floats, table, out_ints, out_floats, picked, n, stride,
        **overlap(rows, WIDTH=width, BLOCK=BLOCK, num_warps=1),
    )  # fmt: skip
    return out_ints[:, :n].unbind(), out_floats[:, :n].unbind(), picked
