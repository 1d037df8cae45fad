"""Prompt chunks: pack them for one upload, unpack them to batch rows and page tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from worker.ops.jit import gdc_launch_dependents, gdc_wait, tl, triton
from worker.ops.launch import overlap
from worker.plan import Chunk

BLOCK = 128
NUM_LINES = 6
TOKEN_LINES, DRAFT_LINES = 3, 6  # of a batch; with what a chain drafter's rows need


class NewPages(NamedTuple):
    """page_table[row, first : first + len(pages)] = pages, for the row of one chunk."""

    first: int
    pages: Sequence[int]


NOTHING_NEW = NewPages(0, ())


@dataclass(frozen=True, slots=True)
class SentChunks:
    """`num_reqs` chunks in one upload, as `pack` laid them out.

    `words` begins with NUM_LINES lines of `width` words, one word a request (query_start has one
    more):

        row of the page table
        query_start
        seq_len
        first new page of the row
        one past the last new page of the row
        where the request's new pages begin in `words`

    All token ids follow, then all new pages. Requests beyond the last are padding: row 0, no
    tokens, no new pages, seq_len 0.
    """

    words: Tensor  # i32, contiguous
    width: int
    num_reqs: int
    num_tokens: int
    last_page: int  # one past the last new page of any row; 0 = there are no new pages


def line_width(num_reqs: int) -> int:
    """i32 words of a line: one more than requests, in whole 16 bytes.

    Kernels would be compiled anew for a pointer that is not a multiple of 16 bytes.
    """
    return -(-(num_reqs + 1) // 4) * 4


def pack(
    words: Tensor, chunks: Sequence[Chunk], new: Mapping[int, NewPages], num_lines: int
) -> tuple[list[int], SentChunks]:
    """What to upload to the beginning of `words`, and its description for the kernel.

    Args:
        words: i32, on the device.
        chunks: one of each request.
        new: pages by row, for those of the chunks' rows that get some.
        num_lines: requests, padded ones included.
    """
    num_reqs, width = len(chunks), line_width(num_lines)
    assert num_reqs <= num_lines
    query_start = [0, *accumulate(len(chunk.tokens) for chunk in chunks)]
    num_tokens, padding = query_start[-1], [0] * (width - num_reqs)
    begin_of, begin = dict[int, int](), NUM_LINES * width + num_tokens
    for row, each in new.items():
        begin_of[row] = begin
        begin += len(each.pages)
    of_chunks = [new.get(chunk.row, NOTHING_NEW) for chunk in chunks]
    last_pages = [each.first + len(each.pages) for each in of_chunks]
    values = [chunk.row for chunk in chunks] + padding
    values += query_start + [num_tokens] * (width - len(query_start))
    values += [chunk.start + len(chunk.tokens) for chunk in chunks] + padding
    values += [each.first for each in of_chunks] + padding
    values += last_pages + padding
    values += [begin_of.get(chunk.row, 0) for chunk in chunks] + padding
    for chunk in chunks:
        values += chunk.tokens
    for each in new.values():
        values += each.pages
    return values, SentChunks(words, width, num_reqs, num_tokens, max(last_pages))


def chunk_rows_ref(
    sent: SentChunks, page_table: Tensor, page_size: int, out: Tensor, num_rows: int, tables: Tensor
) -> None:
    """Write new pages to `page_table`, batch rows to `out`, each request's table to `tables`.

    Requests that share a row bring the same new pages.

    Args:
        sent: the chunks.
        page_table: [rows, max_pages] i32, rows contiguous; row 0 gets no pages.
        page_size: tokens a page.
        out: [3 or 6, capacity] i64, contiguous: token ids, positions, slots (page * page_size +
            offset) fill the first `num_rows` columns; those beyond the tokens are padding, all
            zero. The other three are the fields of `forward.batch.DraftRows`.
        num_rows: of the padded batch, at least num_tokens; slot 0 is the sink's.
        tables: [num_reqs or more, num_pages] i32, contiguous; padded requests get row 0's table.
    """
    n, words = sent.num_tokens, sent.words
    lines = words[: NUM_LINES * sent.width].view(NUM_LINES, sent.width)
    if sent.last_page:
        for row, _, _, first, last, begin in lines[:, : sent.num_reqs].T.tolist():
            page_table[row, first:last] = words[begin : begin + last - first]
    rows, query_start, seq_lens = lines[:3].to(torch.int64)
    at = torch.arange(n, device=words.device)
    owner = torch.searchsorted(query_start[1 : sent.num_reqs + 1], at, right=True)
    positions = seq_lens[owner] - query_start[owner + 1] + at
    page = page_table[rows[owner], positions // page_size].to(torch.int64)
    out[0, :n] = words[NUM_LINES * sent.width :][:n]
    out[1, :n] = positions
    out[2, :n] = page * page_size + positions % page_size
    if len(out) == DRAFT_LINES:
        begins = at == query_start[owner]
        before = page_table[rows[owner], (positions - 1).clamp(min=0) // page_size].to(torch.int64)
        out[3, :n] = torch.where(begins, -1 - before * (positions > 0), at - 1)
        out[4, :n] = out[2, :n] * (positions > 0)
        ends = (at + 1 == query_start[owner + 1]) | (positions % page_size == page_size - 1)
        out[5, :n] = page * ends
    out[:, n:num_rows] = 0
    tables.copy_(page_table[rows[: len(tables)], : tables.shape[1]])


@triton.jit
def _pages_of(words, page_table, line, at, width, stride_table, mask):
    """Pages `at` of request `line`'s table, new ones included; which are new; their addresses."""
    row = tl.load(words + line).to(tl.int64)
    first = tl.load(words + 3 * width + line)
    last = tl.load(words + 4 * width + line)
    begin = tl.load(words + 5 * width + line)
    new = (at >= first) & (at < last)
    there = page_table + row * stride_table + at
    # New pages come from `words`: another program may be writing them to the table right now.
    kept = tl.load(there, mask=mask & (at < first) | mask & (at >= last), other=0)
    brought = tl.load(words + begin + at - first, mask=new, other=0)
    return tl.where(new, brought, kept), new, there


@triton.jit(
    do_not_specialize=[
        "num_tokens", "num_rows", "num_reqs", "width", "page_blocks", "num_pages",
    ]
)  # fmt: skip
def _chunk_rows_kernel(
    words, page_table, out, tables,
    num_tokens, num_rows, num_reqs, width, page_blocks, num_pages,
    stride_table, stride_out,
    NUM_LINES: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, DRAFTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of batch rows, then for each request blocks of its pages."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    program, row_blocks = tl.program_id(0), tl.cdiv(num_rows, BLOCK)
    within = tl.arange(0, BLOCK)
    if program < row_blocks:
        at = program * BLOCK + within
        real, inside = at < num_tokens, at < num_rows
        low = tl.zeros([BLOCK], dtype=tl.int32)  # last request to begin by `at`
        high, span = low + num_reqs, num_reqs
        while span > 1:
            span = (span + 1) // 2
            middle = (low + high) // 2
            later = tl.load(words + width + middle) > at
            high = tl.where(later, middle, high)
            low = tl.where(later, low, middle)
        end, stop = tl.load(words + 2 * width + low), tl.load(words + width + low + 1)
        position = tl.where(real, end - stop + at, 0)
        token = tl.load(words + NUM_LINES * width + at, mask=real, other=0).to(tl.int64)
        page, _, _ = _pages_of(
            words, page_table, low, position // PAGE_SIZE, width, stride_table, real
        )
        slot = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
        tl.store(out + at, token, mask=inside)
        tl.store(out + stride_out + at, position.to(tl.int64), mask=inside)
        tl.store(out + 2 * stride_out + at, tl.where(real, slot, 0), mask=inside)
        if DRAFTS:
            begins = at == tl.load(words + width + low)
            later = real & (position > 0)
            before, _, _ = _pages_of(
                words, page_table, low, (position - 1) // PAGE_SIZE, width, stride_table,
                begins & later,
            )  # fmt: skip
            source = tl.where(begins, -1 - tl.where(later, before, 0), at - 1)
            ends = real & ((at + 1 == stop) | (position % PAGE_SIZE == PAGE_SIZE - 1))
            more = out + 3 * stride_out + at
            tl.store(more, tl.where(real, source, 0).to(tl.int64), mask=inside)
            tl.store(more + stride_out, tl.where(later, slot, 0), mask=inside)
            tl.store(more + 2 * stride_out, tl.where(ends, page, 0).to(tl.int64), mask=inside)
    else:
        line = (program - row_blocks) // page_blocks
        at = (program - row_blocks) % page_blocks * BLOCK + within
        listed = at < num_pages
        page, new, there = _pages_of(words, page_table, line, at, width, stride_table, listed)
        tl.store(there, page, mask=new)
        tl.store(tables + line.to(tl.int64) * num_pages + at, page, mask=listed)


def chunk_rows_triton(
    sent: SentChunks, page_table: Tensor, page_size: int, out: Tensor, num_rows: int, tables: Tensor
) -> None:
    """See chunk_rows_ref; one launch."""
    num_reqs, num_pages = tables.shape
    assert page_table.stride(1) == out.stride(1) == 1
    assert tables.is_contiguous()
    assert sent.num_tokens <= num_rows <= out.shape[1]
    page_blocks = -(-max(num_pages, sent.last_page) // BLOCK)
    _chunk_rows_kernel[(-(-num_rows // BLOCK) + num_reqs * page_blocks,)](
        sent.words, page_table, out, tables,
        sent.num_tokens, num_rows, sent.num_reqs, sent.width,
        page_blocks, num_pages, page_table.stride(0), out.stride(0),
        **overlap(
            out, NUM_LINES=NUM_LINES, PAGE_SIZE=page_size, BLOCK=BLOCK,
            DRAFTS=len(out) == DRAFT_LINES, num_warps=4,
        ),
    )  # fmt: skip


def chunk_rows(
    sent: SentChunks, page_table: Tensor, page_size: int, out: Tensor, num_rows: int, tables: Tensor
) -> None:
    """chunk_rows_ref, on CUDA by one kernel."""
    op = chunk_rows_triton if out.is_cuda else chunk_rows_ref
    op(sent, page_table, page_size, out, num_rows, tables)
