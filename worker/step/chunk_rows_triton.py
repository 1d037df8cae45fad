"""Kernels of chunk_rows.py."""

from torch import Tensor

from worker.ops.jit import enter, overlap, tl, triton
from worker.step.chunk_rows import DRAFT_LINES, NOT_STORED, NUM_LINES, SentChunks

BLOCK = 128


@triton.jit
def _pages_of(words, page_table, line, at, width, stride_table, mask):
    """Pages `at` of request `line`'s table, which of them are new, and where they stand in it."""
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
    NUM_LINES: tl.constexpr, NOT_STORED: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr, DRAFTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of batch rows, then blocks of the requests' pages."""
    enter(PDL)
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
        stays = position < tl.load(words + 7 * width + low)
        page = tl.where(stays, 0, page)
        slot = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
        slot = tl.where(stays, NOT_STORED, slot)
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
            out, NUM_LINES=NUM_LINES, NOT_STORED=NOT_STORED, PAGE_SIZE=page_size, BLOCK=BLOCK,
            DRAFTS=len(out) == DRAFT_LINES, num_warps=4,
        ),
    )  # fmt: skip
