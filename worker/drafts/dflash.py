"""DFlash drafters: a block of tokens is proposed in one pass (arXiv:2602.06036).

Slot t of the drafter's region has keys and values of all its layers, made of the target's feature
of token t alone: text is taken in by one product of features, without attention. A block is the
last drawn token, at position L, and mask tokens behind it. It attends to slots 0 to L - 1 and to
itself. Its own keys and values lie in the slots from L on until the next step's replace them. No
page that has such slots is shared.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from worker.attention.base import AttentionBackend
from worker.cache.pool import KVPool
from worker.drafts.base import Drafter
from worker.drafts.dflash_model import DFlashDrafter
from worker.drafts.draft_draws import draw_drafts
from worker.drafts.draft_rows import kept_rows
from worker.drafts.drafter import Features, stored_tokens
from worker.forward.batch import Batch
from worker.forward.context import forward_context
from worker.ops.mask import KeyMask
from worker.step.rows import SampledRows, read_rows
from worker.step.state import StepState


class BlockLimits(NamedTuple):
    """How far blocks go."""

    min_block: int  # tokens of one at least, its first included; 0: as many as a step verifies
    max_len: int  # tokens of a request at most


class DFlash(Drafter):
    """Drafter by blocks; `attentions` read the region "draft", by the mask of layers."""

    def __init__(
        self,
        features: Features[DFlashDrafter],
        attentions: Mapping[KeyMask, AttentionBackend],
        pool: KVPool,
        state: StepState,
        limits: BlockLimits,
    ) -> None:
        self._features, self._attentions, self._state = features, attentions, state
        self._model, self._min_block = features.model, limits.min_block
        self._page_size = pool.layout.page_size
        num_rows, max_width = len(state.active), state.columns.drafts.shape[1] + 1
        longest = max(limits.min_block, max_width)
        # A block is read as a window is, with masks for drafts. It may pass the end of its text.
        mask = self._model.spec.mask_token_id or 0
        self._blocks = replace(
            state.columns,
            max_len=torch.full_like(state.ints.max_len, limits.max_len + longest),
            drafts=torch.full((longest - 1,), mask, device=state.device).expand(num_rows, -1),
        )
        every = torch.arange(num_rows, dtype=torch.int32, device=state.device)
        self._starts = [every * block for block in range(longest + 1)]  # of blocks, by their length

    def observe(self, batch: Batch, hidden: Tensor) -> None:
        features = self._features.of(hidden, batch.num_tokens)
        self._store(features, batch.positions, batch.slot_mapping)

    def seed(self, rows: Tensor) -> None:
        """All that a block needs is in the row's pages."""

    def advance(self, sampled: SampledRows, hidden: Tensor, drawn: Tensor, *, greedy: bool) -> None:
        columns, width = self._state.columns, sampled.width
        positions, slots = kept_rows(sampled, drawn, columns, self._page_size)
        self._store(self._features.of(hidden, len(positions)), positions, slots)
        if width > 1:
            self._propose(sampled, max(width, self._min_block), greedy=greedy)

    def _propose(self, sampled: SampledRows, block: int, *, greedy: bool) -> None:
        n, num_drafts = len(sampled.rows), sampled.width - 1
        bound = sampled.max_seq_len_ub + block
        num_pages = min(-(-bound // self._page_size), self._blocks.page_table.shape[1])
        rows = read_rows(sampled.rows, self._blocks, self._page_size, num_pages, block)
        batch = rows.batch(self._starts[block], block, bound)
        model, residual = self._model, None
        part = model.embed(batch.input_ids, block)
        plans = {mask: attention.plan(batch) for mask, attention in self._attentions.items()}
        for mask, numbers in model.runs():
            with forward_context(batch, self._attentions[mask], plans[mask]):
                part, residual = model.run(part, residual, batch.positions, numbers)
        assert residual is not None
        state = self._state
        before, own = rows.positions.view(n, block), rows.slots.view(n, block)
        draw_drafts(
            model.logits(part, residual, block, num_drafts, whole=False),
            rows.live,
            # Of blocks of two tokens flatten() is a view with a stride.
            before[:, :num_drafts].flatten().contiguous(),
            own[:, 1 : 1 + num_drafts].flatten().contiguous(),
            None if greedy else state.ints.seed,
            state.floats.temperature,
            model.id_map,
            state.columns.drafts[:, :num_drafts],
            model.head.part,
        )

    def _store(self, features: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Store tokens of text; nothing attends. Their ids are not read."""
        batch = stored_tokens(self._state, positions, positions, slots)
        attention = next(iter(self._attentions.values()))  # all have the same slots
        with forward_context(batch, attention, None):
            self._model.store(features, positions)
