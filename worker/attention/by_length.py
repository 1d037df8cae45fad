"""Prompts by two backends: our kernels for steps that graphs hold, FlashInfer's for long ones."""

from collections.abc import Hashable, Mapping, Sequence
from typing import ClassVar, NamedTuple

from torch import Tensor

from worker.attention.base import AttentionBackend, AttentionCaps, AttentionShape
from worker.cache.pool import KVPool
from worker.config.backends import ATTENTION
from worker.forward.batch import Batch, Bounds
from worker.forward.context import current, forward_context
from worker.registry import resolve


class ByLengthPlan(NamedTuple):
    """A plan and the backend that made it."""

    backend: AttentionBackend
    plan: object


class ByLengthAttention:
    """`SHORT` for batches of up to `SHORT_ROWS` rows, decode steps and windows, `LONG` beyond.

    The choice depends on the batch's padded shape alone, so breaks of graphs and eager agree. At
    2048 tokens FA3 takes 90 us a layer, our kernel 122. For shorter steps FA3's plan on the host
    costs more than it saves, and no graph can hold it. `SHORT` serves shapes that `LONG` lacks.
    """

    SHORT: ClassVar[str] = "triton"
    LONG: ClassVar[str] = "flashinfer"
    SHORT_ROWS: ClassVar[int] = 1024  # of the longest step that is captured without a break
    TABLE: ClassVar[Mapping[str, str]] = ATTENTION
    caps: ClassVar[AttentionCaps] = AttentionCaps()  # the two check their own
    static_plan: ClassVar[bool] = True  # of `SHORT`; only its batches are captured

    def __init__(self, pool: KVPool, shape: AttentionShape, sinks: Sequence[Tensor] = ()) -> None:
        short, long = (resolve("attention backend", x, self.TABLE) for x in (self.SHORT, self.LONG))
        self._short = self._long = short(pool, shape, sinks)
        known = long.caps.dtypes is None or pool.region(shape.region).dtype in long.caps.dtypes
        if known and not long.caps.lacks(shape):
            self._long = long(pool, shape)

    def plan(self, batch: Batch) -> ByLengthPlan:
        # Of windows the host does not know the lengths.
        backend = self._short if batch.host is None else self._backend(batch.bounds)
        return ByLengthPlan(backend, backend.plan(batch))

    def variant(self, bounds: Bounds) -> Hashable:
        return self._backend(bounds).variant(bounds)

    def kv(self, layer_id: int) -> tuple[Tensor, ...]:
        return self._short.kv(layer_id)

    def forward(self, q: Tensor, layer_id: int, out: Tensor | None = None) -> Tensor:
        context = current()
        assert isinstance(context.attn_plan, ByLengthPlan), "the plan must be this backend's own"
        backend, plan = context.attn_plan
        with forward_context(context.batch, backend, plan):
            return backend.forward(q, layer_id, out)

    def _backend(self, bounds: Bounds) -> AttentionBackend:
        is_long = bounds.num_tokens > self.SHORT_ROWS and bounds.max_query_len > 1
        return self._long if is_long else self._short
