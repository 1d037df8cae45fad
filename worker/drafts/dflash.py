"""DFlash drafters: a block of tokens is proposed in one pass (arXiv:2602.06036).

Slot t of the drafter's region has keys and values of all its layers, made of the target's feature
of token t alone: text is taken in by one product of features, without attention. A block is the
last drawn token, at position L, and mask tokens behind it. It attends to slots 0 to L - 1 and to
itself. Its own keys and values lie in the slots from L on until the next step's replace them. No
page that has such slots is shared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from worker.attention.base import AttentionBackend
from worker.attention.qk_rope_store import Rotation, layers_rope_store
from worker.cache.pool import KVPool
from worker.config.checkpoint.mask import KeyMask
from worker.drafts.base import Drafter
from worker.drafts.draft_steps import DraftDraws, draw_drafts, kept_rows
from worker.drafts.drafter import DrafterModel, Features, Stack, stored_tokens
from worker.drafts.drafter_shape import DFlashShape
from worker.forward.batch import Batch
from worker.forward.context import current, forward_context
from worker.model.attention import SelfAttention
from worker.model.decoder import Decoder, DecoderLayer
from worker.model.layers import ReplicatedLinear, RMSNorm
from worker.ops.product import product
from worker.step.rows import SampledRows, read_rows
from worker.step.state import StepState

Attentions: TypeAlias = Mapping[KeyMask, AttentionBackend]


@dataclass(frozen=True, slots=True)
class Stacked:
    """The key and value projections of all layers, one below the other, so that one product serves
    them all. They are copies: each layer's own QKV matrix serves the blocks."""

    weight: Tensor  # [num_layers · 2 · num_kv_heads · head_dim, hidden_size]
    bias: Tensor | None
    k_norm: Tensor | None  # [num_layers, head_dim]

    @classmethod
    def of(cls, layers: Sequence[SelfAttention]) -> "Stacked":
        """Copy those of `layers`."""
        start = layers[0].qkv.part_sizes[0]  # of keys; all layers have one shape
        biases = [layer.qkv.bias[start:] for layer in layers if layer.qkv.bias is not None]
        norms = [layer.k_norm.weight.detach() for layer in layers if layer.k_norm is not None]
        return cls(
            torch.cat([layer.qkv.weight.values[start:] for layer in layers]).detach(),
            torch.cat(biases).detach() if biases else None,
            torch.stack(norms) if norms else None,
        )


class DFlashDrafter(DrafterModel):
    """One rank of a drafter. Layer i reads and writes layer i of the region "draft"."""

    shape: DFlashShape

    def __init__(self, shape: DFlashShape, target: Decoder, max_positions: int) -> None:
        """The last block may pass `max_positions`."""
        super().__init__(shape, target, max_positions + shape.block_size)
        size, eps, placement = shape.hidden_size, shape.rms_norm_eps, self.placement
        tapped = shape.num_features * shape.target_hidden_size
        self.fc = ReplicatedLinear(tapped, size, placement, bias=False)
        self.hidden_norm = RMSNorm(size, eps, placement)
        layers = [DecoderLayer(shape, i, self.rotary, placement) for i in range(shape.num_layers)]
        self.layers = Stack(layers)
        # Layers that follow each other and see the same keys.
        runs = groupby(zip(shape.masks, layers, strict=True), key=itemgetter(0))
        self.runs = [(mask, [layer for _, layer in run]) for mask, run in runs]
        self.final_norm = RMSNorm(size, eps, placement)
        if shape.mask_token_id is None:
            self.tables["mask_embedding"] = placement.empty(size)
        self._stacked: Stacked | None = None

    def fill(self, path: Path, *, noise: int | None = None) -> None:
        """As for every drafter; then stack what makes keys and values in all layers."""
        super().fill(path, noise=noise)
        self._stacked = Stacked.of([layer.attention for _, run in self.runs for layer in run])  # type: ignore

    def features(self, taps: Tensor) -> Tensor:
        return self.hidden_norm(self.fc(taps))

    def store(self, features: Tensor, positions: Tensor) -> None:
        """Put the tokens' keys and values into the batch's slots, within a forward_context().

        features: [n, hidden_size]; positions: [n] i64.
        """
        context, stacked = current(), self._stacked
        assert stacked is not None, "fill() comes first"
        caches = [context.attention.kv(layer) for layer in range(self.shape.num_layers)]
        kv = product(features, stacked.weight, stacked.bias)
        slots, eps = context.batch.slot_mapping, self.shape.rms_norm_eps
        rotation = Rotation(self.rotary.table, positions)
        layers_rope_store(kv, rotation, caches, slots, stacked.k_norm, eps)

    def embed(self, input_ids: Tensor, block: int) -> Tensor:
        """Embed blocks of one token and masks: [n · block] i64 -> [n · block, hidden_size].

        The ids of masks are the mask's, or any if the drafter has an embedding of its own for them.
        """
        hidden = self.embedding(input_ids)
        if (mask := self.tables.get("mask_embedding")) is not None:
            hidden.view(-1, block, hidden.shape[1])[:, 1:] = mask
        return hidden

    def logits(self, batch: Batch, block: int, num_drafts: int, attentions: Attentions) -> Tensor:
        """Logits of the first drafts of each block, [n · num_drafts, this rank's draft ids].

        batch: blocks of one token and masks, see `embed`; attentions: by the mask of layers.
        """
        part, residual = self.embed(batch.input_ids, block), None
        plans = {mask: attention.plan(batch) for mask, attention in attentions.items()}
        for mask, layers in self.runs:
            with forward_context(batch, attentions[mask], plans[mask]):
                for layer in layers:
                    part, residual = layer(part, residual, batch.positions)
        normed, _ = self.final_norm.reduce_add(part, residual)
        drafts = normed.view(-1, block, normed.shape[1])[:, 1 : 1 + num_drafts]
        taken = drafts.reshape(-1, normed.shape[1])
        return self.head.logits(taken, whole=False, copy=self.head_copy)


class DFlash(Drafter):
    """Drafter by blocks; `attentions` read the region "draft", by the mask of layers.

    min_block: tokens of a block at least, its first included; 0: as many as a step verifies.
    """

    def __init__(
        self,
        features: Features[DFlashDrafter],
        attentions: Attentions,
        pool: KVPool,
        state: StepState,
        min_block: int,
    ) -> None:
        self._features, self._attentions, self._state = features, attentions, state
        self._model, self._min_block = features.model, min_block
        self._page_size = pool.layout.page_size
        num_rows, max_width = len(state.active), state.columns.drafts.shape[1] + 1
        longest = max(min_block, max_width)
        # A block is read as a window is, with masks for drafts. It may pass the end of its text.
        mask = self._model.shape.mask_token_id or 0
        self._blocks = replace(
            state.columns,
            max_len=torch.full_like(state.ints.max_len, 1 << 40),
            drafts=torch.full((longest - 1,), mask, device=state.device).expand(num_rows, -1),
        )
        every = torch.arange(num_rows, dtype=torch.int32, device=state.device)
        self._starts = [every * block for block in range(longest + 1)]  # of blocks, by their length

    def observe(self, batch: Batch, hidden: Tensor) -> None:
        features = self._features.of(hidden, batch.num_tokens)
        self._store(features, batch.positions, batch.slot_mapping)

    def seed(self, rows: Tensor) -> None:
        """Do nothing: the row's pages hold all."""

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
        model, state = self._model, self._state
        logits = model.logits(batch, block, num_drafts, self._attentions)
        before, own = rows.positions.view(n, block), rows.slots.view(n, block)
        # Of blocks of two tokens flatten() is a view with a stride.
        position = before[:, :num_drafts].flatten().contiguous()
        slots = own[:, 1 : 1 + num_drafts].flatten().contiguous()
        seed, temperature = None if greedy else state.ints.seed, state.floats.temperature
        draws = DraftDraws(
            rows.live, position, slots, seed, temperature, model.id_map, model.head.part
        )
        draw_drafts(logits, draws, state.columns.drafts[:, :num_drafts])

    def _store(self, features: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Store tokens of text; nothing attends. Their ids are not read."""
        batch = stored_tokens(self._state, positions, positions, slots)
        attention = next(iter(self._attentions.values()))  # all have the same slots
        with forward_context(batch, attention, None):
            self._model.store(features, positions)
