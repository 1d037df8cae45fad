"""Prompt lookup: drafts are what followed the last tokens where the text had them before.

It needs no weights and keeps nothing in pages: the text of each row is on the device
(`StepState.text`), from the row's start and from what its steps draw.

The longest run of last tokens that occurs earlier in the text counts, at its latest place. Where
the text ends before there are enough drafts, it is continued periodically. After Saxena, "Prompt
lookup decoding" (2023).
"""

import torch
from torch import Tensor

from worker.drafts.base import Drafter
from worker.forward.batch import Batch
from worker.ops.op import op
from worker.step.rows import RowColumns, SampledRows
from worker.step.state import StepState


def ngram_drafts_ref(
    sampled: SampledRows, drawn: Tensor, columns: RowColumns, text: Tensor, lengths: range
) -> None:
    """Append what a step kept to the texts of its rows, then fill columns.drafts[:, : width - 1].

    -1 stands for no draft: nothing is found again, the row has ended, or its maximum is reached.
    sampled: as accept_rows had them, drawn what it returned; text: [number of rows, length] i32,
    the tokens of each row by position, the last included; lengths: of a run in tokens, from 1 on.
    """
    text = text[:, : sampled.max_seq_len_ub + 1]  # the kernel knows each length
    rows, width, length = sampled.rows, sampled.width, text.shape[1]
    at, place = sampled.position.view(-1, width), torch.arange(width, device=rows.device)
    kept = sampled.valid[:, None] & (place < drawn[:, width : width + 1]) & (at < length)
    line = torch.where(kept, rows[:, None], 0)
    text[line, torch.where(kept, at, 0)] = drawn[:, :width].to(torch.int32)
    if width == 1:
        return
    num = torch.where(columns.active[rows], columns.seq_len[rows] + 1, 0)[:, None]  # tokens known
    known, here = text[rows], torch.arange(length, device=rows.device)
    same, num_same = here < num - 1, torch.zeros_like(known)
    for back in range(lengths[-1]):
        last = known.gather(1, (num - 1 - back).clamp(min=0))
        there = torch.roll(known, back, 1)
        same = same & (there == last) & (here >= back)
        num_same += same
    score = torch.where(num_same >= lengths[0], num_same.long() * length + here, -1)
    best = score.max(1, keepdim=True).values
    found, end = best >= 0, best % length
    ahead = torch.arange(width - 1, device=rows.device)
    source = end + 1 + ahead % (num - 1 - end).clamp(min=1)
    drafts = known.gather(1, source.clamp(0, length - 1)).long()
    inside = found & (num + ahead < columns.max_len[rows][:, None])
    columns.drafts[rows, : width - 1] = torch.where(inside, drafts, -1)


ngram_drafts = op(ngram_drafts_ref)


class Ngram(Drafter):
    """Drafter by lookup of runs of `shortest` to `longest` tokens in the text of each row."""

    def __init__(self, state: StepState, shortest: int, longest: int) -> None:
        assert state.text is not None
        self._columns, self._text = state.columns, state.text
        self._lengths = range(shortest, longest + 1)

    def observe(self, batch: Batch, hidden: Tensor) -> None:
        """Do nothing: rows have text."""

    def seed(self, rows: Tensor) -> None:
        """Append the last token, which may have been drawn behind a chunk."""
        columns = self._columns
        active = columns.active.index_select(0, rows)
        position = columns.seq_len.index_select(0, rows)
        token = columns.last_token.index_select(0, rows).to(torch.int32)
        at = torch.where(active, rows, 0), torch.where(active, position, 0)
        self._text.index_put_(at, token)

    def advance(self, sampled: SampledRows, hidden: Tensor, drawn: Tensor, *, greedy: bool) -> None:
        ngram_drafts(sampled, drawn, self._columns, self._text, self._lengths)
