"""Kernels of ngram.py."""

import torch
from torch import Tensor

from worker.ops.jit import enter, tl, triton
from worker.ops.launch import overlap
from worker.step.rows import RowColumns, SampledRows

BLOCK, WARPS = 2048, 4


@triton.jit
def _ngram_drafts_kernel(
    rows, position, valid, drawn, active, seq_len, max_len, text, drafts,
    stride_text, stride_drafts,
    LENGTH: tl.constexpr, WIDTH: tl.constexpr, NUM: tl.constexpr, SHORTEST: tl.constexpr,
    LONGEST: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (n)."""
    enter(PDL)
    i = tl.program_id(0)
    row, was_live = tl.load(rows + i), tl.load(valid + i) != 0
    line, place = text + row * stride_text, tl.arange(0, triton.next_power_of_2(WIDTH))
    window = place < WIDTH
    at = tl.load(position + i * WIDTH + place, mask=window, other=0)
    result = drawn + i * (2 * WIDTH + 1)
    token = tl.load(result + place, mask=window, other=0).to(tl.int32)
    kept = window & was_live & (place < tl.load(result + WIDTH)) & (at < LENGTH)
    tl.store(line + at, token, mask=kept)
    if NUM > 0:
        tl.debug_barrier()  # the search reads what other threads of the program have just written
        num = tl.where(tl.load(active + row) != 0, tl.load(seq_len + row) + 1, 0).to(tl.int32)
        best, start = tl.full((), -1, tl.int64), 0
        while start < num - 1:
            here = start + tl.arange(0, BLOCK)
            same = here < num - 1
            num_same = tl.zeros((BLOCK,), tl.int32)
            for back in tl.static_range(LONGEST):
                last = tl.load(line + tl.maximum(num - 1 - back, 0))
                inside = same & (here >= back)
                there = tl.load(line + here - back, mask=inside, other=-1)
                same = inside & (there == last)
                num_same += same.to(tl.int32)
            score = num_same.to(tl.int64) * LENGTH + here
            best = tl.maximum(best, tl.max(tl.where(num_same >= SHORTEST, score, -1), 0))
            start += BLOCK
        end = (best % LENGTH).to(tl.int32)
        ahead = tl.arange(0, triton.next_power_of_2(NUM))
        proposes = ahead < NUM
        inside = proposes & (best >= 0) & (num + ahead < tl.load(max_len + row))
        source = end + 1 + ahead % tl.maximum(num - 1 - end, 1)
        draft = tl.load(line + source, mask=inside, other=-1)
        tl.store(drafts + row * stride_drafts + ahead, draft.to(tl.int64), mask=proposes)


def ngram_drafts_triton(
    sampled: SampledRows, drawn: Tensor, columns: RowColumns, text: Tensor, lengths: range
) -> None:
    rows, position, valid, width = sampled.rows, sampled.position, sampled.valid, sampled.width
    assert all(each.is_contiguous() for each in (rows, position, valid, drawn))
    _ngram_drafts_kernel[(len(rows),)](
        rows, position, valid.view(torch.uint8), drawn, columns.active.view(torch.uint8),
        columns.seq_len, columns.max_len, text, columns.drafts,
        text.stride(0), columns.drafts.stride(0),
        **overlap(
            rows, LENGTH=text.shape[1], WIDTH=width, NUM=width - 1, SHORTEST=lengths[0],
            LONGEST=lengths[-1], BLOCK=BLOCK, num_warps=WARPS,
        ),
    )  # fmt: skip
