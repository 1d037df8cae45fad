"""A gated delta net as a layer's attention; worker.attention.recurrent has its rule."""

from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import Tensor, nn

from worker.attention.recurrent.chunk import delta_chunk
from worker.attention.recurrent.delta_net import DeltaState, DeltaWeights
from worker.attention.recurrent.window import delta_window
from worker.config.checkpoint.delta_shape import TAPS
from worker.config.checkpoint.shape import ModelShape
from worker.forward.batch import StateChunks, StateWindows
from worker.forward.context import current
from worker.model.kinds import delta_share
from worker.model.layers import ColumnParallelLinear, RowParallelLinear, selected
from worker.model.placement import Placement
from worker.weights.base import Parts
from worker.weights.shard import Key, Part, Shard, all_of, by_head, split_even, stacked, whole

PARTS = ("q", "k", "v", "z", "b", "a")  # of a token's packed projection


class DeltaNet(nn.Module):
    """Projections, the recurrence over the layer's slots of state, and its normed, gated output."""

    reader = None  # of what forward() takes: it is in the model's dtype
    state: DeltaState  # this layer's; set by Decoder.keep

    def __init__(
        self, shape: ModelShape, layer_id: int, rotary: object, placement: Placement
    ) -> None:
        """layer_id: of the pool. rotary: not used, for positions are in the state."""
        super().__init__()
        assert shape.delta is not None
        collective, size = placement.collective, shape.hidden_size
        self._whole = delta = shape.delta
        self._layout = shape.features.delta
        self._keys = split_even(
            "linear_num_key_heads", delta.key_heads, collective.rank, collective.size
        )
        own = self.shape = delta_share(shape, collective.rank, collective.size)
        self.layer_id = layer_id
        widths = {
            "q": delta.key_heads * delta.key_dim, "k": delta.key_heads * delta.key_dim,
            "v": delta.value_width, "z": delta.value_width,
            "b": delta.value_heads, "a": delta.value_heads,
        }  # fmt: skip
        self._parts = {name: self._part(width) for name, width in widths.items()}
        parts = Parts(self._parts, all_of(size))
        # Some of these rows are in the model's dtype in all files.
        self.inputs = ColumnParallelLinear(parts, placement.plain, bias=False)
        output = size, delta.value_width
        self.output = RowParallelLinear("out_proj", output, placement, bias=False)
        self.conv = placement.empty(own.channels, TAPS)
        self.a_log = placement.empty(own.value_heads, dtype=torch.float32)
        self.dt_bias = placement.empty(own.value_heads, dtype=torch.float32)
        self.norm = placement.empty(own.value_dim)
        self._weights = DeltaWeights(
            self.conv, self.a_log, self.dt_bias, self.norm, shape.rms_norm_eps
        )

    def _part(self, width: int) -> Part:
        """This rank's part of `width` rows that belong to the key heads one after the other."""
        each = width // self._whole.key_heads
        return Part(width, slice(self._keys.start * each, self._keys.stop * each))

    def forward(self, hidden: Tensor, positions: Tensor, rows: Tensor | None = None) -> Tensor:
        """As SelfAttention.forward; positions are in the state."""
        packed, context = self.inputs(hidden), current()
        states = context.batch.states
        if isinstance(states, StateWindows):
            out = delta_window(packed, self._weights, self.state, states)
        else:
            out = packed.new_empty(len(packed), self.shape.value_width)
            if context.breaks is None:
                self._chunk(packed, out)
            else:
                context.breaks.at(self._chunk, packed, out)
        return self.output(selected(out, rows))

    def _chunk(self, packed: Tensor, out: Tensor) -> None:
        """The break of captured passes: the blocks depend on the batch's requests."""
        states = current().batch.states
        assert isinstance(states, StateChunks)
        delta_chunk(packed, self._weights, self.state, states, out)

    def shards(self, prefix: str) -> dict[Key, Shard]:
        parts, shape, size = self._parts, self._whole, self.inputs.parts.columns
        bounds = list(accumulate(self.inputs.part_sizes, initial=0))
        held = {
            name: self.inputs.weight.values[first:last]
            for name, first, last in zip(PARTS, bounds, bounds[1:], strict=False)
        }
        heads = Part(shape.key_heads, self._keys)
        values = shape.ratio * shape.value_dim
        sizes = {"q": shape.key_dim, "k": shape.key_dim, "v": values, "z": values}
        if self._layout == "by_key_head":
            gates: dict[str, int] = {"b": shape.ratio, "a": shape.ratio}
            shards = by_head(f"{prefix}.in_proj_qkvz.weight", held, sizes, heads, size)
            shards |= by_head(f"{prefix}.in_proj_ba.weight", held, gates, heads, size)
        else:
            shards = _rows(f"{prefix}.in_proj_qkv.weight", held, parts, size)
            for name in ("z", "b", "a"):
                key = f"{prefix}.in_proj_{name}.weight"
                shards |= stacked(held[name], {key: parts[name]}, size)
        ends = list(accumulate((len(parts[name]) for name in "qkv"), initial=0))
        conv = {
            name: self.conv.unsqueeze(1)[first:last]
            for name, first, last in zip("qkv", ends, ends[1:], strict=False)
        }
        shards |= _rows(f"{prefix}.conv1d.weight", conv, parts, all_of(1), all_of(TAPS))
        for name, weight in (("A_log", self.a_log), ("dt_bias", self.dt_bias)):
            shards |= stacked(weight, {f"{prefix}.{name}": parts["b"]})
        shards[Key(f"{prefix}.norm.weight")] = whole(self.norm)
        return shards | self.output.shards(prefix)


def _rows(
    tensor: str, held: Mapping[str, Tensor], parts: Mapping[str, Part], *inner: Part
) -> dict[Key, Shard]:
    """Shards of a tensor whose rows are q of all heads, then k, then v."""
    total = sum(parts[name].size for name in "qkv")
    shards, start = dict[Key, Shard](), 0
    for name in "qkv":
        rows = parts[name].held
        part = Part(total, slice(start + rows.start, start + rows.stop))
        for key, shard in stacked(held[name], {tensor: part}, *inner).items():
            shards[key._replace(piece=name)] = shard
        start += parts[name].size
    return shards
