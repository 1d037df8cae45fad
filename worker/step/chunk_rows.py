"""Prompt chunks: packed on the host for one upload, unpacked to batch rows and page tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from worker.ops.op import op
from worker.plan import Chunk, RowPages

NUM_LINES = 10
TOKEN_LINES, DRAFT_LINES = 3, 6  # of `out`: without and with DraftRows' fields


NOT_STORED = 1  # a slot of the sink, and not the one by which padding is known
NOTHING_NEW = RowPages(0, 0, ())


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
        slot of its state, where layers are recurrent
        first position whose KV is stored; that of those below it goes to NOT_STORED
        number of tokens of the state that is stored as well, and the slot of that

    All token ids follow, then all new pages. Requests beyond the last are padding: row 0, no
    tokens, no new pages, seq_len 0.
    """

    words: Tensor  # i32, contiguous
    width: int
    num_reqs: int
    num_tokens: int
    last_page: int  # one past the last new page of any row; 0 = there are no new pages


def line_width(num_reqs: int) -> int:
    """i32 words of a line: one more than requests, rounded up to 16 bytes, as kernels expect."""
    return -(-(num_reqs + 1) // 4) * 4


def pack(
    words: Tensor, chunks: Sequence[Chunk], new: Mapping[int, RowPages], num_lines: int
) -> tuple[list[int], SentChunks]:
    """Make the values to upload to the beginning of `words`, and their description for the kernel.

    new: pages of the chunks' rows that get some; num_lines: requests, padded ones included.
    """
    num_reqs, width = len(chunks), line_width(num_lines)
    assert num_reqs <= num_lines
    query_start = [0, *accumulate(len(chunk.tokens) for chunk in chunks)]
    num_tokens, padding = query_start[-1], [0] * (width - num_reqs)
    sizes = (len(entry.pages) for entry in new.values())
    begins = accumulate(sizes, initial=NUM_LINES * width + num_tokens)
    begin_of = dict(zip(new, begins, strict=False))
    of_chunks = [new.get(chunk.row, NOTHING_NEW) for chunk in chunks]
    last_pages = [entry.first + len(entry.pages) for entry in of_chunks]
    values = [chunk.row for chunk in chunks] + padding
    values += query_start + [num_tokens] * (width - len(query_start))
    values += [chunk.start + len(chunk.tokens) for chunk in chunks] + padding
    values += [entry.first for entry in of_chunks] + padding
    values += last_pages + padding
    values += [begin_of.get(chunk.row, 0) for chunk in chunks] + padding
    values += [chunk.state_slot for chunk in chunks] + padding
    values += [chunk.store_from for chunk in chunks] + padding
    for field in range(2):
        values += [chunk.snapshot[field] for chunk in chunks] + padding
    for chunk in chunks:
        values += chunk.tokens
    for entry in new.values():
        values += entry.pages
    return values, SentChunks(words, width, num_reqs, num_tokens, max(last_pages))


def chunk_rows_ref(
    sent: SentChunks, page_table: Tensor, page_size: int, out: Tensor, num_rows: int, tables: Tensor
) -> None:
    """Write new pages to `page_table`, batch rows to `out`, requests' tables to `tables`.

    Requests that share a row bring the same new pages.

    Args:
        page_table: [rows, max_pages] i32, rows contiguous; row 0 gets no pages.
        out: [3 or 6, capacity] i64, contiguous: token ids, positions, slots (page * page_size +
            offset) fill the first `num_rows` columns; those beyond the tokens are padding, all
            zero. The other three are the fields of `forward.batch.DraftRows`.
        num_rows: of the padded batch, at least num_tokens; slot 0 is the sink's.
        tables: [num_reqs or more, num_pages] i32, contiguous; padded requests get row 0's table.
    """
    n, words = sent.num_tokens, sent.words
    lines = words[: NUM_LINES * sent.width].view(NUM_LINES, sent.width)
    if sent.last_page:
        for row, _, _, first, last, begin, *_ in lines[:, : sent.num_reqs].T.tolist():
            page_table[row, first:last] = words[begin : begin + last - first]
    rows, query_start, seq_lens = lines[:3].to(torch.int64)
    at = torch.arange(n, device=words.device)
    owner = torch.searchsorted(query_start[1 : sent.num_reqs + 1], at, right=True)
    positions = seq_lens[owner] - query_start[owner + 1] + at
    page = page_table[rows[owner], positions // page_size].to(torch.int64)
    stays = positions < lines[7][owner]
    page.masked_fill_(stays, 0)
    out[0, :n] = words[NUM_LINES * sent.width :][:n]
    out[1, :n] = positions
    out[2, :n] = torch.where(stays, NOT_STORED, page * page_size + positions % page_size)
    if len(out) == DRAFT_LINES:
        begins = at == query_start[owner]
        before = page_table[rows[owner], (positions - 1).clamp(min=0) // page_size].to(torch.int64)
        out[3, :n] = torch.where(begins, -1 - before * (positions > 0), at - 1)
        out[4, :n] = out[2, :n] * (positions > 0)
        ends = (at + 1 == query_start[owner + 1]) | (positions % page_size == page_size - 1)
        out[5, :n] = page * ends
    out[:, n:num_rows] = 0
    tables.copy_(page_table[rows[: len(tables)], : tables.shape[1]])


chunk_rows = op(chunk_rows_ref)
