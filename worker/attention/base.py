"""The contract of attention over the paged cache, and the backends that keep it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from worker.attention.backends import ATTENTION
from worker.cache.layout import KVRegion
from worker.cache.pool import KVPool
from worker.errors import Unsupported, UserError
from worker.forward.batch import Batch
from worker.forward.context import LayerAttention
from worker.ops.mask import CAUSAL, KeyMask
from worker.registry import resolve


@dataclass(frozen=True, slots=True)
class AttentionCaps:
    """What a backend accepts; None: anything."""

    devices: frozenset[str] | None = None  # torch device types
    dtypes: frozenset[str] | None = None  # of the KV region
    head_dims: frozenset[int] | None = None
    page_sizes: frozenset[int] | None = None
    masks: frozenset[str] | None = None  # KeyMask's fields that may differ from CAUSAL's


class AttentionBackend(LayerAttention, Protocol):
    """Attention of ragged query rows over paged keys and values; layers call LayerAttention.

    Built as `cls(pool, num_heads, num_kv_heads, head_dim, scale, mask=CAUSAL, region="target")`,
    heads being this rank's. Which keys a row sees (KeyMask) holds for the instance: layers of
    another mask or region have an instance of their own.
    Raises Unsupported from there, and nowhere later, if `caps` refuse the pool, the model or the
    mask.
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
    spec: AttentionBackend  # windows that are verified; `static_plan`


def build_attentions(
    names: Mapping[str, str],
    pool: KVPool,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: float,
    mask: KeyMask = CAUSAL,
    region: str = "target",
) -> Attentions:
    """Build the backends that `names` gives for the fields of Attentions, each name once.

    Without `spec`, where there are no windows, it is that of `decode`.

    Raises:
        UserError: an unknown name, or Unsupported: what a backend's caps refuse, or one without
            `static_plan` for `spec`. The message and `param` begin with the field, as
            "engine.attention.prefill".
    """
    built: dict[str, AttentionBackend] = {}
    for kind, name in names.items():
        param = f"engine.attention.{kind}"
        if name not in built:
            try:
                cls = resolve("attention backend", name, ATTENTION)
                built[name] = cls(pool, num_heads, num_kv_heads, head_dim, scale, mask, region)
            except UserError as refusal:
                raise type(refusal)(f"{param}: {refusal}", param) from refusal
        if kind == "spec" and not built[name].static_plan:
            raise Unsupported(
                f"{param}: {name} plans on the host, which does not know the lengths of windows; "
                "name one that does not, as triton, or leave it auto",
                param,
            )
    names = {"spec": names["decode"], **names}
    return Attentions(**{kind: built[name] for kind, name in names.items()})


def check_caps(
    caps: AttentionCaps,
    pool: KVPool,
    heads: tuple[int, int],
    head_dim: int,
    mask: KeyMask,
    region_name: str,
) -> KVRegion:
    """Return the region that a backend of `caps` serves, for a model's (query, kv) heads.

    Raises:
        Unsupported: it cannot; the message names the first reason. The region must hold keys and
            values a token, of the model's kv heads and head_dim.
    """
    region = pool.region(region_name)
    num_heads, num_kv_heads = heads
    if num_heads % num_kv_heads:
        raise Unsupported(f"{num_heads} heads do not share {num_kv_heads} kv heads evenly")
    if (region.num_kv_heads, region.head_dim) != (num_kv_heads, head_dim):
        raise Unsupported(
            f"the KV layout has {region.num_kv_heads} kv heads of {region.head_dim}, "
            f"the model {num_kv_heads} of {head_dim}"
        )
    if (region.parts, region.rows) != (2, "token"):
        raise Unsupported(f"the KV region {region.name!r} holds no keys and values of tokens")
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
    refused = mask.unlike_causal - caps.masks if caps.masks is not None else ()
    if refused:
        raise Unsupported(
            f"attention backend: cannot serve {mask}: its {', '.join(sorted(refused))}"
        )
    return region
