"""Prompt lookup: what followed the last tokens of a text where they stood in it before.

The longest run of last tokens counts that is found again (at most `longest` of them, at least
`shortest`), and of several places the last one. Where the text ends before all drafts are found,
what follows is taken for periodic. After Saxena, "Prompt lookup decoding" (2023).
"""

from __future__ import annotations

import torch
from torch import Tensor

from worker.ops.jit import gdc_launch_dependents, gdc_wait, tl, triton
from worker.ops.launch import overlap, power_of_two
from worker.step.step_rows import RowColumns

BLOCK, WARPS = 2048, 4


def ngram_drafts_ref(
    rows: Tensor, position: Tensor, valid: Tensor, drawn: Tensor, columns: RowColumns, text: Tensor,
    num_drafts: int, shortest: int, longest: int,
) -> None:  # fmt: skip
    """Append what a step kept to the texts of its rows, then fill columns.drafts[:, :num_drafts].

    -1 stands for no draft: nothing is found again, the row has ended, or its maximum is reached.

    Args:
        rows: [n] i64, as accept_rows had them; 0 = padding.
        position: [n * width] i64, of each draw.
        valid: [n] bool, live when the step began.
        drawn: [n, 2 * width + 1] i64, what accept_rows returned.
        columns: after accept_rows.
        text: [number of rows, length] i32, the tokens of each row by position, the last included.
        num_drafts: of each row.
        shortest, longest: tokens of a run, at least 1.
    """
    n, width, length = len(rows), len(position) // len(rows), text.shape[1]
    at, place = position.view(n, width), torch.arange(width, device=rows.device)
    kept = valid[:, None] & (place < drawn[:, width : width + 1]) & (at < length)
    line = torch.where(kept, rows[:, None], 0)
    text[line, torch.where(kept, at, 0)] = drawn[:, :width].to(torch.int32)
    if not num_drafts:
        return
    num = torch.where(columns.active[rows], columns.seq_len[rows] + 1, 0)[:, None]  # tokens known
    known, here = text[rows], torch.arange(length, device=rows.device)
    same, num_same = here < num - 1, torch.zeros_like(known)
    for back in range(longest):
        last = known.gather(1, (num - 1 - back).clamp(min=0))
        there = torch.roll(known, back, 1)
        same = same & (there == last) & (here >= back)
        num_same += same
    score = torch.where(num_same >= shortest, num_same.long() * length + here, -1)
    best = score.max(1, keepdim=True).values
    found, end = best >= 0, best % length
    ahead = torch.arange(num_drafts, device=rows.device)
    source = end + 1 + ahead % (num - 1 - end).clamp(min=1)
    drafts = known.gather(1, source.clamp(0, length - 1)).long()
    inside = found & (num + ahead < columns.max_len[rows][:, None])
    columns.drafts[rows, :num_drafts] = torch.where(inside, drafts, -1)


@triton.jit
def _ngram_drafts_kernel(
    rows, position, valid, drawn, active, seq_len, max_len, text, drafts,
    stride_text, stride_drafts,
    LENGTH: tl.constexpr, WIDTH: tl.constexpr, WIDTH_2: tl.constexpr, NUM: tl.constexpr,
    NUM_2: tl.constexpr, SHORTEST: tl.constexpr, LONGEST: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (n)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    i = tl.program_id(0)
    row, was_live = tl.load(rows + i), tl.load(valid + i) != 0
    line, place = text + row * stride_text, tl.arange(0, WIDTH_2)
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
        ahead = tl.arange(0, NUM_2)
        proposes = ahead < NUM
        inside = proposes & (best >= 0) & (num + ahead < tl.load(max_len + row))
        source = end + 1 + ahead % tl.maximum(num - 1 - end, 1)
        draft = tl.load(line + source, mask=inside, other=-1)
        tl.store(drafts + row * stride_drafts + ahead, draft.to(tl.int64), mask=proposes)


def ngram_drafts_triton(
    rows: Tensor, position: Tensor, valid: Tensor, drawn: Tensor, columns: RowColumns, text: Tensor,
    num_drafts: int, shortest: int, longest: int,
) -> None:  # fmt: skip
    """See ngram_drafts_ref; one launch."""
    width = len(position) // len(rows)
    _ngram_drafts_kernel[(len(rows),)](
        rows, position, valid.view(torch.uint8), drawn, columns.active.view(torch.uint8),
        columns.seq_len, columns.max_len, text, columns.drafts,
        text.stride(0), columns.drafts.stride(0),
        **overlap(
            rows, LENGTH=text.shape[1], WIDTH=width, WIDTH_2=power_of_two(width), NUM=num_drafts,
            NUM_2=power_of_two(max(num_drafts, 1)), SHORTEST=shortest, LONGEST=longest, BLOCK=BLOCK,
            num_warps=WARPS,
        ),
    )  # fmt: skip


def ngram_drafts(
    rows: Tensor, position: Tensor, valid: Tensor, drawn: Tensor, columns: RowColumns, text: Tensor,
    num_drafts: int, shortest: int, longest: int, max_seq_len_ub: int,
) -> None:  # fmt: skip
    """ngram_drafts_ref, on CUDA by one kernel.

    max_seq_len_ub: see SampledRows. The kernel knows each length; its twin would read all columns.
    """
    assert all(each.is_contiguous() for each in (rows, position, valid, drawn))
    op = ngram_drafts_triton
    if not rows.is_cuda:
        op, text = ngram_drafts_ref, text[:, : max_seq_len_ub + 1]
    op(rows, position, valid, drawn, columns, text, num_drafts, shortest, longest)
