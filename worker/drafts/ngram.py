"""Prompt lookup: drafts are what followed the last tokens where the text had them before.

It needs no weights and keeps nothing in pages: the text of each row is on the device
(`StepState.text`), from the row's start and from what its steps draw.
"""

from __future__ import annotations

import torch
from torch import Tensor

from worker.drafts.base import Drafter
from worker.drafts.ngram_drafts import ngram_drafts
from worker.forward.batch import Batch
from worker.step.state import SampledRows, StepState


class Ngram(Drafter):
    """Drafter by lookup.

    Args:
        state: of all rows; keeps their text.
        shortest, longest: tokens of the run that is looked for.
    """

    def __init__(self, state: StepState, shortest: int, longest: int) -> None:
        assert state.text is not None
        self._columns, self._text = state.columns, state.text
        self._shortest, self._longest = shortest, longest

    def observe(self, batch: Batch, hidden: Tensor) -> None:
        """Rows start with their text."""

    def seed(self, rows: Tensor) -> None:
        """Append the last token, which may have been drawn behind a chunk."""
        columns = self._columns
        active = columns.active.index_select(0, rows)
        position = columns.seq_len.index_select(0, rows)
        token = columns.last_token.index_select(0, rows).to(torch.int32)
        at = torch.where(active, rows, 0), torch.where(active, position, 0)
        self._text.index_put_(at, token)

    def advance(self, sampled: SampledRows, hidden: Tensor, drawn: Tensor, *, greedy: bool) -> None:
        """Append what is kept, then look up."""
        ngram_drafts(
            sampled.rows, sampled.position, sampled.valid, drawn, self._columns, self._text,
            sampled.width - 1, self._shortest, self._longest, sampled.max_seq_len_ub,
        )  # fmt: skip
