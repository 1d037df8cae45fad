"""Chain drafters: a model of one layer that proposes a token at a time, fed with the target's
features (EAGLE, Li et al., arXiv:2401.15077; EAGLE-3, arXiv:2503.01840; multi-token prediction
layers, DeepSeek-V3, arXiv:2412.19437).

The drafter's row in slot t is made of token t and the target's feature of token t - 1. Keys and
values of its only layer depend on that input alone, so text is taken in without attention. Slot 0
has no row. Two regions of the KV layout hold all state:

    draft   keys and values of these rows
    tail    for each page, the feature of the last token whose KV the target has stored there: the
            row of the next token is made of it, on whichever worker
"""

import torch
from torch import Tensor

from worker.attention.base import AttentionBackend
from worker.cache.pool import KVPool
from worker.drafts.base import Drafter
from worker.drafts.chain_model import ChainDrafter
from worker.drafts.draft_draws import draw_drafts
from worker.drafts.draft_rows import DraftSteps, draft_rows
from worker.drafts.drafter import Features, stored_tokens
from worker.forward.batch import Batch
from worker.forward.context import forward_context
from worker.step.rows import SampledRows
from worker.step.state import StepState


class Chain(Drafter):
    """Drafter by a chain model; `attention` reads the region "draft" from key 1 on."""

    def __init__(
        self,
        features: Features[ChainDrafter],
        attention: AttentionBackend,
        pool: KVPool,
        state: StepState,
    ) -> None:
        self._features, self._attention, self._state = features, attention, state
        self._model = features.model
        self._page_size = pool.layout.page_size
        self._tails = pool.page_rows("tail")
        self._query_start = torch.arange(len(state.active), dtype=torch.int32, device=state.device)

    def observe(self, batch: Batch, hidden: Tensor) -> None:
        draft = batch.draft
        assert draft is not None
        features = self._features.of(hidden, batch.num_tokens)
        inside = features.index_select(0, draft.source.clamp(min=0))
        first = self._tails.index_select(0, (-1 - draft.source).clamp(min=0))
        before = torch.where((draft.source >= 0)[:, None], inside, first)
        self._store(batch.input_ids, before, batch.positions, draft.slots)
        self._tails.index_copy_(0, draft.tail_pages, features)

    def seed(self, rows: Tensor) -> None:
        """Make the row of the last token.

        The feature of the token before it is the tail of that earlier token's page.
        """
        columns = self._state.columns
        active = columns.active.index_select(0, rows)
        position = columns.seq_len.index_select(0, rows)
        one = torch.stack((columns.last_token.index_select(0, rows), active.long()), 1)
        drawn = torch.nn.functional.pad(one, (0, 1))  # as if each row had just drawn it
        steps = draft_rows(SampledRows(rows, position, active), drawn, columns, self._page_size)
        before = self._tails.index_select(0, steps.tail_pages)
        self._store(steps.tokens, before, steps.positions, steps.slots)

    def advance(self, sampled: SampledRows, hidden: Tensor, drawn: Tensor, *, greedy: bool) -> None:
        steps = draft_rows(sampled, drawn, self._state.columns, self._page_size)
        features = self._features.of(hidden, len(steps.tokens))
        self._store(steps.tokens, features, steps.positions, steps.slots)
        self._tails.index_copy_(0, steps.tail_pages, features)
        if sampled.width > 1:
            self._propose(sampled, steps, features, greedy=greedy)

    def _propose(
        self, sampled: SampledRows, steps: DraftSteps, features: Tensor, *, greedy: bool
    ) -> None:
        # The row in slot L' is stored already. The first pass stores the same again, and attends.
        token = steps.tokens.index_select(0, steps.last)
        feature = features.index_select(0, steps.last)
        state, model, columns = self._state, self._model, self._state.columns
        n, num_drafts = len(sampled.rows), sampled.width - 1
        bound = sampled.max_seq_len_ub + num_drafts
        table = columns.page_table[:, : -(-bound // self._page_size)].index_select(0, sampled.rows)
        seed = None if greedy else state.ints.seed
        for k in range(num_drafts):
            position, slots = steps.draft_positions[k], steps.draft_slots[k]
            batch = Batch(
                input_ids=token,
                positions=position,
                slot_mapping=slots,
                query_start=self._query_start[: n + 1],
                seq_lens=steps.draft_lens[k],
                page_table=table,
                num_reqs=n,
                num_tokens=n,
                max_query_len=1,
                max_seq_len_ub=bound,
            )
            with forward_context(batch, self._attention, self._attention.plan(batch)):
                feature, output = model(token, feature, position)
            token = draw_drafts(
                model.head.logits(output, whole=False), sampled.rows, position, slots,
                seed, state.floats.temperature, model.id_map, columns.drafts[:, k : k + 1],
                model.head.part,
            )  # fmt: skip

    def _store(self, tokens: Tensor, before: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Store rows of (token, feature of the one before it); nothing attends."""
        batch = stored_tokens(self._state, tokens, positions, slots)
        with forward_context(batch, self._attention, None):
            self._model.store(tokens, before, positions)
