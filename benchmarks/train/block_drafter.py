"""The block drafter of the model `tiny`: two layers in the published DFlash form.

A block is a token of the text, its anchor, and masks behind it; row j says the token j places
behind the anchor. In every layer a block sees all of itself, and keys and values of the text before
it that are made of the target's features g = hidden_norm(fc(...)) alone (arXiv:2602.06036).
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
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

CONFIG = bundled_config("tiny-dflash")
TAPS, MASK_ID = (CONFIG["dflash_config"][key] for key in ("target_layer_ids", "mask_token_id"))
BLOCK_SIZE = CONFIG["block_size"]
# Of the blocks of steps, in turn: narrow steps of a server draft shorter ones.
BLOCKS = (BLOCK_SIZE, 4, BLOCK_SIZE, BLOCK_SIZE, 2, BLOCK_SIZE)


class BlockDrafter(Drafter):
    """A DFlash drafter."""

    config, taps, num_drafts, fading = CONFIG, TAPS, BLOCK_SIZE - 1, 0.8

    def __init__(self, embedding: Tensor) -> None:
        super().__init__(embedding)
        self.hidden_norm = RMS_NORM(HIDDEN)
        self.layers = nn.ModuleList(
            Layer(RMS_NORM, Attention(HIDDEN, RMS_NORM)) for _ in range(CONFIG["num_hidden_layers"])
        )

    def learn(self, batch: Batch, number: int) -> Iterator[Tensor]:
        return iter(self(batch, BLOCKS[number % len(BLOCKS)]))

    def forward(self, batch: Batch, block: int) -> Tensor:
        """Logits [block - 1, batch, anchors, vocab] of the blocks of all anchors at once.

        A row of `batch` stands for slot t and has the features of token t - 1: rows up to an
        anchor's are the text before it.
        """
        text = self.hidden_norm(self.fc(batch.features))
        num_rows, num_anchors = text.shape[1], batch.num_anchors
        anchors = batch.slots[:, num_rows - num_anchors :]
        masks = self.embedding[MASK_ID].expand(len(text), num_anchors, block, HIDDEN)
        hidden = masks.clone()
        hidden[:, :, 0] = functional.embedding(
            batch.tokens(0, num_rows)[:, num_rows - num_anchors :], self.embedding
        )
        positions = anchors[..., None] + torch.arange(block, device=anchors.device)
        before = (batch.slots - 1).clamp(min=0)
        for layer in self.layers:
            assert isinstance(layer, Layer)
            added = self._attend(layer, hidden, positions, text, before, batch.mask)
            hidden = layer.after(hidden + added)
        rows = self.norm(hidden[:, :, 1:]).permute(2, 0, 1, 3)
        return functional.linear(rows, self.embedding)

    def _attend(
        self,
        layer: Layer,
        hidden: Tensor,
        positions: Tensor,
        text: Tensor,
        before: Tensor,
        mask: Tensor,
    ) -> Tensor:
        """[batch, anchors, block, hidden]: what a layer's attention adds to `hidden` of that shape.

        Its rows are at positions [batch, anchors, block]; text [batch, rows, hidden] is g of the
        tokens at `before` [batch, rows]; mask [batch, 1, 1, anchors, rows] is added to scores.
        """
        attn, (num, num_anchors, block, _) = layer.self_attn, hidden.shape
        normed, at = layer.input_layernorm(hidden).flatten(1, 2), positions.flatten(1)

        q = self.turn(attn.q_norm(heads(normed, attn.q_proj)), at) * HEAD_DIM**-0.5
        keys = self.turn(attn.k_norm(heads(text, attn.k_proj)), before)
        own = self.turn(attn.k_norm(heads(normed, attn.k_proj)), at)
        values, own_values = heads(text, attn.v_proj), heads(normed, attn.v_proj)
        q = q.unflatten(1, (KV_HEADS, -1)).unflatten(3, (num_anchors, block))
        own, own_values = (x.unflatten(2, (num_anchors, block)) for x in (own, own_values))
        seen = torch.einsum("bkgajd,bkrd->bkgajr", q, keys) + mask[..., None, :]
        among = torch.einsum("bkgajd,bkaid->bkgaji", q, own)
        shares = torch.cat((seen, among), -1).softmax(-1)
        num_rows = keys.shape[2]
        mixed = torch.einsum("bkgajr,bkrd->bkgajd", shares[..., :num_rows], values)
        mixed = mixed + torch.einsum("bkgaji,bkaid->bkgajd", shares[..., num_rows:], own_values)
        mixed = mixed.permute(0, 3, 4, 1, 2, 5).reshape(num, num_anchors, block, HEADS * HEAD_DIM)
        return attn.o_proj(mixed)
