"""Where a drafter's rows of a decode step go, kept ones and proposing ones; how drafts are drawn.

A row that had KV of L tokens and keeps `a` draws has KV of L' = L + a now. A block drafter keeps
the first `a` tokens of the window, at positions L to L' - 1 (`kept_rows`); KV behind them belongs
to refused drafts. A chain drafter's row of slot t is made of token t and the feature of token
t - 1 (`draft_rows`):

    slot        L + 1     ...     L' - 1         L'              L' + 1      L' + 2   ...
    token       draw 0    ...     draw a - 2     draw a - 1      draft 1     draft 2
    feature     of L      ...     of L' - 2      of L' - 1       the drafter's own
                kept: features of the model      proposes 1      proposes 2  proposes 3

The target draws argmax(logits / T + noise(seed, position, id)). A drafter that perturbs its own
logits with the same noise proposes the same token whenever the two distributions are close, for
seeded requests as for greedy ones. Filters, penalties and masks are left out. So fewer drafts may
be accepted, and the answers stay the same.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from worker.ops.best_pairs import VocabPart, best_ids_ref, best_pairs_ref
from worker.ops.op import op
from worker.ops.philox import gumbel_ref
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


class DraftDraws(NamedTuple):
    """How the next m drafts of n rows are drawn."""

    rows: Tensor  # [n] i64, of the step state
    position: Tensor  # [n * m] i64, of the token before each draft
    slots: Tensor  # [n * m] i64; 0: there is no draft
    seed: Tensor | None  # [num_rows + 1] i64, a column of the step state; None: all are greedy
    temperature: Tensor  # [num_rows + 1] f32, another; 0 = greedy
    ids: Tensor | None  # [num_ids] i64, ascending: the target's id of each draft id; None: equal
    # Draft ids of the logits' columns, if ranks divide them: then all ranks call draw_drafts, and
    # draw the same.
    part: VocabPart | None = None

    def ids_of(self, logits: Tensor) -> Tensor | None:
        """The target's id of each column; None: these are the drafter's own, from `part` on."""
        if self.ids is None or self.part is None:
            return self.ids
        return self.ids[self.part.first : self.part.first + logits.shape[1]]


def draw_drafts_ref(logits: Tensor, draws: DraftDraws, drafts: Tensor) -> Tensor:
    """Draw the next m drafts of each row into `drafts`; returns [n * m] i64, 0 for no draft.

    logits: [n * m, ids of `part`], of the drafter; lines of one row are neighbours.
    drafts: [num_rows + 1, m] i64, strided: written at `rows`, -1 where there is no draft.
    """
    rows, position, slots, seed, temperature, _, part = draws
    owners, ids = rows.repeat_interleave(drafts.shape[1]), draws.ids_of(logits)
    if ids is None:
        first = 0 if part is None else part.first
        ids = first + torch.arange(logits.shape[1], device=logits.device)
    x = logits.float()
    if seed is not None and len(ids):
        scale, num_ids = temperature[owners][:, None], int(ids[-1]) + 1
        noise = gumbel_ref(seed[owners], position + 1, num_ids)[:, ids]
        x = torch.where(scale == 0, x, x / torch.where(scale == 0, 1.0, scale) + noise)
    found = ids[x.argmax(-1)] if part is None else best_ids_ref(part.gather(best_pairs_ref(x, ids)))
    drafts[rows] = torch.where(slots > 0, found, -1).view(len(rows), -1)
    return torch.where(slots > 0, found, 0)


draw_drafts = op(draw_drafts_ref)
