"""Attention by this project's own Triton kernels; every length is read on the device alone."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from worker.attention.base import AttentionCaps, check_caps
from worker.cache.pool import KVPool
from worker.errors import Unsupported
from worker.forward.batch import Batch
from worker.forward.context import current
from worker.kernels.attention.paged_attention import (
    PagedPlan,
    PagedTiles,
    choose,
    constants_of,
    paged_attention,
    plan_items,
)
from worker.kernels.attention.prompt_attention import (
    prompt_attention,
    prompt_cache,
    prompt_constants,
    prompt_tiles,
)
from worker.kernels.attention.store_kv import store_kv
from worker.kernels.jit import HAS_TRITON, INTERPRETED


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """What all layers of one pass share."""

    slot_mapping: Tensor  # [num_tokens] i64
    paged: PagedPlan
    is_long: bool  # for prompt_attention, else for paged_attention


class TritonAttention:
    """Prefill, decode and verify windows by one split-KV kernel; long chunks by one that uses TMA.

    Works at any batch shape and any true length up to the batch's host bounds, so a graph that is
    captured at high bounds serves all batches of its bucket. A row's result depends on its own
    tokens, on the batch's padded shape (num_reqs, num_tokens, max_query_len), and for prompts of up
    to SHORT_ROWS rows on whether the bound is above SHORT_KEYS.
    `plan` allocates all scratch, in a capture from the graph's pool; one stream at a time.
    """

    caps: ClassVar[AttentionCaps] = AttentionCaps(
        devices=frozenset({"cuda", "cpu"} if INTERPRETED else {"cuda"}),
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        head_dims=frozenset({32, 64, 128, 256}),
        page_sizes=frozenset(1 << i for i in range(13)),
    )
    static_plan: ClassVar[bool] = True
    SHORT_ROWS: ClassVar[int] = 1024  # of the longest step that is captured without a break

    def __init__(
        self, pool: KVPool, num_heads: int, num_kv_heads: int, head_dim: int, scale: float
    ) -> None:
        if not HAS_TRITON:
            raise Unsupported("attention backend: triton is not installed")
        check_caps(self.caps, pool, num_heads, num_kv_heads, head_dim)
        region = pool.region()
        self.heads = (num_heads, num_kv_heads)
        self.head_dim = head_dim
        self.scale = scale
        self._page_size = region.page_size
        self._item_bytes = getattr(torch, region.dtype).itemsize
        self._layers = [pool.layer(layer_id) for layer_id in range(region.num_layers)]
        # Of long chunks; None for all layers where the GPU or the pool rules their kernel out.
        self._prompts = [prompt_cache(*caches) for caches in self._layers]
        self._num_sms = 132
        if pool.device.type == "cuda":
            self._num_sms = torch.cuda.get_device_properties(pool.device).multi_processor_count

    def plan(self, batch: Batch) -> TritonPlan:
        """See AttentionBackend.plan; device work only."""
        bounds = batch.num_reqs, batch.num_tokens, batch.max_query_len, batch.max_seq_len_ub
        paged = plan_items(
            batch.query_start,
            batch.seq_lens,
            batch.page_table,
            self._tiles(*bounds),
            self.heads,
            self.head_dim,
            self._page_size,
        )
        return TritonPlan(batch.slot_mapping, paged, self._is_long(*bounds[1:3]))

    def variant(
        self, num_reqs: int, num_tokens: int, max_query_len: int, max_seq_len_ub: int
    ) -> Hashable:
        """See AttentionBackend.variant."""
        shape = self.heads, self.head_dim, self._page_size
        tiles = self._tiles(num_reqs, num_tokens, max_query_len, max_seq_len_ub)
        options = tiles.num_warps, tiles.num_stages, tiles.max_registers, tiles.early
        if self._is_long(num_tokens, max_query_len):
            return "long", *prompt_constants(*shape).values(), *options
        return *constants_of(tiles, *shape).values(), *options

    def _is_long(self, num_tokens: int, max_query_len: int) -> bool:
        long = num_tokens > self.SHORT_ROWS and max_query_len > 1
        return long and self._prompts[0] is not None

    def _tiles(
        self, num_reqs: int, num_tokens: int, max_query_len: int, max_seq_len_ub: int
    ) -> PagedTiles:
        if self._is_long(num_tokens, max_query_len):
            return prompt_tiles(num_reqs, num_tokens, max_query_len, self.heads)
        bounds = num_reqs, num_tokens, max_query_len, max_seq_len_ub
        return choose(*bounds, self.heads, self.head_dim, self._item_bytes, self._num_sms)

    def kv(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """See LayerAttention.kv."""
        return self._layers[layer_id]

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer_id: int,
        out: Tensor | None = None,
    ) -> Tensor:
        """See LayerAttention.forward."""
        plan = current().attn_plan
        assert isinstance(plan, TritonPlan), "the plan must be this backend's own"
        caches = self._layers[layer_id]
        if k is not None and v is not None:
            store_kv(k, v, *caches, plan.slot_mapping)
        prompts = self._prompts[layer_id]
        if plan.is_long and prompts is not None:
            return prompt_attention(q, prompts, plan.paged, self.scale, out)
        return paged_attention(q, *caches, plan.paged, self.scale, out)
