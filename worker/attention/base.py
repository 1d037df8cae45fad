"""The contract of attention over the paged cache: a shape, caps that accept it, a backend."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from worker.cache.layout import KVRegion
from worker.cache.pool import KVPool
from worker.config.checkpoint.mask import CAUSAL, KeyMask
from worker.errors import Unsupported
from worker.forward.batch import Batch, Bounds
from worker.forward.context import LayerAttention


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The heads of an instance of a backend: one rank's, over one region of the pool.

    Layers of another mask or another region have an instance of their own.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of the scores
    mask: KeyMask = CAUSAL
    region: str = "target"
    cap: float = 0.0  # scores are cap · tanh(score / cap); 0: as they are
    sinks: bool = False  # heads have logits of their own, which take weight and have no value
    dtype: str = ""  # of queries, where the region's is eight bits
    kind: str = "heads"  # of the layers: a name of worker.config.backends.BACKENDS
    value_dim: int = 0  # leading numbers of a key that are its value; 0: values are kept apart

    @property
    def out_dim(self) -> int:
        """Numbers of a head's result."""
        return self.value_dim or self.head_dim

    @property
    def features(self) -> frozenset[str]:
        """Names of all that it asks for beyond plain causal attention."""
        named = {"cap": self.cap, "sinks": self.sinks}
        return self.mask.unlike_causal | {name for name, wanted in named.items() if wanted}


@dataclass(frozen=True, slots=True)
class AttentionCaps:
    """The shapes that a backend accepts; None: any."""

    devices: frozenset[str] | None = None  # torch device types
    dtypes: frozenset[str] | None = None  # of the KV region
    head_dims: frozenset[int] | None = None
    page_sizes: frozenset[int] | None = None
    features: frozenset[str] | None = None  # of AttentionShape.features
    parts: int = 2  # of a token's row: keys and values; 1: values are numbers of keys

    def lacks(self, shape: AttentionShape) -> str:
        """Why the shape is not served, for people; "": it is."""
        if self.head_dims is not None and shape.head_dim not in self.head_dims:
            choices = ", ".join(map(str, sorted(self.head_dims)))
            return f"head_dim {shape.head_dim} is not one of: {choices}"
        refused = shape.features - self.features if self.features is not None else ()
        return f"cannot serve {shape.mask}: its {', '.join(sorted(refused))}" if refused else ""

    def region(self, pool: KVPool, shape: AttentionShape) -> KVRegion:
        """The region to be served: of rows of tokens, of the shape's kv heads and head_dim.

        Raises Unsupported, which names the first reason, if it cannot be.
        """
        region, kv = pool.region(shape.region), (shape.num_kv_heads, shape.head_dim)
        if shape.num_heads % kv[0]:
            raise Unsupported(f"{shape.num_heads} heads do not share {kv[0]} kv heads evenly")
        if (region.num_kv_heads, region.head_dim) != kv:
            raise Unsupported(
                f"the KV layout has {region.num_kv_heads} kv heads of {region.head_dim}, "
                f"the model {kv[0]} of {kv[1]}"
            )
        if (region.parts, region.rows) != (self.parts, "token"):
            raise Unsupported(
                f"the KV region {region.name!r} has {region.parts} parts a {region.rows}; attention"
                f" needs {self.parts} a token"
            )
        checks = (
            ("device", pool.device.type, self.devices),
            ("KV dtype", region.dtype, self.dtypes),
            ("page_size", region.page_size, self.page_sizes),
        )
        for name, value, allowed in checks:
            if allowed is not None and value not in allowed:
                choices = ", ".join(map(str, sorted(allowed)))  # type: ignore[type-var]
                raise Unsupported(f"attention backend: {name} {value} is not one of: {choices}")
        if lack := self.lacks(shape):
            raise Unsupported(f"attention backend: {lack}")
        return region


class AttentionBackend(LayerAttention, Protocol):
    """Attention of ragged query rows over the paged cache; layers call LayerAttention.

    Built as `cls(pool, shape, sinks)`; sinks: by layer [num_heads], or nothing. Raises
    Unsupported from there, and nowhere later, if `caps` refuse the pool or the shape.
    """

    caps: ClassVar[AttentionCaps]
    # True: plan() only enqueues device work whose shapes follow from host bounds, so a graph may
    # hold plan() and forward(). False: plan() reads batch.host, so it cannot be captured, and
    # batches whose lengths the host does not know (windows of speculation) cannot be served.
    static_plan: ClassVar[bool]

    def plan(self, batch: Batch) -> object:
        """The plan of one pass, for all layers; goes into forward_context(). Never waits.

        Without `static_plan` it may reuse buffers of a plan whose step has settled: two steps back.
        """
        ...

    def variant(self, bounds: Bounds) -> Hashable:
        """Names the kernel that a batch with such bounds is launched with; None: there is only one.

        The first launch of a variant may wait for a compiler.
        """
        ...


class PoolAttention:
    """Base of backends that attend themselves over a region of the pool."""

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


@dataclass(frozen=True, slots=True)
class Attentions:
    """The backends of the kinds of batches, over one pool; equal names are one object."""

    prefill: AttentionBackend  # chunks of prompts
    decode: AttentionBackend  # one token a row
    spec: AttentionBackend  # windows that are verified; `static_plan`
