"""The decoder-only transformer that all served architectures are variants of."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from worker.attention.base import Attentions, AttentionShape
from worker.attention.build import build_attentions
from worker.attention.recurrent.delta_net import DeltaState, delta_states
from worker.cache.pool import KVPool
from worker.config.checkpoint.families import FAMILIES, Features
from worker.config.checkpoint.shape import LayerShape, ModelShape
from worker.model.attention import RotaryEmbedding, SelfAttention
from worker.model.delta_net import DeltaNet
from worker.model.experts import Experts, joins
from worker.model.kinds import KINDS, kinds_of
from worker.model.latent import LatentAttention
from worker.model.layers import (
    ColumnParallelLinear,
    LayerNorm,
    NormOptions,
    RMSNorm,
    RowParallelLinear,
    Sum,
    VocabParallelEmbedding,
    selected,
)
from worker.model.placement import Placement
from worker.ops.norms import geglu, squared_relu, swiglu
from worker.weights.base import Matrix, Operand, Parts
from worker.weights.shard import Key, Part, Shard, all_of, joined, rearranged, split_even


def activation_of(name: str) -> Callable[[Tensor], Tensor] | None:
    """Of a feed-forward, by its name in Features; None: silu, which has kernels of its own."""
    return {"gelu_pytorch_tanh": geglu, "relu2": squared_relu}.get(name)


class FeedForward(nn.Module):
    """down(silu(gate(x)) · up(x)), or with another activation.

    [num_tokens, hidden_size] -> this rank's part of the sum.
    """

    def __init__(self, shape: LayerShape, placement: Placement) -> None:
        super().__init__()
        size, width, collective = shape.hidden_size, shape.intermediate_size, placement.collective
        held = split_even("intermediate_size", width, collective.rank, collective.size)
        part = Part(width, held)
        rows, bias = {"gate_proj": part, "up_proj": part}, shape.features.mlp_bias
        if not shape.features.gated:
            del rows["gate_proj"]
        self._activation = activation_of(shape.features.activation)
        self._fused = shape.features.fused_gate_up
        modules = ["gate_up_proj"] if self._fused else ()
        parts = Parts(rows, all_of(size), modules=modules)
        self.gate_up = ColumnParallelLinear(parts, placement, bias=bias)
        self.down = RowParallelLinear("down_proj", (size, width), placement, bias=bias)
        if not self.gate_up.weight.gates_for(self.down.weight):
            self._activation = self._activation or swiglu
        assert not (self._fused and bias)

    @property
    def reader(self) -> Matrix | None:
        """The one matrix that multiplies what forward() takes."""
        return self.gate_up.weight

    @property
    def pair(self) -> tuple[Matrix, Matrix] | None:
        """(gates and ups, downs) if forward() is no more than these and silu; else None."""
        is_plain = self._activation is self.gate_up.bias is None
        return (self.gate_up.weight, self.down.weight) if is_plain else None

    def forward(self, hidden: Operand, rows: Tensor | None = None) -> Tensor:
        """rows: those of the step's tokens that these are; experts want to know."""
        if self._activation is not None:
            return self.down(self._activation(self.gate_up(hidden)))
        return self.down(self.gate_up.gated(hidden))

    def shards(self, prefix: str) -> dict[Key, Shard]:
        shards = self.gate_up.shards(prefix)
        if self._fused:
            tensor = f"{prefix}.gate_up_proj.weight"
            shards = rearranged(
                shards, lambda held: joined(tensor, {name: [each] for name, each in held.items()})
            )
        return shards | self.down.shards(prefix)


MTP_PREFIXES = ("model.mtp_layers.", "mtp.")  # of a layer that drafts, in the same files


def norm_of(
    features: Features, size: int, eps: float, placement: Placement, *, reduces: bool
) -> RMSNorm:
    """A norm of a layer, or the last one; see RMSNorm."""
    kind = LayerNorm if features.layer_norm else RMSNorm
    is_biased = features.layer_norm == "biased"
    options = NormOptions(features.centred, reduces, is_biased, features.f32_norms)
    return kind(size, eps, placement, options)


class DecoderLayer(nn.Module):
    """Attention and feed-forward; the norm that follows each of them adds up the ranks' parts."""

    def __init__(
        self, shape: LayerShape, number: int, rotary: RotaryEmbedding, placement: Placement
    ) -> None:
        """number: of the layer; `shape.layers` has what it is made of."""
        super().__init__()
        features, self._names = shape.features, shape.features.norms
        made, kind = shape.layers[number], KINDS[shape.layers[number].kind]
        self._collective, self._scale = placement.collective, shape.scales.residual
        self._parallel = features.parallel

        def norm(name: str, *, before: bool) -> RMSNorm | None:
            size, eps = shape.hidden_size, shape.rms_norm_eps
            reduces = before and not self._names.attention_out
            return norm_of(features, size, eps, placement, reduces=reduces) if name else None

        self.input_norm = norm(self._names.attention_in, before=True) or Sum()
        self.attention_norm = norm(self._names.attention_out, before=False)
        self.kind, self._mixer = made.kind, kind.mixer
        inside = placement.below(kind.mixer)
        self.attention: SelfAttention | LatentAttention | DeltaNet = kind.build(
            shape, made.number, rotary, inside
        )
        self.post_norm = norm(self._names.feed_forward_in, before=True) or Sum()
        self._block = features.experts.block if features.experts and made.is_sparse else "mlp"
        inside = placement.below(self._block)
        self.feed_forward = feed_forward_of(shape, inside, is_sparse=made.is_sparse)
        self.feed_forward_norm = norm(self._names.feed_forward_out, before=False)
        if not self._parallel:  # where both take what one norm leaves
            self.input_norm.leave_for(self.attention.reader)
            self.post_norm.leave_for(self.feed_forward.reader)

    def forward(
        self, part: Tensor, residual: Tensor | None, positions: Tensor, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(this rank's part of the feed-forward's output, the residual it is to be added to).

        part: [num_tokens, hidden_size]; of the layer before, or, with residual None, the embedded
        tokens. The layer's true input is residual + the ranks' sum of part. rows: [n] i64; only
        their hidden states are returned; None: all. KV is stored and read of all tokens anyway.
        """
        if self._parallel:
            hidden, residual = self.input_norm.reduce_add(part, residual)
            part = self.feed_forward(selected(hidden, rows), rows)
            return part.add_(self.attention(hidden, positions, rows)), selected(residual, rows)
        hidden, residual = self.input_norm.reduce_add(part, residual)
        part = self._leaving(self.attention(hidden, positions, rows), self.attention_norm)
        residual = selected(residual, rows)
        hidden, residual = self.post_norm.reduce_add(part, residual)
        return self._leaving(self.feed_forward(hidden, rows), self.feed_forward_norm), residual

    def _leaving(self, part: Tensor, norm: RMSNorm | None) -> Tensor:
        """What attention or feed-forward adds to the residual: scaled, or whole and normed."""
        if self._scale != 1:
            part = part.mul_(self._scale)
        return part if norm is None else norm(self._collective.all_reduce(part))

    def shards(self, prefix: str) -> dict[Key, Shard]:
        shards = self.attention.shards(f"{prefix}.{self._mixer}")
        shards |= self.feed_forward.shards(f"{prefix}.{self._block}")
        norms = self.input_norm, self.attention_norm, self.post_norm, self.feed_forward_norm
        for name, norm in zip(self._names, norms, strict=True):
            shards |= {} if norm is None else norm.shards(f"{prefix}.{name}")
        return shards


def feed_forward_of(
    shape: LayerShape, placement: Placement, *, is_sparse: bool
) -> FeedForward | Experts:
    """A layer's; sparse: its experts, and the one that all tokens share."""
    if not is_sparse:
        return FeedForward(shape, placement)
    assert shape.experts is not None
    names, width, shared = shape.features.experts, shape.experts.shared_width, None
    if width and names is not None and not joins(shape, placement):
        narrow = replace(shape, intermediate_size=width)
        shared = FeedForward(narrow, placement.below(names.shared))
    return Experts(shape, placement, shared)


class Taps:
    """A buffer for the residual after some layers of a decoder, which each step fills anew.

    layers: their numbers, ascending, each once; max_tokens: of a step, padding included.
    """

    def __init__(
        self, layers: Sequence[int], max_tokens: int, hidden_size: int, placement: Placement
    ) -> None:
        assert all(a < b for a, b in pairwise(layers))
        shape = max_tokens, len(layers) * hidden_size
        self._buffer = torch.zeros(shape, dtype=placement.dtype, device=placement.device)
        parts = self._buffer.view(max_tokens, len(layers), hidden_size).unbind(1)
        self._columns = dict(zip(layers, parts, strict=True))

    def after(self, layer: int) -> Tensor | None:
        """Where the residual after `layer` goes: [max_tokens, hidden], strided."""
        return self._columns.get(layer)

    def rows(self, num_tokens: int) -> Tensor:
        """What the latest step has left: [num_tokens, number of taps * hidden]."""
        return self._buffer[:num_tokens]


class Decoder(nn.Module):
    """One rank of a model: embed, then forward, then logits of the rows that need them.

    Raises Unsupported if the model cannot be divided among the collective's ranks.
    """

    # Tensors that some checkpoints carry and no forward pass needs.
    ignored_suffixes = (".rotary_emb.inv_freq",)
    # What drafts, and what sees images.
    ignored_prefixes = (*MTP_PREFIXES, "model.visual.", "vision_tower.", "multi_modal_projector.")

    def __init__(self, shape: ModelShape, placement: Placement) -> None:
        super().__init__()
        self.shape = shape
        # What else is built for it, as drafters are, is in the model's dtype.
        self.placement, self.collective = placement.plain, placement.collective
        ranks = self.collective.rank, self.collective.size
        # Heads of this rank, by the kind of layer.
        self.shares = {name: kind.share(shape, *ranks) for name, kind in kinds_of(shape).items()}
        vocabulary = shape.vocab_size, shape.hidden_size, placement
        self.embedding = VocabParallelEmbedding(*vocabulary)
        ropes = [shape.rope(number) for number in range(shape.num_layers)]
        tables = {
            rope: RotaryEmbedding(shape, rope, shape.max_position_embeddings, placement.device)
            for rope in dict.fromkeys(ropes)
        }
        self.layers = nn.ModuleList(
            DecoderLayer(
                shape,
                number,
                tables[ropes[number]],
                placement.below(f"{FAMILIES[shape.architecture].prefix}.layers.{number}"),
            )
            for number in range(shape.num_layers)
        )
        self.experts = [each for each in self.modules() if isinstance(each, Experts)]
        size, eps, features = shape.hidden_size, shape.rms_norm_eps, shape.features
        reduces = not features.norms.feed_forward_out
        self.norm = norm_of(features, size, eps, placement, reduces=reduces)
        tied = shape.tie_word_embeddings
        self.head = self.embedding if tied else VocabParallelEmbedding(*vocabulary)
        self.head.divisor, self.head.cap = shape.scales.logits, shape.scales.logits_cap
        self._scale = shape.scales.embedding
        if features.root_scale:
            self._scale = torch.tensor(size**0.5, dtype=placement.dtype).item()

    def tap(self, layers: Sequence[int], max_tokens: int) -> Taps:
        """Keep the residual after each of `layers` in later steps of up to `max_tokens` tokens.

        The norm behind a tapped layer writes the sum that it makes anyway into the buffer, so a tap
        costs no kernel, and graphs write it when they are replayed. Earlier taps are dropped.
        """
        taps = Taps(layers, max_tokens, self.shape.hidden_size, self.placement)
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            layer.input_norm.tap = taps.after(number - 1)
        self.norm.tap = taps.after(len(self.layers) - 1)
        return taps

    def of_kind(self, kind: str) -> list[Any]:
        """What stands in the place of attention in the layers of this kind, in their order."""
        layers: Iterable[Any] = self.layers
        return [layer.attention for layer in layers if layer.kind == kind]

    def keep(self, pool: KVPool, num_rows: int, max_width: int) -> None:
        """Keep recurrent states in the slots of `pool` in later steps; see `delta_states`."""
        if nets := self.of_kind("delta"):
            states = delta_states(pool.states, self.shares["delta"], num_rows, max_width)
            for net, state in zip(nets, states, strict=True):
                net.state = state

    def pad_below(self, sink: int) -> None:
        """In later steps no expert computes padding: the tokens with KV slots below `sink`."""
        for experts in self.experts:
            experts.sink = sink

    @property
    def states(self) -> list[DeltaState]:
        """The states that are kept, layer by layer; none without gated delta nets."""
        return [net.state for net in self.of_kind("delta")]

    def embed(self, input_ids: Tensor) -> Tensor:
        """input_ids: [num_tokens] i64 -> [num_tokens, hidden_size]."""
        hidden = self.embedding(input_ids)
        return hidden if self._scale == 1 else hidden * self._scale

    @property
    def is_recurrent(self) -> bool:
        """Whether some layers keep a state of each request."""
        return "delta" in self.shares

    @property
    def attended(self) -> AttentionShape:
        """What the layers with keys attend with."""
        return self.of_kind(self.shape.features.attention)[0].attended()

    def attentions(self, names: Mapping[str, str], pool: KVPool, dtype: str = "") -> Attentions:
        """The backends of the layers with keys; dtype: of queries. See `build_attentions`."""
        shape = replace(self.attended, dtype=dtype)
        sinks = [each.sinks for each in self.of_kind(shape.kind) if each.sinks is not None]
        return build_attentions(names, pool, shape, self.shape.masks, sinks)

    def forward(self, hidden: Tensor, positions: Tensor, rows: Tensor | None = None) -> Tensor:
        """All layers and the final norm, within a forward_context(): [num_tokens, hidden_size].

        hidden: from `embed`, not changed; positions: [num_tokens] i64; rows: [n] i64, the rows
        whose hidden states are returned; None: all.
        """
        part, residual, last = hidden, None, len(self.layers) - 1
        for number, layer in enumerate(self.layers):
            part, residual = layer(part, residual, positions, rows if number == last else None)
        normed, _ = self.norm.reduce_add(part, residual)
        return normed

    def logits(self, hidden: Tensor, *, whole: bool = True) -> Tensor:
        """See VocabParallelEmbedding.logits; hidden: after the final norm."""
        return self.head.logits(hidden, whole=whole)

    def shards(self) -> dict[Key, Shard]:
        prefix = FAMILIES[self.shape.architecture].prefix
        shards = self.embedding.shards(f"{prefix}.embed_tokens")
        shards |= self.norm.shards(f"{prefix}.norm")
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            shards |= layer.shards(f"{prefix}.layers.{i}")
        if self.head is not self.embedding:
            shards |= self.head.shards("lm_head")
        return shards

    def ignores(self, name: str) -> bool:
        tied_head = self.head is self.embedding and name == "lm_head.weight"
        ignored = name.startswith(self.ignored_prefixes) or name.endswith(self.ignored_suffixes)
        if self.shape.latent is not None:  # a layer that drafts lies behind the others
            prefix = FAMILIES[self.shape.architecture].prefix
            ignored |= name.startswith(f"{prefix}.layers.{self.shape.num_layers}.")
        is_elsewhere = any(each.is_elsewhere(name) for each in self.experts[:1])  # as in all layers
        return tied_head or ignored or is_elsewhere
