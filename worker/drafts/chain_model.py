"""Chain drafters: one layer that drafts token by token, on features of the target."""

from typing import Any

import torch
from torch import Tensor, nn

from worker.drafts.drafter import DrafterModel
from worker.drafts.drafter_shape import ChainShape
from worker.model.decoder import Decoder, FeedForward, SelfAttention
from worker.model.layers import ReplicatedLinear, RMSNorm
from worker.model.shard import Shard
from worker.ops.norms import pair_norm


class ChainDrafter(DrafterModel):
    """One rank of a drafter. It reads and writes layer 0 of the attention's region.

    Its row for slot t is made of token t and the feature g of token t - 1.
    """

    spec: ChainShape

    def __init__(self, spec: ChainShape, target: Decoder, max_positions: int) -> None:
        super().__init__(spec, target, max_positions)
        size, eps, placement = spec.hidden_size, spec.rms_norm_eps, self.placement

        def norm(part: str, width: int = size) -> RMSNorm | None:
            return RMSNorm(width, eps, placement) if part in spec.names else None

        def linear(part: str, width: int, *, bias: bool) -> ReplicatedLinear | None:
            own = part in spec.names
            return ReplicatedLinear(width, size, placement, bias=bias) if own else None

        tapped = spec.num_features * spec.target_hidden_size
        self.fc_norm = None
        if "fc_norm" in spec.names:
            self.fc_norm = FeatureNorms(
                RMSNorm(spec.target_hidden_size, eps, placement) for _ in spec.taps
            )
        self.input_norm = norm("input_norm", tapped)
        self.fc = linear("fc", tapped, bias=False)
        self.token_norm = norm("token_norm")
        self.hidden_norm = norm("hidden_norm")
        self.projection = linear("projection", 2 * size, bias=spec.projection_bias)
        self.layer_norm = norm("layer_norm")
        in_features = 2 * size if self.projection is None else size
        self.attention = SelfAttention(spec, 0, self.rotary, placement, in_features)
        self.post_norm = RMSNorm(size, eps, placement)
        self.feed_forward = FeedForward(spec, placement)
        self.final_norm = norm("final_norm")

    def features(self, taps: Tensor) -> Tensor:
        """Fuse [n, num_features · target_hidden_size] into g [n, hidden_size]; without fc: taps."""
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
        return (normed if self.spec.norm_output else output), normed

    def _layer_input(self, input_ids: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """(what q, k and v are made of, the residual that attention is added to)."""
        whole = self.collective.size == 1  # else the embedding's rows are divided among ranks
        pair = pair_norm(
            input_ids if whole else None,
            self.embedding.weight if whole else self.embedding(input_ids),
            g,
            None if self.token_norm is None else self.token_norm.weight,
            None if self.hidden_norm is None else self.hidden_norm.weight,
            self.spec.rms_norm_eps,
            self.spec.hidden_first,
        )
        if self.projection is None:
            return pair, pair[:, g.shape[1] :] if self.spec.norm_before_residual else g
        projected = self.projection(pair)
        return projected if self.layer_norm is None else self.layer_norm(projected), projected

    def shards(self) -> dict[str, Shard]:
        shards = self.ids.shards()
        for part, name in self.spec.names.items():
            if part not in ("d2t", "t2d"):
                module: Any = getattr(self, part)
                shards |= module.shards(name)
        return shards

    def ignores(self, name: str) -> bool:
        is_target_s = self.spec.form == "mtp" and not name.startswith("model.mtp_layers.")
        return is_target_s or super().ignores(name)


class FeatureNorms(nn.ModuleList):
    """A norm of its own for each of the hidden states that are fused."""

    def forward(self, taps: Tensor) -> Tensor:
        parts = taps.chunk(len(self), dim=-1)
        return torch.cat([norm(part) for norm, part in zip(self, parts, strict=True)], dim=-1)

    def shards(self, prefix: str) -> dict[str, Shard]:
        shards: dict[str, Shard] = {}
        for i, norm in enumerate(self):
            assert isinstance(norm, RMSNorm)
            shards |= norm.shards(f"{prefix}.{i}")
        return shards
