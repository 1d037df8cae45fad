"""The chain drafter of the model `tiny`: one layer in the published EAGLE-3 form, and its training.

Slot t of the drafter holds the pair (token t, g of token t − 1), where g is `fc` of the target's
features; its row says token t + 1. A draft behind the first takes the drafter's own output as g.
Training does the same ("training-time test"): a row of step k sees the rows of the target's
features up to its anchor, and behind them its own rows of the steps before.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.train.answers import Batch
from benchmarks.train.base import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    RMS_NORM,
    Attention,
    Drafter,
    Layer,
    heads,
)
from benchmarks.train.model import bundled_config

CONFIG = bundled_config("tiny-chain")
TAPS = CONFIG["eagle_config"]["eagle_aux_hidden_state_layer_ids"]


class Rows(NamedTuple):
    """What the rows of one draft step leave for those of later steps."""

    keys: Tensor  # [batch, KV_HEADS, rows, HEAD_DIM]
    values: Tensor  # [batch, KV_HEADS, rows, HEAD_DIM]


class ChainDrafter(Drafter):
    """An EAGLE-3 drafter."""

    config, taps, num_drafts, fading = CONFIG, TAPS, 4, 0.8

    def __init__(self, embedding: Tensor) -> None:
        super().__init__(embedding)
        self.midlayer: Any = Layer(RMS_NORM, Attention(2 * HIDDEN))  # of token and feature
        self.midlayer.hidden_norm = RMS_NORM(HIDDEN)

    @property
    def only(self) -> Any:
        """Its layer."""
        return self.midlayer

    def learn(self, batch: Batch, number: int) -> Iterator[Tensor]:
        """The text's tokens are fed back, where a served drafter takes its own."""
        num_rows, num_anchors = batch.features.shape[1], batch.num_anchors
        anchored = slice(num_rows - num_anchors, num_rows)
        fed = self.before(batch.features)
        mixed = self.mix(batch.tokens(0, num_rows), fed)
        seen = [self.rows(mixed, batch.slots)]
        mixed, fed = mixed[:, anchored], fed[:, anchored]
        for step in range(self.num_drafts):
            slots = batch.slots[:, anchored] + step
            if step > 0:
                seen.append(self.rows(mixed, slots))
            output, fed = self.layer(mixed, fed, slots, seen, batch.mask)
            yield functional.linear(output, self.embedding)
            mixed = self.mix(batch.tokens(step + 1, num_anchors), fed)

    def before(self, features: Tensor) -> Tensor:
        """[batch, rows, HIDDEN]: what stands for a drafter's own output in the text."""
        return self.fc(features)

    def mix(self, tokens: Tensor, fed: Tensor) -> Tensor:
        """[batch, rows, width]: input of the layer, of tokens and of the row before each."""
        layer = self.midlayer
        embedded = functional.embedding(tokens, self.embedding)
        return torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(fed)), -1)

    def rows(self, mixed: Tensor, slots: Tensor) -> Rows:
        """Keys and values of `mixed` at `slots` [batch, rows]."""
        attention = self.only.self_attn
        keys = attention.k_norm(heads(mixed, attention.k_proj))
        return Rows(self.turn(keys, slots), heads(mixed, attention.v_proj))

    def layer(
        self, mixed: Tensor, fed: Tensor, slots: Tensor, seen: list[Rows], mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Two of [batch, anchors, HIDDEN]: what the head takes, and what is fed back."""
        layer = self.midlayer
        queries = self.turn(heads(mixed, layer.self_attn.q_proj), slots)
        hidden = layer.after(fed + layer.self_attn.o_proj(attended(queries, seen, mask)))
        return self.norm(hidden), hidden


def attended(queries: Tensor, seen: list[Rows], mask: Tensor) -> Tensor:
    """[batch, anchors, HEADS · HEAD_DIM]: what each anchor's query takes from the rows.

    queries: [batch, HEADS, anchors, HEAD_DIM]; seen: of the text, under `mask` (see Batch), then of
    each draft step before, where an anchor sees its own row.
    """
    num_anchors = queries.shape[2]
    queries = queries.unflatten(1, (KV_HEADS, -1)) * HEAD_DIM**-0.5
    context, *own = seen
    grouped = queries.flatten(2, 3)  # the query heads of one kv head, one behind the other
    scores = (grouped @ context.keys.transpose(2, 3)).view(*queries.shape[:4], -1) + mask
    parts = [scores, *((queries * rows.keys[:, :, None]).sum(-1, keepdim=True) for rows in own)]
    weights = torch.cat(parts, -1).softmax(-1)
    num_rows = scores.shape[-1]
    out = (weights[..., :num_rows].flatten(2, 3) @ context.values).view_as(queries)
    for place, rows in enumerate(own):
        out = out + weights[..., num_rows + place, None] * rows.values[:, :, None]
    return out.flatten(1, 2).transpose(1, 2).reshape(-1, num_anchors, HEADS * HEAD_DIM)
