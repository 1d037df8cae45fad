"""Windows of a decode step: read from the step state, and accepted into it.

Token j of a verify window of W tokens is at position L + j, where L is the request's KV length.
Token 0 was drawn last, the others are drafts. W = 1 is plain decode.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from worker.forward.batch import Batch, HostLengths
from worker.ops.op import op


@dataclass(slots=True, frozen=True)
class RowColumns:
    """Columns of the step state, [num_rows + 1, ...], contiguous. Row 0 is the sink."""

    active: Tensor  # bool
    seq_len: Tensor  # i64
    last_token: Tensor  # i64
    max_len: Tensor  # i64
    folded: Tensor  # i64; tokens of the row's state, where layers are recurrent
    page_table: Tensor  # i32 [num_rows + 1, max_pages]
    # i64 [num_rows + 1, widest window - 1]: drafts for the positions behind last_token's, which the
    # next step verifies. -1: there is none; no draw equals it.
    drafts: Tensor


@dataclass(slots=True, frozen=True)
class SampledRows:
    """The rows that a sampling tail draws for; index i belongs to the i-th hidden state."""

    rows: Tensor  # [n] i64; 0 = padding
    # [n * width] i64; index in prompt + output of the tokens to be drawn, row by row
    position: Tensor
    valid: Tensor  # [n] bool; False = padding
    width: int = 1  # see Plan.width
    max_seq_len_ub: int = 0  # of a decode step: host bound of KV lengths with whole windows

    def first(self, n: int) -> "SampledRows":
        """The first n of them."""
        position = self.position[: n * self.width]
        return replace(self, rows=self.rows[:n], position=position, valid=self.valid[:n])


@dataclass(slots=True, frozen=True)
class StepRows:
    """The windows of a decode step's n rows; an inactive row reads as row 0, the sink."""

    live: Tensor  # [n] i64
    valid: Tensor  # [n] bool; whether the row is active
    positions: Tensor  # [n * width] i64; of the input tokens
    next_positions: Tensor  # [n * width] i64; of the tokens to be drawn
    input_ids: Tensor  # [n * width] i64
    seq_lens: Tensor  # [n] i32; KV length with the whole window
    slots: Tensor  # [n * width] i64; where the tokens' KV goes
    table: Tensor  # [n, num_pages] i32

    def batch(
        self, query_start: Tensor, width: int, max_seq_len_ub: int, host: HostLengths | None = None
    ) -> Batch:
        """The windows as a batch; query_start: [n + 1] i32 or longer, multiples of `width`."""
        n = len(self.live)
        return Batch(
            input_ids=self.input_ids,
            positions=self.positions,
            slot_mapping=self.slots,
            query_start=query_start[: n + 1],
            seq_lens=self.seq_lens,
            page_table=self.table,
            num_reqs=n,
            num_tokens=n * width,
            max_query_len=width,
            max_seq_len_ub=max_seq_len_ub,
            host=host,
        )


def read_rows_ref(
    rows: Tensor, columns: RowColumns, page_size: int, num_pages: int, width: int = 1
) -> StepRows:
    """Read windows of `width` tokens of `rows` [n] i64, with at most `num_pages` pages a row.

    Where there is no draft the window has token 0. A window may pass its row's max_len: its slots
    are still the row's own, but its positions stay below max_len, as the model may have no others.
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
# Of a row's result, behind its draws: how many of them count, whether the row has ended.
NUM_COUNTS = 2


def accept_rows_ref(
    sampled: "SampledRows",
    draws: Tensor,
    stop_ids: Tensor,
    min_len: Tensor,
    columns: RowColumns,
    num_accepted: Tensor | None = None,
) -> Tensor:
    """Advance valid rows by the draws that they keep; a stop id or the maximum length ends a row.

    A row keeps draw 0. Draft j (from 0 on) is accepted iff all drafts before it are and draw j
    equals it; then the row keeps draw j + 1 as well. Draws behind one that ends the row do not
    count. The drafts are consumed: they are -1 afterwards.

    Args:
        sampled: n rows, distinct where valid.
        draws: [n * width] i64.
        stop_ids: [n * width, num] i64, -1 = unused. Only a window's first line is read; min_len and
        num_accepted likewise. min_len: [n * width] i64; no stop id counts below it. columns:
        changed. num_accepted: [n * width] i64; so many drafts of the window are accepted, whatever
        they are.

    Returns:
        [n, 2 * width + 1] i64: the draws; how many of them count, 0 for rows that are not valid;
        whether the row has ended; the drafts that were verified.
    """
    rows, valid, width = sampled.rows, sampled.valid, sampled.width
    n = len(rows)
    first, draws = sampled.position[::width], draws.view(n, width)
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
    # A step has folded what came before its window, and a window of one token with it.
    folded = first if width == 1 else first - 1
    columns.folded[rows] = torch.where(valid, folded, columns.folded[rows])
    columns.last_token[rows] = torch.where(valid, token, columns.last_token[rows])
    columns.active[rows] = valid & ~finished
    columns.drafts[rows] = -1
    counts = torch.stack((num * valid, finished.long()), dim=-1)
    return torch.cat((draws, counts, drafts), dim=-1)


accept_rows = op(accept_rows_ref)
Ints = tuple[Tensor, Tensor, Tensor, Tensor]  # of [num_rows] i64
Floats = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]  # of [num_rows] f32
Gathered = tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]


def gather_rows_ref(ints: Ints, floats: Floats, table: Tensor, rows: Tensor) -> Gathered:
    """Each column and `table` [num_rows, width] i64 at `rows` [n] i64; all contiguous."""
    return (
        tuple(column[rows] for column in ints),
        tuple(column[rows] for column in floats),
        table[rows],
    )


gather_rows = op(gather_rows_ref)
