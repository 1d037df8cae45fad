"""Prompt lookup: what followed the last tokens of a text where they stood in it before.

The longest run of last tokens counts that is found again (at most `longest` of them, at least
`shortest`), and of several places the last one. Where the text ends before all drafts are found,
what follows is taken for periodic. After Saxena, "Prompt lookup decoding" (2023).
"""

from __future__ import annotations

import torch
from torch import Tensor

from worker.ops.op import op
from worker.step.rows import RowColumns


def ngram_drafts_ref(
    rows: Tensor, position: Tensor, valid: Tensor, drawn: Tensor, columns: RowColumns, text: Tensor,
    num_drafts: int, shortest: int, longest: int, max_seq_len_ub: int,
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
        max_seq_len_ub: see SampledRows; the kernel knows each length.
    """
    text = text[:, : max_seq_len_ub + 1]
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


ngram_drafts = op(ngram_drafts_ref)
