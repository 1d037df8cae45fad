"""The two ends of a decode step: what its rows read of the state, and what they leave in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from worker.kernels.jit import gdc_launch_dependents, gdc_wait, tl, triton
from worker.kernels.launch import overlap, power_of_two

BLOCK_PAGES = 256


@dataclass(slots=True, frozen=True)
class RowColumns:
    """Columns of the step state, [num_rows + 1, ...], contiguous. Row 0 is the sink."""

    active: Tensor  # bool
    seq_len: Tensor  # i64
    last_token: Tensor  # i64
    max_len: Tensor  # i64
    page_table: Tensor  # i32 [num_rows + 1, max_pages]


@dataclass(slots=True, frozen=True)
class StepRows:
    """What a decode step reads of its n rows; an inactive row reads as row 0, the sink."""

    live: Tensor  # [n] i64
    valid: Tensor  # [n] bool; active
    positions: Tensor  # [n] i64; of the input token
    next_positions: Tensor  # [n] i64; of the token to be drawn
    input_ids: Tensor  # [n] i64
    seq_lens: Tensor  # [n] i32; KV length after the step
    slots: Tensor  # [n] i64; where the token's KV goes
    table: Tensor  # [n, num_pages] i32


def read_rows_ref(rows: Tensor, columns: RowColumns, page_size: int, num_pages: int) -> StepRows:
    """Read the state of `rows` [n] i64, with at most `num_pages` pages of each."""
    live = rows * columns.active[rows]
    positions = columns.seq_len[live]
    table = columns.page_table[live, :num_pages]
    page = table.gather(1, (positions // page_size)[:, None])[:, 0].to(torch.int64)
    return StepRows(
        live,
        columns.active[live],
        positions,
        positions + 1,
        columns.last_token[live],
        (positions + 1).to(torch.int32),
        page * page_size + positions % page_size,
        table,
    )


@triton.jit(do_not_specialize=["n", "num_pages"])
def _read_rows_kernel(
    rows, active, seq_len, last_token, page_table, ints, seq_lens, valid, table,
    n, num_pages, stride_table,
    PAGE_SIZE: tl.constexpr, BLOCK_PAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (n, blocks of pages). ints: i64 [5, n]: live, position, next position, token, slot."""
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
        position = tl.load(seq_len + live)
        page = tl.load(page_table + live * stride_table + position // PAGE_SIZE).to(tl.int64)
        tl.store(ints + at, live)
        tl.store(ints + n + at, position)
        tl.store(ints + 2 * n + at, position + 1)
        tl.store(ints + 3 * n + at, tl.load(last_token + live))
        tl.store(ints + 4 * n + at, page * PAGE_SIZE + position % PAGE_SIZE)
        tl.store(seq_lens + at, (position + 1).to(tl.int32))
        tl.store(valid + at, tl.load(active + live))


def read_rows_triton(rows: Tensor, columns: RowColumns, page_size: int, num_pages: int) -> StepRows:
    """See read_rows_ref; one launch."""
    n, device = len(rows), rows.device
    ints = torch.empty(5, n, dtype=torch.int64, device=device)
    seq_lens = torch.empty(n, dtype=torch.int32, device=device)
    valid = torch.empty(n, dtype=torch.bool, device=device)
    table = torch.empty(n, num_pages, dtype=torch.int32, device=device)
    _read_rows_kernel[(n, -(-num_pages // BLOCK_PAGES))](
        rows, columns.active.view(torch.uint8), columns.seq_len, columns.last_token,
        columns.page_table, ints, seq_lens, valid.view(torch.uint8), table,
        n, num_pages, columns.page_table.stride(0),
        **overlap(rows, PAGE_SIZE=page_size, BLOCK_PAGES=BLOCK_PAGES, num_warps=1),
    )  # fmt: skip
    live, positions, following, tokens, slots = ints.unbind()
    return StepRows(live, valid, positions, following, tokens, seq_lens, slots, table)


def read_rows(rows: Tensor, columns: RowColumns, page_size: int, num_pages: int) -> StepRows:
    """read_rows_ref, on CUDA by one kernel."""
    op = read_rows_triton if rows.is_cuda else read_rows_ref
    return op(rows, columns, page_size, num_pages)


def leave_rows_ref(
    rows: Tensor,
    position: Tensor,
    valid: Tensor,
    token: Tensor,
    stop_ids: Tensor,
    min_len: Tensor,
    columns: RowColumns,
) -> Tensor:
    """Advance each valid row by its drawn token; a stop id or the maximum length ends the row.

    rows: [n] i64, distinct where valid; position: [n] i64, of the token; token: [n] i64;
    stop_ids: [n, width] i64, -1 = unused; min_len: [n] i64, no stop id counts below it.
    Returns [n, 3] i64: token, valid, finished.
    """
    stop = (stop_ids == token[:, None]).any(-1) & (position >= min_len)
    finished = stop | (position + 1 >= columns.max_len[rows])
    columns.seq_len[rows] = torch.where(valid, position, columns.seq_len[rows])
    columns.last_token[rows] = torch.where(valid, token, columns.last_token[rows])
    columns.active[rows] = valid & ~finished
    return torch.stack((token, valid.long(), finished.long()), dim=-1)


@triton.jit
def _leave_rows_kernel(
    rows, position, valid, token, stop_ids, min_len, active, seq_len, last_token, max_len, drawn,
    WIDTH: tl.constexpr, WIDTH_2: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (n)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    at = tl.program_id(0)
    row, here = tl.load(rows + at), tl.load(position + at)
    drew, counts = tl.load(token + at), tl.load(valid + at) != 0
    columns = tl.arange(0, WIDTH_2)
    ids = tl.load(stop_ids + at * WIDTH + columns, mask=columns < WIDTH, other=-1)
    is_stop = (tl.sum((ids == drew).to(tl.int32), 0) > 0) & (here >= tl.load(min_len + at))
    finished = is_stop | (here + 1 >= tl.load(max_len + row))
    tl.store(seq_len + row, here, mask=counts)
    tl.store(last_token + row, drew, mask=counts)
    tl.store(active + row, (~finished).to(tl.uint8), mask=counts)
    tl.store(drawn + at * 3, drew)
    tl.store(drawn + at * 3 + 1, counts.to(tl.int64))
    tl.store(drawn + at * 3 + 2, finished.to(tl.int64))


def leave_rows_triton(
    rows: Tensor,
    position: Tensor,
    valid: Tensor,
    token: Tensor,
    stop_ids: Tensor,
    min_len: Tensor,
    columns: RowColumns,
) -> Tensor:
    """See leave_rows_ref; one launch. Rows that are not valid are inactive already."""
    drawn = torch.empty(len(rows), 3, dtype=torch.int64, device=rows.device)
    assert all(each.is_contiguous() for each in (rows, position, valid, token, stop_ids, min_len))
    width = stop_ids.shape[1]
    _leave_rows_kernel[(len(rows),)](
        rows, position, valid.view(torch.uint8), token, stop_ids, min_len,
        columns.active.view(torch.uint8), columns.seq_len, columns.last_token, columns.max_len,
        drawn, **overlap(rows, WIDTH=width, WIDTH_2=power_of_two(width), num_warps=1),
    )  # fmt: skip
    return drawn


def leave_rows(
    rows: Tensor,
    position: Tensor,
    valid: Tensor,
    token: Tensor,
    stop_ids: Tensor,
    min_len: Tensor,
    columns: RowColumns,
) -> Tensor:
    """leave_rows_ref, on CUDA by one kernel."""
    op = leave_rows_triton if rows.is_cuda else leave_rows_ref
    return op(rows, position, valid, token, stop_ids, min_len, columns)
