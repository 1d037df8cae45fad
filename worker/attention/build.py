"""The attention backends of a worker, by their names."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from worker.attention.base import AttentionBackend, Attentions, AttentionShape
from worker.cache.pool import KVPool
from worker.config.backends import BACKENDS
from worker.config.checkpoint.mask import KeyMask
from worker.errors import Unsupported, UserError
from worker.forward.batch import Batch, Bounds
from worker.forward.context import current, forward_context
from worker.registry import resolve


class ByLayerAttention:
    """One kind of backend with several masks: a backend for the layers of one mask."""

    def __init__(self, backends: Sequence[AttentionBackend]) -> None:
        """backends: by layer; layers that see the same keys share one."""
        self._backends = backends
        self.caps, self.static_plan = backends[0].caps, backends[0].static_plan

    def plan(self, batch: Batch) -> Mapping[AttentionBackend, object]:
        """Plans by backend."""
        return {backend: backend.plan(batch) for backend in dict.fromkeys(self._backends)}

    def variant(self, bounds: Bounds) -> Hashable:
        return tuple(backend.variant(bounds) for backend in dict.fromkeys(self._backends))

    def kv(self, layer_id: int) -> tuple[Tensor, ...]:
        return self._backends[layer_id].kv(layer_id)

    def forward(self, q: Tensor, layer_id: int, out: Tensor | None = None) -> Tensor:
        context, backend = current(), self._backends[layer_id]
        assert isinstance(context.attn_plan, dict), "the plan must be this backend's own"
        with forward_context(context.batch, backend, context.attn_plan[backend]):
            return backend.forward(q, layer_id, out)


def build_attentions(
    names: Mapping[str, str],
    pool: KVPool,
    shape: AttentionShape,
    masks: Sequence[KeyMask] = (),
    sinks: Sequence[Tensor] = (),
) -> Attentions:
    """Build the backends that `names` gives for the fields of Attentions, a name once.

    masks: by layer; (): all have that of `shape`. sinks: see AttentionBackend.
    Without `spec`, where there are no windows, it is that of `decode`. Raises UserError for an
    unknown name; Unsupported for a shape that a backend's caps refuse, or for `spec` a backend
    without `static_plan`. Message and `param` begin with the field, as "engine.attention.prefill".
    """
    built: dict[str, Any] = {}
    for kind, name in names.items():
        param = f"engine.attention.{kind}"
        if name not in built:
            try:
                cls = resolve("attention backend", name, BACKENDS[shape.kind])
                shapes = {mask: replace(shape, mask=mask) for mask in masks or (shape.mask,)}
                made = {mask: cls(pool, masked, sinks) for mask, masked in shapes.items()}
                alone = made[masks[0] if masks else shape.mask]
                several = len(made) > 1
                built[name] = ByLayerAttention([made[x] for x in masks]) if several else alone
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
