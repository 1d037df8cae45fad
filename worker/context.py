"""The only ambient state that a layer may read: the forward pass under way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from worker.batch import Batch


class LayerAttention(Protocol):
    """The part of an attention backend that a layer calls; see worker.attention.base."""

    def kv(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """One layer's keys and values; see AttentionBackend.kv."""
        ...

    def forward(self, q: Tensor, k: Tensor | None, v: Tensor | None, layer_id: int) -> Tensor:
        """Attend to what is stored; see AttentionBackend.forward."""
        ...


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What one forward pass runs on. `attn_plan` is what `attention.plan(batch)` returned."""

    batch: Batch
    attention: LayerAttention
    attn_plan: object


_current: ContextVar[ForwardContext | None] = ContextVar("forward_context", default=None)


@contextmanager
def forward_context(
    batch: Batch, attention: LayerAttention, attn_plan: object
) -> Iterator[ForwardContext]:
    """Make one pass's context current within the block; the one before returns afterwards."""
    context = ForwardContext(batch, attention, attn_plan)
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)


def current() -> ForwardContext:
    """The context of the innermost open `forward_context` of this thread."""
    context = _current.get()
    assert context is not None, "no forward pass is under way: open forward_context() first"
    return context
