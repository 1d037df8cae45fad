"""Chunks of prompts as CUDA graphs with a break at the attention of each layer.

A piecewise capture knows one thing of a batch, its padded number of tokens: token ids, positions
and slots lie in the buffers of `BatchBuffers`, padded to a bucket with tokens of the sink. The
number of requests, their lengths and their pages matter to attention alone, which is planned and
launched for the live batch. The embedding and the head stay outside, so the graphs hold the layers
and the final norm.

Where the attention backend reads all of that on the device, small buckets are captured as one graph
as well, for a few requests that are not long (`BatchBuffers.fixed_reqs`). Between the pieces of a
piecewise replay the GPU idles for a moment, and kernels of two pieces do not overlap, which shows
where a layer takes 100 us. A step with a layer hook is always replayed piecewise.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from worker.forward.batch import Batch
from worker.forward.context import LayerHook, forward_context
from worker.graph.base import BucketCheck, Forward, LoadedModel, PaddedShape
from worker.graph.check import check_chunk_bucket, report
from worker.graph.eager import EagerChunks
from worker.graph.segments import Capture, Cuts, GraphMemory
from worker.kernels.gemm.product import MAX_STREAMED_ROWS
from worker.kernels.launch import power_of_two
from worker.plan import Chunk, Plan

log = logging.getLogger("kvlane.graph")

MAX_BUCKET = 4096  # one layer of more tokens takes longer to compute than to launch on any model
MAX_FULL = 1024  # beyond, the moments between pieces are nothing beside a layer's time
CUT_AFTER = frozenset({2, 8})  # layers of a full capture; its launch takes 8 us a layer
# A replay frees the host, so a graph is kept where eager is hardly faster: two measurements of the
# same thing differ by as much.
TIE = 1.02
FREE_TOKENS = MAX_STREAMED_ROWS  # up to so many a product takes the time of reading its weights


@dataclass(slots=True)
class Bucket:
    """A padded number of tokens that may have graphs; times as measured at the start, 0 = not."""

    num_tokens: int
    eager_ms: float = 0.0
    piecewise_ms: float = 0.0
    full_ms: float = 0.0
    piecewise: bool = True  # captured so, and faster than eager
    full: bool = False  # captured as one graph, and faster than both


@dataclass(slots=True, frozen=True)
class Captured:
    """One bucket's graphs, and their result, which the next replay of any bucket overwrites."""

    capture: Capture
    hidden: Tensor  # [bucket, hidden], or of the last-token rows; memory of the capture


class PiecewiseChunks:
    """The ChunkGraphs that replays.

    Args:
        loaded: what a step is made of.
        memory: of all captures.
        traced: the forward to capture, [num_tokens, hidden] and positions to [num_tokens, hidden];
            None: the model's own, see Decoder.forward.
        rounding: see `check_chunk_bucket`.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        memory: GraphMemory,
        traced: Callable[[Tensor, Tensor], Tensor] | None = None,
        rounding: float = 0.0,
    ) -> None:
        max_tokens = int(loaded.config.max_prefill_tokens)
        self.buckets = [Bucket(n) for n in chunk_buckets(max_tokens)]
        self._loaded, self._memory, self._eager = loaded, memory, EagerChunks(loaded)
        self._traced = traced
        self._rounding = rounding
        self._piecewise: dict[int, Captured] = {}
        self._full: dict[int, Captured] = {}
        self._compiled: set[Hashable] = {None}  # variants of the attention kernel
        weight = loaded.model.embedding.weight
        shape = self.buckets[-1].num_tokens, weight.shape[1]
        self._embedded = torch.zeros(shape, dtype=weight.dtype, device=weight.device)

    @torch.inference_mode()
    def try_largest(self) -> None:
        """See ChunkGraphs.try_largest."""
        self._capture_bucket(self.buckets[-1])

    @torch.inference_mode()
    def capture(self) -> Sequence[BucketCheck]:
        """Capture every bucket, the largest first, so that smaller ones reuse its memory.

        Raises:
            AssertionError: a bucket and eager differ, and engine.strict is set.
        """
        began, free = time.monotonic(), self._memory.free_bytes()
        for bucket in reversed(self.buckets):
            self._capture_bucket(bucket)
            self._compile_attention(bucket.num_tokens)
        captured = *self._piecewise.values(), *self._full.values()
        log.info(
            "captured chunks of %s tokens: %d graphs in %.1f s, %.2f GiB",
            ", ".join(str(bucket.num_tokens) for bucket in self.buckets),
            sum(each.capture.num_segments for each in captured),
            time.monotonic() - began, (free - self._memory.free_bytes()) / (1 << 30),
        )  # fmt: skip
        began = time.monotonic()
        checks = [check for bucket in self.buckets for check in self._check(bucket)]
        log.info("compared them with eager in %.1f s", time.monotonic() - began)
        return checks

    def padded(
        self, num_tokens: int, num_reqs: int, max_seq_len_ub: int, *, hooked: bool
    ) -> PaddedShape:
        """See ChunkGraphs.padded."""
        buffers = self._loaded.buffers
        fits = num_reqs <= buffers.fixed_reqs and max_seq_len_ub <= buffers.max_fixed_len
        shape = admit(num_tokens, self.buckets, full=fits and not hooked)
        if shape.num_tokens and num_reqs > buffers.max_reqs(shape.num_tokens):
            return PaddedShape(refused="many")
        return shape

    def launch(self, batch: Batch, on_layer: LayerHook | None = None) -> Forward:
        """See ChunkGraphs.launch; a batch of a bucket's size is replayed whatever it holds."""
        fixed = batch.host is None
        captured = (self._full if fixed else self._piecewise).get(batch.num_tokens)
        rows = batch.last_token_rows
        num_hidden = batch.num_tokens if rows is None else len(rows)
        if captured is None or len(captured.hidden) != num_hidden:
            return self._eager.launch(batch, on_layer)
        attention, model = self._loaded.attention.prefill, self._loaded.model
        self._embedded[: batch.num_tokens].copy_(model.embed(batch.input_ids))
        if fixed:
            assert on_layer is None, "a graph without breaks calls no hook"
            captured.capture.replay()
            return Forward(captured.hidden, "graph")
        attn_plan = attention.plan(batch)
        with forward_context(batch, attention, attn_plan, on_layer=on_layer):
            captured.capture.replay()
        return Forward(captured.hidden, "piecewise")

    def close(self) -> None:
        """See ChunkGraphs.close."""
        self._piecewise.clear()
        self._full.clear()

    def _capture_bucket(self, bucket: Bucket) -> None:
        num_tokens, static = bucket.num_tokens, self._loaded.attention.prefill.static_plan
        self._piecewise[num_tokens] = self._capture_piecewise(num_tokens)
        hooked = self._loaded.capabilities.hooks_every_chunk
        bucket.full = static and not hooked and num_tokens <= MAX_FULL
        if bucket.full:
            self._full[num_tokens] = self._capture_full(num_tokens)

    def _capture_piecewise(self, num_tokens: int) -> Captured:
        attention, capture = self._loaded.attention.prefill, Capture(self._memory)
        batch = self._loaded.buffers.blank_chunk(num_tokens)

        def body(breaks: Capture | None) -> Tensor:
            attn_plan = attention.plan(batch) if breaks is None else None  # no break runs now
            with forward_context(batch, attention, attn_plan, breaks=breaks):
                return self._forward(batch)

        hidden = capture.record(body)
        return Captured(capture, self._memory.alias(hidden))

    def _capture_full(self, num_tokens: int) -> Captured:
        attention, capture = self._loaded.attention.prefill, Capture(self._memory)
        length = min(num_tokens, self._loaded.max_len)
        plan = Plan(0, chunks=(Chunk(0, 0, (0,) * length),), max_seq_len_ub=length)  # the sink's
        batch = self._loaded.buffers.chunks(plan, num_tokens, fixed_shape=True)

        def body(under_way: Capture | None) -> Tensor:
            cuts = None if under_way is None else Cuts(under_way, CUT_AFTER)
            with forward_context(batch, attention, attention.plan(batch), breaks=cuts):
                return self._forward(batch)

        hidden = capture.record(body)
        return Captured(capture, self._memory.alias(hidden))

    def _forward(self, batch: Batch) -> Tensor:
        embedded, rows = self._embedded[: batch.num_tokens], batch.last_token_rows
        if self._traced is None:
            return self._loaded.model.forward(embedded, batch.positions, rows)
        hidden = self._traced(embedded, batch.positions)
        return hidden if rows is None else hidden.index_select(0, rows)

    def _compile_attention(self, num_tokens: int) -> None:
        """Launch every kernel variant that a bucket may need: compiling it later is a stall."""
        loaded, attention = self._loaded, self._loaded.attention.prefill
        longest = min(num_tokens, loaded.max_len)
        lengths = {min(longest, 1 << i) for i in range(power_of_two(longest).bit_length())}
        counts = range(1, min(loaded.config.max_num_reqs, num_tokens) + 1)
        for length, bound, num_reqs in product(lengths, {1, loaded.max_len}, counts):
            coarse, longest_ub = min(num_tokens, power_of_two(length)), max(length, bound)
            variant = attention.variant(num_reqs, num_tokens, coarse, longest_ub)
            if num_reqs - 1 > num_tokens - length or variant in self._compiled:
                continue
            self._compiled.add(variant)
            chunks = (Chunk(0, 0, (0,) * length), *[Chunk(0, 0, (0,))] * (num_reqs - 1))  # sink's
            plan = Plan(0, chunks=chunks, max_seq_len_ub=longest_ub)
            shape = num_tokens, loaded.model.heads.num_heads, loaded.model.spec.head_dim
            q = torch.zeros(shape, dtype=self._embedded.dtype, device=self._embedded.device)
            batch = loaded.buffers.chunks(plan, num_tokens)
            with forward_context(batch, attention, attention.plan(batch)):
                attention.forward(q, None, None, 0)

    def _check(self, bucket: Bucket) -> Sequence[BucketCheck]:
        """Compare a bucket with eager, result and time, and drop the graphs that do not win."""
        num_tokens = bucket.num_tokens
        piecewise = self._compare(num_tokens, fixed_shape=False)
        full = self._compare(num_tokens, fixed_shape=True) if num_tokens in self._full else None
        if piecewise is not None:
            bucket.eager_ms, bucket.piecewise_ms = piecewise.eager_ms, piecewise.graph_ms
            bucket.piecewise = piecewise.graph_ms < TIE * piecewise.eager_ms
        bucket.full = False  # what was not compared is not replayed; piecewise will do
        if full is not None:
            bucket.full_ms = full.graph_ms
            bucket.full = full.graph_ms < min(full.eager_ms, bucket.piecewise_ms or full.eager_ms)
        for kept, captured, what in (
            (bucket.piecewise, self._piecewise, "piecewise"),
            (bucket.full, self._full, "as one graph"),
        ):
            if not kept and captured.pop(num_tokens, None) is not None:
                log.info("%d tokens: not %s, others are as fast", num_tokens, what)
        return [check for check in (piecewise, full) if check is not None]

    def _compare(self, num_tokens: int, *, fixed_shape: bool) -> BucketCheck | None:
        what = f"{num_tokens} tokens, {'as one graph' if fixed_shape else 'piecewise'}"
        found = check_chunk_bucket(
            self._loaded,
            num_tokens,
            lambda batch: self._eager.launch(batch).hidden,
            lambda batch: self.launch(batch).hidden,
            fixed_shape=fixed_shape,
            rounding=self._rounding,
        )
        if found is None:
            log.info("%s: not compared, the KV pool is too small", what)
        else:
            report(found, what, strict=self._loaded.config.strict)
        return found


def admit(num_tokens: int, buckets: Sequence[Bucket], *, full: bool = False) -> PaddedShape:
    """How a batch of `num_tokens` is replayed, or why it is launched eagerly.

    It is refused as too_long, dropped (eager is as fast) or padding (the padded tokens would cost
    more than launching op by op: more than as many again, or by the times of the buckets);
    `PiecewiseChunks.padded` adds many (more requests than hidden states are computed of).

    Args:
        num_tokens: of the batch.
        buckets: by number of tokens, ascending.
        full: one graph would serve it: it has no layer hook, and its requests fit the fixed shape.
    """
    at = bisect.bisect_left([bucket.num_tokens for bucket in buckets], num_tokens)
    if at == len(buckets):
        return PaddedShape(refused="too_long")
    bucket = buckets[at]
    full = full and bucket.full
    if not full and not bucket.piecewise:
        return PaddedShape(refused="dropped")
    if bucket.num_tokens > max(2 * num_tokens, FREE_TOKENS):
        return PaddedShape(refused="padding")
    graph_ms = bucket.full_ms if full else bucket.piecewise_ms
    if at and graph_ms:
        below = buckets[at - 1]
        share = (num_tokens - below.num_tokens) / (bucket.num_tokens - below.num_tokens)
        eager_ms = below.eager_ms + share * (bucket.eager_ms - below.eager_ms)
        if below.eager_ms and graph_ms > TIE * eager_ms:
            return PaddedShape(refused="padding")
    return PaddedShape(bucket.num_tokens, fixed=full)


def chunk_buckets(max_tokens: int) -> list[int]:
    """Numbers of tokens that get graphs, ascending; the last is `max_tokens`, or MAX_BUCKET."""
    last = min(max_tokens, MAX_BUCKET)
    sizes = [16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536]
    sizes += range(2048, MAX_BUCKET, 1024)
    return [size for size in sizes if size < last] + [last]
