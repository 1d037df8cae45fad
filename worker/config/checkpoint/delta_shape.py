"""What the state of gated delta nets follows from. Free of torch."""

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import NamedTuple

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


def block_table(query_start: Sequence[int], num_tokens: int) -> tuple[list[int], list[int]]:
    """StateChunks.blocks of a batch of `num_tokens` tokens, padded ones included."""
    n = len(query_start) - 1
    firsts = [range(begin, end, DELTA_BLOCK) for begin, end in pairwise(query_start)]
    requests = [request for request, each in enumerate(firsts) for _ in each]
    unused = num_tokens // DELTA_BLOCK + n - len(requests)
    return requests + [n] * unused, [*chain(*firsts)] + [0] * unused
