"""ForwardContext: the current forward pass, the only ambient state that a layer may read."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from worker.forward.batch import Batch

LayerHook = Callable[[int], None]


class LayerAttention(Protocol):
    """The part of an attention backend that a layer calls; worker.attention.base has the rest."""

    def kv(self, layer_id: int) -> tuple[Tensor, ...]:
        """One layer's parts, as keys and values; see KVPool.layer."""
        ...

    def forward(self, q: Tensor, layer_id: int, out: Tensor | None = None) -> Tensor:
        """Attend up to the tokens' positions; the tokens' own keys and values are stored already.

        q: [num_tokens, num_heads, head_dim] of the pool's dtype. Returns the same shape, or with
        AttentionShape.value_dim for head_dim, in the memory of `out` if given (of that shape and
        q's dtype, contiguous); padded tokens are zero. The plan is the current context's. A result
        depends on no slot past its request's KV length.
        """
        ...


class Breaks(Protocol):
    """A capture under way that can put host code between segments; see worker.run.segments."""

    def at(self, body: Callable[[Tensor, Tensor], object], x: Tensor, out: Tensor) -> Tensor:
        """Put `body(x, out)` between two segments; returns `out`."""
        ...


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What one forward pass runs on. `attn_plan` is what `attention.plan(batch)` returned."""

    batch: Batch
    attention: LayerAttention
    attn_plan: object
    # The layer hook: host code, called with the layers' ids, in order, once every kernel that
    # writes the layer's KV is enqueued. None while capturing: breaks call the hook of the replay.
    on_layer: LayerHook | None = None
    breaks: Breaks | None = None  # None: not capturing, or a decode step, which has no breaks


_current: ContextVar[ForwardContext | None] = ContextVar("forward_context", default=None)


@contextmanager
def forward_context(
    batch: Batch,
    attention: LayerAttention,
    attn_plan: object,
    *,
    on_layer: LayerHook | None = None,
    breaks: Breaks | None = None,
) -> Iterator[ForwardContext]:
    """Make a new context current within the block; restore the former one afterwards."""
    context = ForwardContext(batch, attention, attn_plan, on_layer, breaks)
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)


def current() -> ForwardContext:
    """Return the context of the innermost open `forward_context` of this thread."""
    context = _current.get()
    assert context is not None, "no forward pass is under way: open forward_context() first"
    return context
