"""The rows of prompt chunks, padded: what a forward over them reads, into buffers that stay."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.kernels.jit import gdc_launch_dependents, gdc_wait, tl, triton
from worker.kernels.launch import overlap

BLOCK = 128


def chunk_rows_ref(
    tokens: Tensor, page_table: Tensor, page_size: int, out: Tensor, num_rows: int
) -> None:
    """Fill the first `num_rows` columns of `out`; those beyond `tokens` are padding, all zero.

    Args:
        tokens: [3, num_tokens] i64, rows contiguous: token ids, positions, row of the page table.
        page_table: [rows, max_pages] i32, rows contiguous.
        page_size: tokens a page.
        out: [3, capacity] i64, contiguous: token ids, positions, slots (page * page_size + offset).
        num_rows: at least num_tokens; slot 0 is the sink's.
    """
    n = tokens.shape[1]
    ids, positions, rows = tokens
    page = page_table[rows, positions // page_size].to(torch.int64)
    out[0, :n] = ids
    out[1, :n] = positions
    out[2, :n] = page * page_size + positions % page_size
    out[:, n:num_rows] = 0


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "stride_tokens"])
def _chunk_rows_kernel(
    tokens, page_table, out, num_tokens, num_rows, stride_tokens, stride_table, stride_out,
    PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of rows)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real, inside = at < num_tokens, at < num_rows
    token = tl.load(tokens + at, mask=real, other=0)
    position = tl.load(tokens + stride_tokens + at, mask=real, other=0)
    row = tl.load(tokens + 2 * stride_tokens + at, mask=real, other=0)
    page_at = page_table + row * stride_table + position // PAGE_SIZE
    page = tl.load(page_at, mask=real, other=0).to(tl.int64)
    tl.store(out + at, token, mask=inside)
    tl.store(out + stride_out + at, position, mask=inside)
    tl.store(out + 2 * stride_out + at, page * PAGE_SIZE + position % PAGE_SIZE, mask=inside)


def chunk_rows_triton(
    tokens: Tensor, page_table: Tensor, page_size: int, out: Tensor, num_rows: int
) -> None:
    """See chunk_rows_ref; one launch."""
    assert tokens.stride(1) == page_table.stride(1) == out.stride(1) == 1
    assert tokens.shape[1] <= num_rows <= out.shape[1]
    _chunk_rows_kernel[(-(-num_rows // BLOCK),)](
        tokens, page_table, out, tokens.shape[1], num_rows,
        tokens.stride(0), page_table.stride(0), out.stride(0),
        **overlap(tokens, PAGE_SIZE=page_size, BLOCK=BLOCK, num_warps=4),
    )  # fmt: skip


def chunk_rows(
    tokens: Tensor, page_table: Tensor, page_size: int, out: Tensor, num_rows: int
) -> None:
    """chunk_rows_ref, on CUDA by one kernel."""
    op = chunk_rows_triton if tokens.is_cuda else chunk_rows_ref
    op(tokens, page_table, page_size, out, num_rows)
