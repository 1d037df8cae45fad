"""Where a drafter's rows of a decode step go: those it keeps, and those it proposes with.

A row that had KV of L tokens and keeps `a` draws has KV of L' = L + a now. A block drafter keeps
the first `a` tokens of the window, at positions L to L' - 1 (`kept_rows`); KV behind them belongs
to refused drafts. A chain drafter's row of slot t is made of token t and the feature of token
t - 1 (`draft_rows`):

    slot        L + 1     ...     L' - 1         L'              L' + 1      L' + 2   ...
    token       draw 0    ...     draw a - 2     draw a - 1      draft 1     draft 2
    feature     of L      ...     of L' - 2      of L' - 1       the drafter's own
                kept: features of the model      proposes 1      proposes 2  proposes 3
"""

from typing import NamedTuple

import torch
from torch import Tensor

from worker.ops.op import op
from worker.step.rows import RowColumns, SampledRows


class DraftSteps(NamedTuple):
    """The draft rows of a decode step of n rows and windows of `width`; slot 0 is the sink."""

    # [n * width] i64 each, of what was drawn: the token, its position (0 if it does not count), its
    # slot, and the page whose tail becomes the feature of the token before it (0: of none).
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    tail_pages: Tensor
    last: Tensor  # [n] i64: index of each row's last draw that counts
    # [width - 1, n], of the rows that propose: positions and slots i64, KV lengths with them i32;
    # slot 0: nothing is proposed
    draft_positions: Tensor
    draft_slots: Tensor
    draft_lens: Tensor


def draft_rows_ref(
    sampled: SampledRows, drawn: Tensor, columns: RowColumns, page_size: int
) -> DraftSteps:
    """Place the draft rows of a step; sampled: what accept_rows took; drawn: what it returned.

    Each row that was live when the step began keeps its draft rows, even if the step ended it: its
    pages may serve others. Nothing is proposed for rows that ended, nor for positions at or beyond
    a row's maximum; such draft rows go to the sink. Position 0 has no draft row.
    """
    rows, width, n = sampled.rows, sampled.width, len(sampled.rows)
    place = torch.arange(width, device=rows.device)
    num = drawn[:, width : width + 1]
    at, longest = sampled.position.view(n, width), columns.max_len[rows][:, None]
    kept = sampled.valid[:, None] & (place < num) & (at > 0)
    table = columns.page_table[rows].to(torch.int64)

    def page_of(positions: Tensor) -> Tensor:
        return table.gather(1, (positions // page_size).clamp(0, table.shape[1] - 1))

    stored = kept & (at < longest)
    slots = page_of(at) * page_size + at % page_size
    ends = (at % page_size == 0) | (place == num - 1)
    active = columns.active[rows][:, None]
    first = torch.where(active, columns.seq_len[rows][:, None], 0)
    ahead = first + torch.arange(width - 1, device=rows.device)
    inside = active & (ahead + 1 < longest)
    draft_slots = page_of(ahead) * page_size + ahead % page_size
    last = torch.arange(0, n * width, width, device=rows.device) + (num[:, 0] - 1).clamp(min=0)
    return DraftSteps(
        drawn[:, :width].flatten().contiguous(),
        torch.where(stored, at, 0).view(-1),
        torch.where(stored, slots, 0).view(-1),
        torch.where(kept & ends, page_of(at - 1), 0).view(-1),
        last,
        torch.where(inside, ahead, 0).T.contiguous(),
        torch.where(inside, draft_slots, 0).T.contiguous(),
        torch.where(inside, ahead + 1, 1).T.to(torch.int32).contiguous(),
    )


draft_rows = op(draft_rows_ref)


def kept_rows_ref(
    sampled: SampledRows, drawn: Tensor, columns: RowColumns, page_size: int
) -> tuple[Tensor, Tensor]:
    """Position and slot of each token of a step's windows, [n * width] i64 both; 0 if not kept.

    Arguments, and rows that the step ended, as in draft_rows_ref.
    """
    rows, width = sampled.rows, sampled.width
    at = sampled.position.view(-1, width) - 1
    place = torch.arange(width, device=rows.device)
    kept = sampled.valid[:, None] & (place < drawn[:, width : width + 1])
    table = columns.page_table[rows].to(torch.int64)
    page = table.gather(1, (at // page_size).clamp(0, table.shape[1] - 1))
    slots = page * page_size + at % page_size
    return torch.where(kept, at, 0).view(-1), torch.where(kept, slots, 0).view(-1)


kept_rows = op(kept_rows_ref)
