"""The contract of attention over the paged cache, and the backends that keep it."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from worker.attention.backends import ATTENTION
from worker.cache.pool import KVPool
from worker.errors import Unsupported, UserError
from worker.forward.batch import Batch, Bounds
from worker.forward.context import LayerAttention
from worker.ops.mask import CAUSAL, KeyMask
from worker.registry import resolve


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What an instance of a backend attends with: one rank's heads, over one region of the pool.

    Layers of another mask or another region have an instance of their own.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of the scores
    mask: KeyMask = CAUSAL
    region: str = "target"


@dataclass(frozen=True, slots=True)
class AttentionCaps:
    """What a backend accepts; None: anything."""

    devices: frozenset[str] | None = None  # torch device types
    dtypes: frozenset[str] | None = None  # of the KV region
    head_dims: frozenset[int] | None = None
    page_sizes: frozenset[int] | None = None
    masks: frozenset[str] | None = None  # KeyMask's fields that may differ from CAUSAL's
    parts: frozenset[int] = frozenset({2})  # of a token's row in the region: keys and values


class AttentionBackend(LayerAttention, Protocol):
    """Attention of ragged query rows over the paged cache; layers call LayerAttention.

    Built as `cls(pool, shape)`. Raises Unsupported from there, and nowhere later, if `caps` refuse
    the pool or the shape.
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

    def variant(self, bounds: Bounds) -> Hashable:
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


def build_attentions(names: Mapping[str, str], pool: KVPool, shape: AttentionShape) -> Attentions:
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
                built[name] = resolve("attention backend", name, ATTENTION)(pool, shape)
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
