"""What the state of gated delta nets follows from. Free of torch."""

import math
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

from worker.config.checkpoint.fields import Fields, is_list
from worker.config.checkpoint.windows import FULL, LINEAR

DELTA_BLOCK = 64  # tokens of a chunk's block; blocks begin at multiples of it
TAPS = 4  # of the convolution: a token and the three before it
# Most numbers of a head's values that lie together in a state: what a warp of a decode step has.
VALUES = 16


class DeltaShape(NamedTuple):
    """Heads of one rank. `ratio` value heads share one key head."""

    key_heads: int
    ratio: int
    key_dim: int
    value_dim: int

    @property
    def value_heads(self) -> int:
        """Heads of v, z and the output."""
        return self.key_heads * self.ratio

    @property
    def head_channels(self) -> int:
        """Convolved channels of a key head: its q and k, and v of its value heads."""
        return 2 * self.key_dim + self.ratio * self.value_dim

    @property
    def channels(self) -> int:
        """Convolved channels: q of all key heads, then k, then v of all value heads."""
        return self.key_heads * self.head_channels

    @property
    def value_width(self) -> int:
        """Numbers of a token's v, z or output."""
        return self.value_heads * self.value_dim

    @property
    def packed_width(self) -> int:
        """Numbers of a token's packed projection: channels, z, then b and a of each value head."""
        return self.channels + self.value_width + 2 * self.value_heads

    @property
    def raw_width(self) -> int:
        """Numbers of a token that a window keeps: channels, b and a."""
        return self.channels + 2 * self.value_heads


def snapshot_grid(page_size: int) -> int:
    """Snapshots of states are taken after multiples of so many tokens."""
    return math.lcm(page_size, DELTA_BLOCK)


def block_table(query_start: Sequence[int], num_tokens: int) -> tuple[list[int], list[int]]:
    """StateChunks.blocks of a batch of `num_tokens` tokens, padded ones included."""
    n = len(query_start) - 1
    firsts = [range(begin, end, DELTA_BLOCK) for begin, end in pairwise(query_start)]
    requests = [request for request, each in enumerate(firsts) for _ in each]
    unused = num_tokens // DELTA_BLOCK + n - len(requests)
    return requests + [n] * unused, [*chain(*firsts)] + [0] * unused


def read_delta(fields: Fields) -> dict[str, Any]:
    """What a ModelShape says of gated delta nets."""
    num_layers, kinds = fields.integer("num_hidden_layers"), fields.get("layer_types")
    interval = fields.integer("full_attention_interval", default=4)
    if kinds is None:
        kinds = [FULL if (i + 1) % interval == 0 else LINEAR for i in range(num_layers)]
    if not is_list(kinds) or len(kinds) != num_layers or not {FULL, LINEAR} >= set(kinds):
        problem = f"must name {FULL} or {LINEAR} for each of {num_layers} layers, not {kinds!r}"
        raise fields.error("layer_types", problem)
    if FULL not in kinds:
        raise fields.unsupported("layer_types", "no layer with attention")
    fields.choice("linear_conv_kernel_dim", (TAPS,))
    fields.choice("attn_output_gate", (True,))
    key_heads = fields.integer("linear_num_key_heads", default=16)
    value_heads = fields.integer("linear_num_value_heads", default=32)
    if value_heads % key_heads:
        problem = f"{key_heads} does not divide linear_num_value_heads {value_heads}"
        raise fields.error("linear_num_key_heads", problem)
    names = "linear_key_head_dim", "linear_value_head_dim"
    dims = [fields.integer(name, default=128) for name in names]
    for name, size in zip(names, dims, strict=True):
        if size < 16 or size & (size - 1):
            raise fields.unsupported(name, f"{size}; supported: powers of two from 16 on")
    delta = DeltaShape(key_heads, value_heads // key_heads, *dims)
    return {"is_delta": tuple(kind == LINEAR for kind in kinds), "delta": delta}
