"""Which tokens of a step's windows the rows keep: those whose KV is in the text from now on.

A row that had KV of L tokens and keeps `a` draws has KV of the first `a` tokens of its window now,
at positions L to L + a - 1. KV behind them in the window belongs to refused drafts.
"""

import torch
from torch import Tensor

from worker.ops.op import op
from worker.step.rows import RowColumns, SampledRows


def kept_rows_ref(
    sampled: SampledRows, drawn: Tensor, columns: RowColumns, page_size: int
) -> tuple[Tensor, Tensor]:
    """Place the tokens of a step's windows; those that are not kept go to the sink.

    Rows that were live when the step began keep their accepted tokens, even if the step ended them:
    their pages may serve others. sampled: what accept_rows took; drawn: what it returned.

    Returns position and slot of each token, [n * width] i64 both, 0 for those not kept.
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
