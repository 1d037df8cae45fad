"""Lists on the device of the rows that the passes of a draw work for.

A pass could have programs for all rows, most of which end at once. That is not free: a program
holds many registers, so few run at a time, and 256 rows take tens of turns. So a pass has about as
many programs as run at once, and a program walks down a list of rows.
"""

from torch import Tensor

from worker.ops.jit import enter, tl, triton
from worker.ops.launch import overlap

LISTED_ROWS, WARPS = 1024, 4  # rows that the program lists at once
NUM_PROGRAMS = 396  # of a pass: as many as run at once, three a multiprocessor of 132
NUM_LISTS = 7


@triton.jit
def tries(temperature, k, p, vocab, least):
    """Whether a row is first drawn without its top_p."""
    return (temperature != 0.0) & (p < 1.0) & (p >= least) & ((k <= 0) | (k >= vocab))


@triton.jit
def _append(rows, wanted, row, num):
    """Append the wanted rows to a list that has `num`; returns how many it has then."""
    count = wanted.to(tl.int32)
    tl.store(rows + 1 + num + tl.cumsum(count, 0) - count, row, mask=wanted)
    return num + tl.sum(count, 0)


@triton.jit(do_not_specialize=["n", "width", "least"])
def _list_rows_kernel(
    temperatures, top_k, top_p, kept, long_slots, lists, n, width, vocab, least,
    CHECKED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program."""
    enter(PDL)
    start, num, num_all, num_k, num_p, long_k, long_p = 0, 0, 0, 0, 0, 0, 0
    while start < n:
        row = start + tl.arange(0, BLOCK)
        here = row < n
        temperature = tl.load(temperatures + row, mask=here, other=0.0)
        k = tl.load(top_k + row, mask=here, other=0)
        p = tl.load(top_p + row, mask=here, other=1.0)
        if CHECKED:
            undrawn = tl.load(kept + row, mask=here, other=1) == 0
            left = (temperature != 0.0) & undrawn
            for_k, for_p = left & (k > 0) & (k < vocab), left & (p < 1.0)
            num_all = _append(lists + width, undrawn, row, num_all)
            num = _append(lists + 2 * width, left, row, num)
            num_k = _append(lists + 3 * width, for_k, row, num_k)
            num_p = _append(lists + 4 * width, for_p, row, num_p)
            if long_slots is not None:
                is_long = tl.load(long_slots + row, mask=here, other=0) > 0
                long_k = _append(lists + 5 * width, for_k & is_long, row, long_k)
                long_p = _append(lists + 6 * width, for_p & is_long, row, long_p)
        else:
            num = _append(lists, tries(temperature, k, p, vocab, least), row, num)
        start += BLOCK
    if CHECKED:
        tl.store(lists + width, num_all)
        tl.store(lists + 2 * width, num)
        tl.store(lists + 3 * width, num_k)
        tl.store(lists + 4 * width, num_p)
        tl.store(lists + 5 * width, long_k)
        tl.store(lists + 6 * width, long_p)
    else:
        tl.store(lists, num)


def list_rows(
    limits: tuple[Tensor, Tensor, Tensor], kept: Tensor, long_slots: Tensor | None, lists: Tensor,
    vocab: int, least: float, *, checked: bool,
) -> None:  # fmt: skip
    """List the rows that try, or with `checked` those with something left to do.

    limits: temperature, top_k and top_p of the n rows; kept: [n] u8, whether the row has its token,
    read with `checked` only; long_slots: [n] i64 or None; least: see `tries`.
    lists: i32 [NUM_LISTS, n + 1 or more], a list's length and then its rows, ascending: rows that
    try (without `checked` this alone is written); all without a token; those of them that are
    sampled; of these those with top_k; with top_p; with top_k and a long slot; with top_p and one.
    """
    _list_rows_kernel[(1,)](
        *limits, kept, long_slots, lists, len(kept), lists.shape[1], vocab, least,
        **overlap(lists, CHECKED=checked, BLOCK=LISTED_ROWS, num_warps=WARPS),
    )  # fmt: skip


def rows_at_once(num_rows: int, num_blocks: int, num_programs: int | None = None) -> int:
    """Rows that a pass works for at once; num_blocks: of a row; num_programs: of the pass."""
    return max(1, min(num_rows, (num_programs or NUM_PROGRAMS) // num_blocks))
