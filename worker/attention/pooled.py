"""PoolAttention: base of backends that attend over a region of the pool themselves."""

from collections.abc import Hashable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from worker.attention.base import AttentionCaps, AttentionShape
from worker.cache.pool import KVPool
from worker.forward.batch import Bounds


class PoolAttention:
    """The region, its layers and the shape; `caps` refuse shapes that a backend cannot serve."""

    caps: ClassVar[AttentionCaps]

    def __init__(self, pool: KVPool, shape: AttentionShape, sinks: Sequence[Tensor] = ()) -> None:
        self.region = self.caps.region(pool, shape)
        assert bool(sinks) == shape.sinks
        self.sinks = sinks or [None] * self.region.num_layers
        self.shape, self.heads = shape, (shape.num_heads, shape.num_kv_heads)
        self.dtype: torch.dtype = getattr(torch, shape.dtype or self.region.dtype)
        self._layers = pool.layers(shape.region)

    def kv(self, layer_id: int) -> tuple[Tensor, ...]:
        return self._layers[layer_id]

    def variant(self, bounds: Bounds) -> Hashable:
        return None  # nothing is compiled for a batch
