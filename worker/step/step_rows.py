"""What the rows of a decode step read of the state: a verify window of W tokens each.

Row j of a window is the token at position L + j, where L is the request's KV length: the last drawn
token for j = 0, then its drafts. W = 1 is plain decode. `accept_rows` is the step's other end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from worker.ops.op import op


@dataclass(slots=True, frozen=True)
class RowColumns:
    """Columns of the step state, [num_rows + 1, ...], contiguous. Row 0 is the sink."""

    active: Tensor  # bool
    seq_len: Tensor  # i64
    last_token: Tensor  # i64
    max_len: Tensor  # i64
    page_table: Tensor  # i32 [num_rows + 1, max_pages]
    # i64 [num_rows + 1, widest window - 1]: proposals for the positions behind last_token's, of the
    # next step; -1 = none, which no draw equals
    drafts: Tensor

    def of_rows(self) -> tuple[Tensor, ...]:
        """What steps change."""
        return self.active, self.seq_len, self.last_token, self.drafts


@dataclass(slots=True, frozen=True)
class StepRows:
    """What a decode step reads of its n rows; an inactive row reads as row 0, the sink."""

    live: Tensor  # [n] i64
    valid: Tensor  # [n] bool; active
    positions: Tensor  # [n * width] i64; of the input tokens
    next_positions: Tensor  # [n * width] i64; of the tokens to be drawn
    input_ids: Tensor  # [n * width] i64
    seq_lens: Tensor  # [n] i32; KV length with the whole window
    slots: Tensor  # [n * width] i64; where the tokens' KV goes
    table: Tensor  # [n, num_pages] i32


def read_rows_ref(
    rows: Tensor, columns: RowColumns, page_size: int, num_pages: int, width: int = 1
) -> StepRows:
    """Read windows of `width` tokens of `rows` [n] i64, with at most `num_pages` pages of each.

    Where there is no draft the window has token 0. A window may pass its row's max_len: the slots
    are the row's own, and positions stay below it, as the model has no others. Inactive rows write
    to the sink.
    """
    live = rows * columns.active[rows]
    positions = columns.seq_len[live][:, None] + torch.arange(width, device=rows.device)
    table = columns.page_table[live, :num_pages]
    page = table.gather(1, (positions // page_size).clamp(max=num_pages - 1)).to(torch.int64)
    is_live, last = (live > 0)[:, None], columns.max_len[live][:, None] - 1
    drafts = columns.drafts[live, : width - 1].clamp(min=0)
    return StepRows(
        live,
        columns.active[live],
        torch.where(is_live, torch.minimum(positions, last), positions).view(-1),
        positions.view(-1) + 1,
        torch.cat((columns.last_token[live][:, None], drafts), 1).view(-1),
        (positions[:, -1] + 1).to(torch.int32),
        torch.where(is_live, page * page_size + positions % page_size, 0).view(-1),
        table,
    )


read_rows = op(read_rows_ref)
