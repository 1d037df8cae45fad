"""Chain drafters: one layer that drafts token by token, on features of the target."""

from __future__ import annotations

from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from worker.drafts.chain_spec import ChainSpec
from worker.drafts.draft_ids import DraftIds
from worker.model.decoder import Decoder, FeedForward, SelfAttention
from worker.model.embedding import VocabParallelEmbedding
from worker.model.linear import ReplicatedLinear
from worker.model.norm import RMSNorm
from worker.model.rotary import RotaryEmbedding
from worker.model.shard import Shard, split_heads
from worker.model.weights import Placement
from worker.ops.pair_norm import pair_norm
from worker.peers.base import Collective


class Kind(TypedDict):
    """What all weights of a drafter are."""

    dtype: torch.dtype
    device: torch.device


class ChainDrafter(nn.Module):
    """One rank of a drafter. It reads and writes layer 0 of the attention's region.

    Its row for slot t is made of token t and the feature g of token t - 1. `store` fills the slots
    of tokens that are known; `forward` also says what the drafter makes of them.

    Raises:
        Unsupported: the drafter cannot be divided among the collective's ranks.
    """

    def __init__(
        self,
        spec: ChainSpec,
        target: Decoder,
        collective: Collective,
        *,
        max_positions: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """max_positions: of the served length, whatever the drafter was trained for."""
        super().__init__()
        self.spec = spec
        self._collective = collective
        self.heads = split_heads(
            spec.num_heads, spec.num_kv_heads, collective.rank, collective.size
        )
        size, eps = spec.hidden_size, spec.rms_norm_eps
        placement = Placement(collective, dtype, device)

        def norm(part: str, width: int = size) -> RMSNorm | None:
            return RMSNorm(width, eps, placement) if part in spec.names else None

        def linear(part: str, width: int, *, bias: bool) -> ReplicatedLinear | None:
            own = part in spec.names
            return ReplicatedLinear(width, size, placement, bias=bias) if own else None

        def rows(part: str, num: int, shared: VocabParallelEmbedding) -> VocabParallelEmbedding:
            own = part in spec.names
            return VocabParallelEmbedding(num, size, placement) if own else shared

        tapped = spec.num_features * spec.target_hidden_size
        self.fc_norm = FeatureNorms(spec, placement) if spec.fc_norm else None
        self.input_norm = norm("input_norm", tapped)
        self.fc = linear("fc", tapped, bias=False)
        self.token_norm = norm("token_norm")
        self.hidden_norm = norm("hidden_norm")
        self.projection = linear("projection", 2 * size, bias=spec.projection_bias)
        self.layer_norm = norm("layer_norm")
        rotary = RotaryEmbedding(spec, max_positions, device)
        in_features = 2 * size if self.projection is None else size
        self.attention = SelfAttention(spec, 0, rotary, placement, in_features)
        self.post_norm = RMSNorm(size, eps, placement)
        self.feed_forward = FeedForward(spec, placement)
        self.final_norm = norm("final_norm")
        self.embedding = rows("embedding", spec.target_vocab_size, target.embedding)
        self.head = rows("head", spec.vocab_size, target.head)
        self.ids = DraftIds(spec, device)

    @property
    def id_map(self) -> Tensor | None:
        """[vocab_size] i64: the target's id of each of the head's; None: they are the same."""
        return self.ids.targets

    def features(self, taps: Tensor) -> Tensor:
        """Fuse the target's hidden states into g.

        taps: [n, num_features · target_hidden_size], in the order of `spec.taps`.
        Returns [n, hidden_size]; `taps` itself where nothing is fused.
        """
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

        Returns (g of these tokens as the drafter makes it, what `logits` takes), both
        [n, hidden_size], maybe one tensor. No argument is changed.
        """
        layer_input, residual = self._layer_input(input_ids, g)
        normed, residual = self.post_norm.reduce_add(
            self.attention(layer_input, positions), residual
        )
        part = self.feed_forward(normed)
        if self.final_norm is None:
            output = self._collective.all_reduce(part) + residual
            return output, output
        normed, output = self.final_norm.reduce_add(part, residual)
        return (normed if self.spec.norm_output else output), normed

    def logits(self, head_input: Tensor, *, whole: bool = True) -> Tensor:
        """head_input: [n, hidden_size] -> [n, vocab_size], of draft ids; see `id_map`.

        whole: see VocabParallelEmbedding.logits.
        """
        return self.head.logits(head_input, whole=whole)

    def _layer_input(self, input_ids: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """(what q, k and v are made of, the residual that attention is added to)."""
        whole = self._collective.size == 1  # else the embedding's rows are divided among ranks
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
        """Checkpoint name -> Shard, for every tensor that this rank needs."""
        found = self.ids.shards()
        for part, name in self.spec.names.items():
            if part not in ("d2t", "t2d"):
                module: Any = getattr(self, part)
                found |= module.shards(name)
        return found

    def ignores(self, name: str) -> bool:
        """May a checkpoint hold the tensor `name` although no shard is made of it?

        An MTP layer lies among the target's own tensors.
        """
        others = self.spec.form == "mtp" and not name.startswith("model.mtp_layers.")
        return others or name.endswith(Decoder.ignored_suffixes)


class FeatureNorms(nn.Module):
    """A norm of its own for each of the hidden states that are fused."""

    def __init__(self, spec: ChainSpec, placement: Placement) -> None:
        super().__init__()
        self.norms = nn.ModuleList(
            RMSNorm(spec.target_hidden_size, spec.rms_norm_eps, placement) for _ in spec.taps
        )

    def forward(self, taps: Tensor) -> Tensor:
        """taps: [n, num_features · target_hidden_size] -> the same shape."""
        parts = taps.chunk(len(self.norms), dim=-1)
        return torch.cat([norm(part) for norm, part in zip(self.norms, parts, strict=True)], dim=-1)

    def shards(self, prefix: str) -> dict[str, Shard]:
        """Checkpoint name -> Shard."""
        found: dict[str, Shard] = {}
        for i, norm in enumerate(self.norms):
            assert isinstance(norm, RMSNorm)
            found |= norm.shards(f"{prefix}.{i}")
        return found
