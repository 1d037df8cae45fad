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
from worker.drafts.draft_steps import DraftDraws, DraftSteps, draft_rows, draw_drafts
from worker.drafts.drafter import DrafterModel, Features, Stack, stored_tokens
from worker.drafts.drafter_shape import ChainShape
from worker.forward.batch import Batch
from worker.forward.context import forward_context
from worker.model.attention import SelfAttention
from worker.model.decoder import MTP_PREFIXES, Decoder, feed_forward_of
from worker.model.experts import Experts
from worker.model.kinds import KINDS
from worker.model.latent import LatentAttention
from worker.model.layers import NormOptions, ReplicatedLinear, RMSNorm
from worker.ops.norms import pair_norm
from worker.step.rows import SampledRows
from worker.step.state import StepState

HEAD = "shared_head.head.weight"


class ChainDrafter(DrafterModel):
    """One rank of a drafter. It reads and writes layer 0 of the attention's region."""

    shape: ChainShape

    def __init__(self, shape: ChainShape, target: Decoder, max_positions: int) -> None:
        super().__init__(shape, target, max_positions)
        size, eps, placement = shape.hidden_size, shape.rms_norm_eps, self.placement
        options = NormOptions(shape.centred)

        def norm(part: str, width: int = size) -> RMSNorm | None:
            own = part in shape.names
            return RMSNorm(width, eps, placement, options) if own else None

        def linear(part: str, width: int, *, bias: bool) -> ReplicatedLinear | None:
            own = part in shape.names
            return ReplicatedLinear(width, size, placement, bias=bias) if own else None

        tapped = shape.num_features * shape.target_hidden_size
        self.fc_norm = None
        if "fc_norm" in shape.names:
            self.fc_norm = FeatureNorms(
                RMSNorm(shape.target_hidden_size, eps, placement) for _ in shape.taps
            )
        self.input_norm = norm("input_norm", tapped)
        self.fc = linear("fc", tapped, bias=False)
        self.token_norm = norm("token_norm")
        self.hidden_norm = norm("hidden_norm")
        self.projection = linear("projection", 2 * size, bias=shape.projection_bias)
        self.layer_norm = norm("layer_norm")
        kind = KINDS[shape.features.attention]
        self.attention: SelfAttention | LatentAttention = kind.build(
            shape, 0, self.rotary, self.inside("attention")
        )
        self.post_norm = RMSNorm(size, eps, placement, options)
        is_sparse = shape.experts is not None
        inside = self.inside("feed_forward")
        self.feed_forward = feed_forward_of(shape, inside, is_sparse=is_sparse)
        self.final_norm = norm("final_norm")

    def features(self, taps: Tensor) -> Tensor:
        if self.fc is None:
            return taps
        if self.fc_norm is not None:
            taps = self.fc_norm(taps)
        if self.input_norm is not None:
            taps = self.input_norm(taps)
        return self.fc(taps)

    def store(self, input_ids: Tensor, g: Tensor, positions: Tensor) -> None:
        """Put the rows' keys and values into the batch's slots, within a forward_context().

        input_ids: [n] i64; g: [n, hidden_size], of the token before each; positions: [n] i64.
        """
        layer_input, _ = self._layer_input(input_ids, g)
        self.attention.store(layer_input, positions)

    def forward(self, input_ids: Tensor, g: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Store the rows and let them attend, within a forward_context(); see `store`.

        Returns (g of these tokens as the drafter makes it, what the head takes), both
        [n, hidden_size], maybe one tensor. No argument is changed.
        """
        layer_input, residual = self._layer_input(input_ids, g)
        normed, residual = self.post_norm.reduce_add(
            self.attention(layer_input, positions), residual
        )
        part = self.feed_forward(normed)
        if self.final_norm is None:
            output = self.collective.all_reduce(part) + residual
            return output, output
        normed, output = self.final_norm.reduce_add(part, residual)
        return (normed if self.shape.norm_output else output), normed

    def _layer_input(self, input_ids: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """(what q, k and v are made of, the residual that attention is added to)."""
        whole = self.collective.size == 1  # else the embedding's rows are divided among ranks
        pair = pair_norm(
            input_ids if whole else None,
            self.embedding.weight if whole else self.embedding(input_ids),
            g,
            None if self.token_norm is None else self.token_norm.weight,
            None if self.hidden_norm is None else self.hidden_norm.weight,
            self.shape.rms_norm_eps,
            self.shape.hidden_first,
        )
        if self.projection is None:
            return pair, pair[:, g.shape[1] :] if self.shape.norm_before_residual else g
        projected = self.projection(pair)
        return projected if self.layer_norm is None else self.layer_norm(projected), projected

    def ignores(self, name: str) -> bool:
        own = self.shape.names["attention"].rpartition(".")[0]  # of its layer
        is_mtp = self.shape.form == "mtp"
        is_target_s = is_mtp and not name.startswith((*MTP_PREFIXES, f"{own}."))
        # Copies of the target's embedding and head, as DeepSeek's layers have them.
        is_target_s |= is_mtp and name in (f"{own}.embed_tokens.weight", f"{own}.{HEAD}")
        experts = self.feed_forward
        is_elsewhere = isinstance(experts, Experts) and experts.is_elsewhere(name)
        return is_target_s or is_elsewhere or super().ignores(name)

    def pad_below(self, sink: int) -> None:
        """See Decoder.pad_below."""
        if isinstance(self.feed_forward, Experts):
            self.feed_forward.sink = sink


class FeatureNorms(Stack):
    """A norm of its own for each of the hidden states that are fused."""

    def forward(self, taps: Tensor) -> Tensor:
        parts = taps.chunk(len(self), dim=-1)
        return torch.cat([norm(part) for norm, part in zip(self, parts, strict=True)], dim=-1)


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
        features.model.pad_below(self._page_size)
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
        """Store the last token's row, with the feature that its predecessor's page tail holds."""
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
            draws = DraftDraws(
                sampled.rows, position, slots, seed, state.floats.temperature, model.id_map,
                model.head.part,
            )  # fmt: skip
            logits = model.head.logits(output, whole=False, copy=model.head_copy)
            token = draw_drafts(logits, draws, columns.drafts[:, k : k + 1])

    def _store(self, tokens: Tensor, before: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Store rows of (token, feature of the one before it); nothing attends."""
        batch = stored_tokens(self._state, tokens, positions, slots)
        with forward_context(batch, self._attention, None):
            self._model.store(tokens, before, positions)
