"""Draw drafts: with the noise that the target will draw with, at the target's token ids.

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
