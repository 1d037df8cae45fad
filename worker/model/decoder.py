"""The decoder-only transformer that all served architectures are variants of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from worker.model.attention import Attention
from worker.model.embedding import VocabParallelEmbedding
from worker.model.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    gate_up_parts,
    qkv_parts,
)
from worker.model.norm import RMSNorm
from worker.model.rotary import RotaryEmbedding
from worker.model.shape import LayerShape, ModelSpec
from worker.model.shard import HeadSplit, Shard, split_heads
from worker.model.taps import Taps
from worker.peers.base import Collective


@dataclass(frozen=True, slots=True)
class Features:
    """What sets one architecture apart from another."""

    qkv_bias: bool = False
    output_bias: bool = False  # of the attention's output projection
    qk_norm: bool = False  # RMSNorm of each head's q and k, before rope


class SelfAttention(nn.Module):
    """Projections, optional norms, rope and attention of one layer."""

    def __init__(
        self,
        spec: LayerShape,
        features: Features,
        heads: HeadSplit,
        layer_id: int,
        rotary: RotaryEmbedding,
        collective: Collective,
        *,
        dtype: torch.dtype,
        device: torch.device,
        in_features: int | None = None,
    ) -> None:
        super().__init__()
        self.qkv = ColumnParallelLinear(
            in_features or spec.hidden_size,
            qkv_parts(heads, spec.num_heads, spec.num_kv_heads, spec.head_dim),
            bias=features.qkv_bias,
            dtype=dtype,
            device=device,
        )
        self.output = RowParallelLinear(
            "o_proj",
            spec.num_heads * spec.head_dim,
            spec.hidden_size,
            collective,
            bias=features.output_bias,
            reduce=False,
            dtype=dtype,
            device=device,
        )
        self.q_norm = self.k_norm = None
        if features.qk_norm:
            eps = spec.rms_norm_eps
            self.q_norm = RMSNorm(spec.head_dim, eps, collective, dtype=dtype, device=device)
            self.k_norm = RMSNorm(spec.head_dim, eps, collective, dtype=dtype, device=device)
        self.attention = Attention(layer_id, heads.num_heads, rotary, self.q_norm, self.k_norm)

    def forward(self, hidden: Tensor, positions: Tensor, rows: Tensor | None = None) -> Tensor:
        """hidden: [num_tokens, in_features] -> this rank's part of the sum, [.., hidden_size].

        rows: see DecoderLayer.forward.
        """
        attended = self.attention(self.qkv(hidden), positions).flatten(1)
        return self.output(attended if rows is None else attended.index_select(0, rows))

    def store(self, hidden: Tensor, positions: Tensor) -> None:
        """Only the keys and values of forward(), into the tokens' slots."""
        self.attention.store(self.qkv.last(hidden, 2), positions)

    def shards(self, prefix: str) -> dict[str, Shard]:
        """Checkpoint name -> Shard."""
        found = self.qkv.shards(prefix) | self.output.shards(prefix)
        if self.q_norm is not None and self.k_norm is not None:
            found |= self.q_norm.shards(f"{prefix}.q_norm")
            found |= self.k_norm.shards(f"{prefix}.k_norm")
        return found


class FeedForward(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    def __init__(
        self,
        spec: LayerShape,
        collective: Collective,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.gate_up = ColumnParallelLinear(
            spec.hidden_size,
            gate_up_parts(spec.intermediate_size, collective.rank, collective.size),
            bias=False,
            dtype=dtype,
            device=device,
        )
        self.down = RowParallelLinear(
            "down_proj",
            spec.intermediate_size,
            spec.hidden_size,
            collective,
            bias=False,
            reduce=False,
            dtype=dtype,
            device=device,
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [num_tokens, hidden_size] -> this rank's part of the sum, same shape."""
        return self.down(self.gate_up.gated(hidden))

    def shards(self, prefix: str) -> dict[str, Shard]:
        """Checkpoint name -> Shard."""
        return self.gate_up.shards(prefix) | self.down.shards(prefix)


class DecoderLayer(nn.Module):
    """Attention and feed-forward; the norm that follows each of them adds up the ranks' parts."""

    def __init__(
        self,
        spec: LayerShape,
        features: Features,
        heads: HeadSplit,
        layer_id: int,
        rotary: RotaryEmbedding,
        collective: Collective,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        size, eps = spec.hidden_size, spec.rms_norm_eps
        self.input_norm = RMSNorm(size, eps, collective, dtype=dtype, device=device)
        self.attention = SelfAttention(
            spec, features, heads, layer_id, rotary, collective, dtype=dtype, device=device
        )
        self.post_norm = RMSNorm(size, eps, collective, dtype=dtype, device=device)
        self.feed_forward = FeedForward(spec, collective, dtype=dtype, device=device)

    def forward(
        self,
        part: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        rows: Tensor | None = None,
        tap: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(this rank's part of the feed-forward's output, the residual it is to be added to).

        part: [num_tokens, hidden_size]; what the layer before returned, or, with residual None,
        the embedded tokens. The layer's true input is residual + the ranks' sum of part.
        rows: [n] i64; only the hidden states of these rows are returned; None: of all. The KV of
        all tokens is stored and attended to either way.
        tap: [num_tokens, hidden_size], where the true input goes; None: nowhere.
        """
        if residual is None:
            normed, residual = self.input_norm(part), part
        else:
            normed, residual = self.input_norm.reduce_add(part, residual, tap)
        part = self.attention(normed, positions, rows)
        if rows is not None:
            residual = residual.index_select(0, rows)
        normed, residual = self.post_norm.reduce_add(part, residual)
        return self.feed_forward(normed), residual

    def shards(self, prefix: str) -> dict[str, Shard]:
        """Checkpoint name -> Shard."""
        return (
            self.input_norm.shards(f"{prefix}.input_layernorm")
            | self.attention.shards(f"{prefix}.self_attn")
            | self.post_norm.shards(f"{prefix}.post_attention_layernorm")
            | self.feed_forward.shards(f"{prefix}.mlp")
        )


class Decoder(nn.Module):
    """One rank of a model: embed, then forward, then logits of the rows that need them.

    An architecture is a subclass that overrides `features` and nothing else.

    Raises:
        Unsupported: the model cannot be divided among the collective's ranks.
    """

    # Tensors that some checkpoints carry and no forward pass needs.
    ignored_suffixes = (".rotary_emb.inv_freq",)
    ignored_prefixes = ("model.mtp_layers.",)  # of a drafter that lives in the same files

    def __init__(
        self,
        spec: ModelSpec,
        collective: Collective,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.collective = collective
        self.taps: Taps | None = None  # set where a drafter is fed with them
        self.heads = split_heads(
            spec.num_heads, spec.num_kv_heads, collective.rank, collective.size
        )
        self.embedding = VocabParallelEmbedding(
            spec.vocab_size, spec.hidden_size, collective, dtype=dtype, device=device
        )
        rotary = RotaryEmbedding(
            spec.head_dim,
            spec.max_position_embeddings,
            spec.rope_theta,
            spec.rope_scaling,
            device=device,
        )
        features = self.features(spec)
        self.layers = nn.ModuleList(
            DecoderLayer(
                spec, features, self.heads, i, rotary, collective, dtype=dtype, device=device
            )
            for i in range(spec.num_layers)
        )
        self.norm = RMSNorm(
            spec.hidden_size, spec.rms_norm_eps, collective, dtype=dtype, device=device
        )
        self.head = self.embedding
        if not spec.tie_word_embeddings:
            self.head = VocabParallelEmbedding(
                spec.vocab_size, spec.hidden_size, collective, dtype=dtype, device=device
            )

    @staticmethod
    def features(spec: ModelSpec) -> Features:
        """What the architecture adds to the plain decoder."""
        return Features()

    def embed(self, input_ids: Tensor) -> Tensor:
        """input_ids: [num_tokens] i64 -> [num_tokens, hidden_size]."""
        return self.embedding(input_ids)

    def forward(self, hidden: Tensor, positions: Tensor, rows: Tensor | None = None) -> Tensor:
        """All layers and the final norm, within a forward_context().

        hidden: [num_tokens, hidden_size] from `embed`, not changed; positions: [num_tokens] i64;
        rows: [n] i64, the rows whose hidden states are returned; None: all.
        Returns [num_tokens, hidden_size], or [n, hidden_size].
        """
        part, residual, num_layers = hidden, None, len(self.layers)
        for i, layer in enumerate(self.layers):
            kept = rows if i + 1 == num_layers else None
            tap = None if self.taps is None else self.taps.after(i - 1, len(positions))
            part, residual = layer(part, residual, positions, kept, tap)
        assert residual is not None, "a model has at least one layer"
        tap = None if self.taps is None else self.taps.after(num_layers - 1, len(positions))
        normed, _ = self.norm.reduce_add(part, residual, tap)
        return normed

    def logits(self, hidden: Tensor, *, whole: bool = True) -> Tensor:
        """hidden: [n, hidden_size] after the final norm -> [n, vocab_size], on all ranks.

        whole: see VocabParallelEmbedding.logits.
        """
        return self.head.logits(hidden, whole=whole)

    def shards(self) -> dict[str, Shard]:
        """Checkpoint name -> Shard, for every tensor that this rank needs."""
        found = self.embedding.shards("model.embed_tokens") | self.norm.shards("model.norm")
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            found |= layer.shards(f"model.layers.{i}")
        if self.head is not self.embedding:
            found |= self.head.shards("lm_head")
        return found

    def ignores(self, name: str) -> bool:
        """May a checkpoint hold the tensor `name` although no shard is made of it?"""
        tied_head = self.head is self.embedding and name == "lm_head.weight"
        ignored = name.startswith(self.ignored_prefixes) or name.endswith(self.ignored_suffixes)
        return tied_head or ignored
