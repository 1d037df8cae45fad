"""What backends share that attend over a region of the pool themselves."""

from collections.abc import Hashable
from typing import ClassVar

import torch
from torch import Tensor

from worker.attention.base import AttentionCaps, AttentionShape
from worker.cache.layout import KVRegion
from worker.cache.pool import KVPool
from worker.errors import Unsupported
from worker.forward.batch import Bounds


class PoolAttention:
    """What backends have in common that attend over a region of the pool themselves.

    Raises:
        Unsupported: see check_caps.
    """

    caps: ClassVar[AttentionCaps]

    def __init__(self, pool: KVPool, shape: AttentionShape) -> None:
        self.region = check_caps(self.caps, pool, shape)
        self.shape, self.heads = shape, (shape.num_heads, shape.num_kv_heads)
        self.dtype: torch.dtype = getattr(torch, self.region.dtype)
        self._layers = pool.layers(shape.region)

    def kv(self, layer_id: int) -> tuple[Tensor, ...]:
        return self._layers[layer_id]

    def variant(self, bounds: Bounds) -> Hashable:
        """Nothing is compiled for a batch."""
        return None


def check_caps(caps: AttentionCaps, pool: KVPool, shape: AttentionShape) -> KVRegion:
    """Return the region that a backend of `caps` serves.

    Raises:
        Unsupported: it cannot; the message names the first reason. The region must hold rows of
            tokens, of the shape's kv heads and head_dim.
    """
    region, kv = pool.region(shape.region), (shape.num_kv_heads, shape.head_dim)
    if shape.num_heads % kv[0]:
        raise Unsupported(f"{shape.num_heads} heads do not share {kv[0]} kv heads evenly")
    if (region.num_kv_heads, region.head_dim) != kv:
        raise Unsupported(
            f"the KV layout has {region.num_kv_heads} kv heads of {region.head_dim}, "
            f"the model {kv[0]} of {kv[1]}"
        )
    if region.parts not in caps.parts or region.rows != "token":
        raise Unsupported(
            f"the KV region {region.name!r} has {region.parts} parts a {region.rows}; attention "
            f"needs {' or '.join(map(str, sorted(caps.parts)))} a token"
        )
    checks = (
        ("device", pool.device.type, caps.devices),
        ("KV dtype", region.dtype, caps.dtypes),
        ("head_dim", shape.head_dim, caps.head_dims),
        ("page_size", region.page_size, caps.page_sizes),
    )
    for name, value, allowed in checks:
        if allowed is not None and value not in allowed:
            choices = ", ".join(str(choice) for choice in sorted(allowed))  # type: ignore[type-var]
            raise Unsupported(f"attention backend: {name} {value} is not one of: {choices}")
    refused = shape.mask.unlike_causal - caps.masks if caps.masks is not None else ()
    if refused:
        raise Unsupported(
            f"attention backend: cannot serve {shape.mask}: its {', '.join(sorted(refused))}"
        )
    return region
