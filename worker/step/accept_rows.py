"""What the rows of a decode step leave in the state: the accepted part of each verify window."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.ops.op import op
from worker.step.step_rows import RowColumns

# Of a row's result, behind its draws: how many of them count, whether the row has ended.
NUM_COUNTS = 2


def accept_rows_ref(
    rows: Tensor,
    position: Tensor,
    valid: Tensor,
    draws: Tensor,
    stop_ids: Tensor,
    min_len: Tensor,
    columns: RowColumns,
    num_accepted: Tensor | None = None,
) -> Tensor:
    """Advance each valid row by the draws that it keeps; a stop id or the maximum length ends it.

    A row keeps its first draw, and each further one whose window row had the right token before it:
    draft j is accepted iff draw j equals it. Draws behind the first that ends the row do not count.
    The drafts are consumed: they are -1 afterwards.

    Args:
        rows: [n] i64, distinct where valid.
        position: [n * width] i64, of each draw.
        valid: [n] bool.
        draws: [n * width] i64.
        stop_ids: [n * width, num] i64, -1 = unused. Of this and the next two, lines of one window
            are equal.
        min_len: [n * width] i64; no stop id counts below it.
        columns: changed.
        num_accepted: [n * width] i64; so many drafts of the window are accepted, whatever they are.
            None: as they are.

    Returns:
        [n, 2 * width + 1] i64: the draws; how many of them count, 0 for rows that are not valid;
        whether the row has ended; the drafts that were verified.
    """
    n = len(rows)
    width = len(draws) // n
    first, draws = position[::width], draws.view(n, width)
    stop_ids, min_len = stop_ids[::width], min_len[::width]
    drafts = columns.drafts[rows, : width - 1]
    place = torch.arange(width, device=draws.device)
    at = first[:, None] + place
    stop = (stop_ids[:, None] == draws[:, :, None]).any(-1) & (at >= min_len[:, None])
    last = stop | (at + 1 >= columns.max_len[rows][:, None])
    right = draws[:, :-1] == drafts
    if num_accepted is not None:
        right = place[: width - 1] < num_accepted[::width, None]
    goes_on = torch.ones(n, width, dtype=torch.bool, device=draws.device)
    goes_on[:, 1:] = right & ~last[:, :-1]
    num = goes_on.long().cumprod(1).sum(1)
    finished = last.gather(1, num[:, None] - 1)[:, 0]
    token = draws.gather(1, num[:, None] - 1)[:, 0]
    columns.seq_len[rows] = torch.where(valid, first + num - 1, columns.seq_len[rows])
    columns.last_token[rows] = torch.where(valid, token, columns.last_token[rows])
    columns.active[rows] = valid & ~finished
    columns.drafts[rows] = -1
    counts = torch.stack((num * valid, finished.long()), dim=-1)
    return torch.cat((draws, counts, drafts), dim=-1)


accept_rows = op(accept_rows_ref)
