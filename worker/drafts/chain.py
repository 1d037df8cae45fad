"""Chain drafters: a model of one layer that proposes a token at a time, fed with the target's
features (EAGLE, Li et al., arXiv:2401.15077; EAGLE-3, arXiv:2503.01840; multi-token prediction
layers, DeepSeek-V3, arXiv:2412.19437).

The drafter's row in slot t is made of token t and the target's feature of token t - 1. Keys and
values of its only layer depend on that input alone, so text is taken in without attention. Slot 0
has no row. Two regions of the KV layout hold all state:

    draft   keys and values of these rows
    tail    for each page the feature of its last token with KV in the target's region: what the
            first row behind the page is made of, whoever computes it
"""

from __future__ import annotations

import torch
from torch import Tensor

from worker.attention.base import AttentionBackend
from worker.cache.pool import KVPool
from worker.drafts.chain_model import ChainDrafter
from worker.drafts.draft_draws import draw_drafts
from worker.drafts.draft_rows import draft_rows
from worker.forward.batch import Batch
from worker.forward.context import forward_context
from worker.model.taps import Taps
from worker.step.state import SampledRows, StepState


class Chain:
    """Drafter by a chain model.

    Args:
        model: on the device of all else.
        taps: what the target leaves for it; None: it is fed with the target's output.
        attention: over the region "draft", from key 1 on.
        pool: has the regions "draft" and "tail".
        state: of all rows.
        poison: make taps NaN once a step has read them, so that one that is not written is noticed.
    """

    def __init__(
        self,
        model: ChainDrafter,
        taps: Taps | None,
        attention: AttentionBackend,
        pool: KVPool,
        state: StepState,
        *,
        poison: bool = False,
    ) -> None:
        self._model, self._taps, self._attention, self._state = model, taps, attention, state
        self._poison = poison
        self._page_size = pool.layout.page_size
        self._tails = pool.page_rows("tail")
        self._query_start = torch.arange(len(state.active), dtype=torch.int32, device=state.device)

    def observe(self, batch: Batch, hidden: Tensor) -> None:
        draft = batch.draft
        assert draft is not None
        features = self._features(hidden, batch.num_tokens)
        inside = features.index_select(0, draft.source.clamp(min=0))
        first = self._tails.index_select(0, (-1 - draft.source).clamp(min=0))
        before = torch.where((draft.source >= 0)[:, None], inside, first)
        self._store(batch.input_ids, before, batch.positions, draft.slots)
        self._tails.index_copy_(0, draft.tail_pages, features)

    def seed(self, rows: Tensor) -> None:
        """See Drafter.seed: the row of the last token, whose feature is in the tail before it."""
        columns = self._state.columns
        active = columns.active.index_select(0, rows)
        position = columns.seq_len.index_select(0, rows)
        one = torch.stack((columns.last_token.index_select(0, rows), active.long()), 1)
        drawn = torch.nn.functional.pad(one, (0, 1))  # as if each row had just drawn it
        steps = draft_rows(rows, position, active, drawn, columns, self._page_size, 0)
        before = self._tails.index_select(0, steps.tail_pages)
        self._store(steps.tokens, before, steps.positions, steps.slots)

    def advance(self, sampled: SampledRows, hidden: Tensor, drawn: Tensor, *, greedy: bool) -> None:
        rows, columns, num_drafts = sampled.rows, self._state.columns, sampled.width - 1
        steps = draft_rows(
            rows, sampled.position, sampled.valid, drawn, columns, self._page_size, num_drafts
        )
        features = self._features(hidden, len(steps.tokens))
        self._store(steps.tokens, features, steps.positions, steps.slots)
        self._tails.index_copy_(0, steps.tail_pages, features)
        if not num_drafts:
            return
        # The row in slot L' is computed again, as it attends now; it stays what it was.
        token = steps.tokens.index_select(0, steps.last)
        feature = features.index_select(0, steps.last)
        bound = sampled.max_seq_len_ub + num_drafts
        table = columns.page_table[:, : -(-bound // self._page_size)].index_select(0, rows)
        state, model = self._state, self._model
        seed = None if greedy else state.ints.seed
        for k in range(num_drafts):
            position, slots = steps.draft_positions[k], steps.draft_slots[k]
            batch = self._batch(token, position, slots, steps.draft_lens[k], table, bound)
            with forward_context(batch, self._attention, self._attention.plan(batch)):
                feature, output = model(token, feature, position)
            token = draw_drafts(
                model.logits(output, whole=False), rows, position, slots,
                seed, state.floats.temperature, model.id_map, columns.drafts[:, k : k + 1],
                model.head.part,
            )  # fmt: skip

    def _features(self, hidden: Tensor, num_tokens: int) -> Tensor:
        if self._taps is None:
            return self._model.features(hidden)
        rows = self._taps.rows(num_tokens)
        features = self._model.features(rows)
        if self._poison:
            rows.fill_(float("nan"))
        return features

    def _store(self, tokens: Tensor, before: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Store rows of (token, feature of the one before it); nothing attends."""
        no_lens, no_table = self._query_start[:0], self._state.page_table[:0]
        batch = self._batch(tokens, positions, slots, no_lens, no_table, 0)
        with forward_context(batch, self._attention, None):
            self._model.store(tokens, before, positions)

    def _batch(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        seq_lens: Tensor,
        table: Tensor,
        bound: int,
    ) -> Batch:
        """One token of each request; without requests, tokens that nothing attends for."""
        n = len(seq_lens)
        return Batch(
            input_ids=tokens,
            positions=positions,
            slot_mapping=slots,
            query_start=self._query_start[: n + 1],
            seq_lens=seq_lens,
            page_table=table,
            num_reqs=n,
            num_tokens=len(tokens),
            max_query_len=1,
            max_seq_len_ub=bound,
        )
