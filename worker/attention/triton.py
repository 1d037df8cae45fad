"""Attention by this project's own Triton kernels; every length is read on the device alone."""

import logging
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from worker.attention.base import AttentionCaps, AttentionShape, PoolAttention
from worker.attention.paged_plan_triton import PagedPlan, plan_items
from worker.attention.paged_tiles import MAX_BLOCK, Chip, PagedTiles, choose
from worker.attention.paged_triton import constants_of, options_of, paged_attention
from worker.attention.prompt_triton import (
    PromptKernel,
    PromptPlan,
    has_room,
    hopper_serves,
    num_rows,
    plan_prompts,
    prompt_attention,
    prompt_constants,
    serves,
)
from worker.cache.pool import KVPool
from worker.config.checkpoint.mask import CAUSAL
from worker.errors import Unsupported
from worker.forward.batch import Batch, Bounds
from worker.forward.context import current
from worker.ops.jit import HAS_TRITON, INTERPRETED, from_gluon, num_sms, power_of_two

log = logging.getLogger("kvlane.attention")
IN_GLUON = "worker.attention.prompt_gluon", "KERNEL"


class TritonAttention(PoolAttention):
    """Prefill, decode and verify windows by one split-KV kernel, long chunks over gathered keys.

    Works at any batch shape and any true length up to the batch's host bounds, so a graph that is
    captured at high bounds serves all batches of its bucket. A row's result depends on its own
    tokens, on the batch's padded shape (num_reqs, num_tokens, max_query_len), for prompts of up to
    SHORT_ROWS rows on whether the bound is above SHORT_KEYS, and for longer ones on whether all
    requests' keys are more than MAX_GATHERED.
    `plan` allocates all scratch, in a capture from the graph's pool; one stream at a time.
    """

    caps: ClassVar[AttentionCaps] = AttentionCaps(
        devices=frozenset({"cuda", "cpu"} if INTERPRETED else {"cuda"}),
        dtypes=frozenset({"float32", "bfloat16", "float16", "float8_e4m3fn"}),
        head_dims=frozenset({32, 64, 96, 128, 256}),
        page_sizes=frozenset(1 << i for i in range(13)),
    )
    static_plan: ClassVar[bool] = True
    SHORT_ROWS: ClassVar[int] = 1024  # of the longest step that is captured without a break
    # Of all requests of a batch; more stay in their pages. 0.5 GB for 8 kv heads of 128 in 16 bits,
    # which is taken beside the pool, when such prompts come.
    MAX_GATHERED: ClassVar[int] = 131_072

    def __init__(self, pool: KVPool, shape: AttentionShape, sinks: Sequence[Tensor] = ()) -> None:
        if not HAS_TRITON:
            raise Unsupported("attention backend: triton is not installed")
        super().__init__(pool, shape, sinks)
        is_plain = replace(shape.mask, window=None) == CAUSAL
        keys = self._layers[0][0]
        self._has_prompts = is_plain and serves(keys, self.dtype)
        wanted = self._has_prompts and hopper_serves(keys, shape)
        # None: prompt_triton's.
        self.prompt_kernel: PromptKernel | None = from_gluon(*IN_GLUON) if wanted else None
        self._gathered: Tensor | None = None  # keys and values of a batch of long chunks
        self._max_gathered = self.MAX_GATHERED  # less once there was no memory for more
        self._chip = Chip(num_sms(pool.device), has_room(keys))

    def plan(self, batch: Batch) -> PagedPlan | PromptPlan:
        lengths = batch.query_start, batch.seq_lens, batch.page_table
        bounds = batch.bounds
        if batch.host is not None and self._is_long(bounds):
            room = self._room(num_rows(batch.host.seq_lens), batch.seq_lens.device)
            if room is not None:
                return plan_prompts(*lengths, bounds, self.shape, room, self.prompt_kernel)
        return plan_items(*lengths, self._tiles(bounds), self.shape, self.region.page_size)

    def variant(self, bounds: Bounds) -> Hashable:
        if self._is_long(bounds):
            return "long", *prompt_constants(self.shape).values()
        tiles = self._tiles(bounds)
        kept = self._layers[0][0].dtype
        constants = constants_of(tiles, self.shape, self.region.page_size, kept)
        options = options_of(tiles, self.shape, constants)
        return *constants.values(), *options.items(), tiles.early

    def _is_long(self, bounds: Bounds) -> bool:
        long = bounds.num_tokens > self.SHORT_ROWS and bounds.max_query_len > 1
        return long and self._has_prompts and num_rows([bounds.max_seq_len]) <= self.MAX_GATHERED

    def _room(self, num_rows: int, device: torch.device) -> Tensor | None:
        """[2, kv_heads, rows, head_dim or the next power of two] with at least so many rows.

        Steps use it in their order.

        None: they are too many, or the GPU has no memory for them beside the pool.
        """
        if num_rows > self._max_gathered:
            return None
        if self._gathered is None or self._gathered.shape[2] < num_rows:
            wide = power_of_two(self.shape.head_dim)
            shape = 2, self.heads[1], power_of_two(num_rows), wide
            self._gathered = None  # before the next is taken
            try:
                self._gathered = torch.empty(shape, dtype=self.dtype, device=device)
            except torch.OutOfMemoryError:
                self._max_gathered = num_rows - 1
                log.warning("no memory to gather %d keys: longer prompts are slower", num_rows)
        return self._gathered

    def _tiles(self, bounds: Bounds) -> PagedTiles:
        head_dim, item_bytes = power_of_two(self.shape.head_dim), self.dtype.itemsize
        if (window := self.shape.mask.window) is not None:
            # A tile's keys: those that its rows see, and those before them in the first block.
            seen = min(bounds.max_seq_len, window + bounds.max_query_len + MAX_BLOCK)
            bounds = bounds._replace(max_seq_len=seen)
        return choose(bounds, self.heads, head_dim, item_bytes, self._chip)

    def forward(self, q: Tensor, layer_id: int, out: Tensor | None = None) -> Tensor:
        plan, (keys, values) = current().attn_plan, self._layers[layer_id]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        if isinstance(plan, PromptPlan):
            return prompt_attention(q, keys, values, plan, out, self.sinks[layer_id])
        assert isinstance(plan, PagedPlan), "the plan must be this backend's own"
        return paged_attention(q, keys, values, plan, out, self.sinks[layer_id])
