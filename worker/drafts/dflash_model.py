"""DFlash drafters: a few layers that draft a whole block of tokens in one pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from worker.attention.qk_rope_store import Rotation, layers_rope_store
from worker.drafts.drafter import DrafterModel, Stack
from worker.drafts.drafter_shape import DFlashShape
from worker.forward.context import current
from worker.model.decoder import Decoder, DecoderLayer, SelfAttention
from worker.model.layers import ReplicatedLinear, RMSNorm
from worker.model.loader import LoadFormat
from worker.ops.mask import KeyMask
from worker.ops.product import product


@dataclass(frozen=True, slots=True)
class Stacked:
    """The key and value projections of all layers, one below the other, so that one product serves
    them all. They are copies: each layer's own QKV matrix serves the blocks."""

    weight: Tensor  # [num_layers · 2 · num_kv_heads · head_dim, hidden_size]
    bias: Tensor | None
    k_norm: Tensor | None  # [num_layers, head_dim]

    @classmethod
    def of(cls, layers: Sequence[SelfAttention]) -> Stacked:
        """Copy those of `layers`."""
        starts = [layer.qkv.part_sizes[0] for layer in layers]
        parts = list(zip(layers, starts, strict=True))
        biases = [layer.qkv.bias[start:] for layer, start in parts if layer.qkv.bias is not None]
        norms = [layer.k_norm.weight.detach() for layer in layers if layer.k_norm is not None]
        return cls(
            torch.cat([layer.qkv.weight.tensor[start:] for layer, start in parts]).detach(),
            torch.cat(biases).detach() if biases else None,
            torch.stack(norms) if norms else None,
        )


class DFlashDrafter(DrafterModel):
    """One rank of a drafter. Its layers read and write those of the attention's region.

    Text that the target has verified is there as keys and values of all layers, made of the
    target's features alone (`store`). A block of tokens attends to it and to itself (`run`).
    """

    spec: DFlashShape

    def __init__(self, spec: DFlashShape, target: Decoder, max_positions: int) -> None:
        """The last block may pass `max_positions`."""
        super().__init__(spec, target, max_positions + spec.block_size)
        size, eps, placement = spec.hidden_size, spec.rms_norm_eps, self.placement
        tapped = spec.num_features * spec.target_hidden_size
        self.fc = ReplicatedLinear(tapped, size, placement, bias=False)
        self.hidden_norm = RMSNorm(size, eps, placement)
        self.layers = Stack(
            DecoderLayer(spec, i, self.rotary, placement) for i in range(spec.num_layers)
        )
        self.final_norm = RMSNorm(size, eps, placement)
        if spec.mask_token_id is None:
            self.tables["mask_embedding"] = placement.empty(size)
        self._stacked: Stacked | None = None

    def fill(self, path: Path, *, load_format: LoadFormat = "safetensors", seed: int = 0) -> None:
        """As for every drafter; then stack what makes keys and values in all layers."""
        super().fill(path, load_format=load_format, seed=seed)
        self._stacked = Stacked.of([layer.attention for layer in self._layers()])

    def features(self, taps: Tensor) -> Tensor:
        return self.hidden_norm(self.fc(taps))

    def store(self, features: Tensor, positions: Tensor) -> None:
        """Put the tokens' keys and values into the batch's slots, within a forward_context().

        features: [n, hidden_size]; positions: [n] i64.
        """
        context, stacked = current(), self._stacked
        assert stacked is not None, "fill() comes first"
        caches = [context.attention.kv(layer) for layer in range(self.spec.num_layers)]
        kv = product(features, stacked.weight, stacked.bias)
        slots, eps = context.batch.slot_mapping, self.spec.rms_norm_eps
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

    def runs(self) -> Iterator[tuple[KeyMask, range]]:
        """Layers that follow each other and see the same keys: their mask and their numbers."""
        masks = self.spec.masks
        for mask, numbers in groupby(range(len(masks)), key=masks.__getitem__):
            run = list(numbers)
            yield mask, range(run[0], run[-1] + 1)

    def run(
        self, part: Tensor, residual: Tensor | None, positions: Tensor, numbers: range
    ) -> tuple[Tensor, Tensor]:
        """Some layers over blocks, within a forward_context() of their mask; see DecoderLayer."""
        for layer in self._layers(numbers):
            part, residual = layer(part, residual, positions)
        assert residual is not None
        return part, residual

    def logits(
        self, part: Tensor, residual: Tensor, block: int, num_drafts: int, *, whole: bool = True
    ) -> Tensor:
        """Logits of the first drafts of each block, [n · num_drafts, vocab_size] of draft ids.

        part, residual: [n · block, hidden_size], what `run` returned.
        """
        normed, _ = self.final_norm.reduce_add(part, residual)
        drafts = normed.view(-1, block, normed.shape[1])[:, 1 : 1 + num_drafts]
        return self.head.logits(drafts.reshape(-1, normed.shape[1]), whole=whole)

    def _layers(self, numbers: Iterable[int] | None = None) -> Iterator[DecoderLayer]:
        for number in range(self.spec.num_layers) if numbers is None else numbers:
            layer = self.layers[number]
            assert isinstance(layer, DecoderLayer)
            yield layer
