"""The contract of attention over the paged cache, and the backends that keep it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from worker.attention.backends import ATTENTION
from worker.cache.pool import KVPool
from worker.errors import Unsupported, UserError
from worker.forward.batch import Batch
from worker.forward.context import LayerAttention
from worker.registry import resolve


@dataclass(frozen=True, slots=True)
class AttentionCaps:
    """What a backend accepts; None: anything."""

    devices: frozenset[str] | None = None  # torch device types
    dtypes: frozenset[str] | None = None  # of the KV region
    head_dims: frozenset[int] | None = None
    page_sizes: frozenset[int] | None = None


class AttentionBackend(LayerAttention, Protocol):
    """Causal attention of ragged query rows over paged keys and values; layers call LayerAttention.

    Built as `cls(pool, num_heads, num_kv_heads, head_dim, scale)`, heads being this rank's.
    Raises Unsupported from there, and nowhere later, if `caps` refuse the pool or the model.
    """

    caps: ClassVar[AttentionCaps]
    # True: plan() only enqueues device work whose shapes follow from host bounds, so a graph may
    # hold plan() and forward(). False: plan() reads batch.host, so it cannot be captured, and
    # batches whose lengths the host does not know (windows of speculation) cannot be served.
    static_plan: ClassVar[bool]

    def plan(self, batch: Batch) -> object:
        """What all layers of one pass share; goes into forward_context(). Never waits.

        Without `static_plan` it may reuse the buffers of the plan two steps back, so that step must
        be over. The engine's loops see to it: they settle a step before they launch the one after
        next.
        """
        ...

    def variant(
        self, num_reqs: int, num_tokens: int, max_query_len: int, max_seq_len_ub: int
    ) -> Hashable:
        """Names the kernel that a batch with such bounds is launched with; None: there is only one.

        The first launch of a variant may wait for a compiler.
        """
        ...


@dataclass(frozen=True, slots=True)
class Attentions:
    """The backend of each kind of batch, over one pool; equal names are one object."""

    prefill: AttentionBackend  # chunks of prompts
    decode: AttentionBackend  # one token of each row
    spec: AttentionBackend  # verify and draft passes: nothing runs on it yet


def build_attentions(
    names: Mapping[str, str],
    pool: KVPool,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: float,
) -> Attentions:
    """Build the backends that `names` gives for the fields of Attentions, each name once.

    Raises:
        UserError: an unknown name, or Unsupported: what a backend's caps refuse. The message and
            `param` begin with the field, as "engine.attention.prefill".
    """
    built: dict[str, AttentionBackend] = {}
    for kind, name in names.items():
        param = f"engine.attention.{kind}"
        if name not in built:
            try:
                cls = resolve("attention backend", name, ATTENTION)
                built[name] = cls(pool, num_heads, num_kv_heads, head_dim, scale)
            except UserError as refusal:
                raise type(refusal)(f"{param}: {refusal}", param) from refusal
    return Attentions(**{kind: built[name] for kind, name in names.items()})


def check_caps(
    caps: AttentionCaps, pool: KVPool, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    """Raise Unsupported, naming the first reason, unless a backend of `caps` can serve the model.

    The pool's "target" region must hold the model's kv heads and head_dim.
    """
    region = pool.region()
    if num_heads % num_kv_heads:
        raise Unsupported(f"{num_heads} heads do not share {num_kv_heads} kv heads evenly")
    if (region.num_kv_heads, region.head_dim) != (num_kv_heads, head_dim):
        raise Unsupported(
            f"the KV layout has {region.num_kv_heads} kv heads of {region.head_dim}, "
            f"the model {num_kv_heads} of {head_dim}"
        )
    checks = (
        ("device", pool.device.type, caps.devices),
        ("KV dtype", region.dtype, caps.dtypes),
        ("head_dim", head_dim, caps.head_dims),
        ("page_size", region.page_size, caps.page_sizes),
    )
    for name, value, allowed in checks:
        if allowed is not None and value not in allowed:
            choices = ", ".join(str(choice) for choice in sorted(allowed))  # type: ignore[type-var]
            raise Unsupported(f"attention backend: {name} {value} is not one of: {choices}")
