"""Chunks of prompts as CUDA graphs with a break at the attention of each layer.

A capture in pieces knows one thing of a batch, the number of its rows: token ids, positions and
slots lie in the buffers of `BatchBuffers`, padded to a bucket with rows of the sink. How many
requests there are, how long they are and where their pages lie matters to attention alone, which is
planned and launched for the live batch. The embedding and the head stay outside, so the graphs hold
the layers and the final norm.

Where the attention backend reads all of that on the device, small buckets are captured whole as
well: without a break, for a few requests that are not long (`BatchBuffers`). Between pieces a
GPU idles for a moment, and kernels of two pieces do not overlap, which is felt where a layer takes
100 us. Whoever wants to be told of each layer gets the pieces.
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
from worker.forward.context import forward_context
from worker.graph.base import BucketCheck, GraphRunner, Padding, Parts
from worker.graph.check import check_chunk_bucket
from worker.graph.segments import Capture, Cuts, GraphMemory
from worker.kernels.gemm.product import MAX_STREAMED_ROWS
from worker.kernels.launch import power_of_two
from worker.plan import Chunk, Plan, Tail
from worker.sampling.tail import Result

log = logging.getLogger("kvlane.graph")

MAX_BUCKET = 4096  # one layer of more rows takes longer to compute than to launch on any model
MAX_WHOLE = 1024  # beyond, a layer takes so long that the moments between pieces are nothing
CUT_AFTER = frozenset({2, 8})  # layers of a whole capture; its launch takes 8 us a layer
# A replay leaves the host to others, so it stays where eager is hardly faster; two measurements of
# the same differ by as much.
TIE = 1.02
FREE_ROWS = MAX_STREAMED_ROWS  # up to so many a product takes the time of reading its weights


@dataclass(slots=True)
class Bucket:
    """A number of rows that may have graphs; times as measured at the start, 0 = not measured."""

    num_rows: int
    eager_ms: float = 0.0
    pieces_ms: float = 0.0
    whole_ms: float = 0.0
    pieces: bool = True  # there are some, and they win against eager
    whole: bool = False  # there is one, and it wins against both


@dataclass(slots=True, frozen=True)
class Captured:
    """One bucket's graphs, and their result, which the next replay of any bucket overwrites."""

    capture: Capture
    hidden: Tensor  # [bucket, hidden], or of the rows that are wanted; memory of the capture


class PiecewiseRunner:
    """The GraphRunner that replays chunks.

    Args:
        parts: what a step is made of.
        inner: launches everything else, and what is refused here.
        memory: of all captures.
        forward: is captured, [num_tokens, hidden] and positions to [num_tokens, hidden]; None: the
            model's own, see Decoder.forward.
        rounding: see `check_chunk_bucket`.
    """

    def __init__(
        self,
        parts: Parts,
        inner: GraphRunner,
        memory: GraphMemory,
        forward: Callable[[Tensor, Tensor], Tensor] | None = None,
        rounding: float = 0.0,
    ) -> None:
        self.path = "eager"
        self.checks: list[BucketCheck] = []
        max_tokens = int(parts.config.engine.max_prefill_tokens)
        self.buckets = [Bucket(n) for n in chunk_buckets(max_tokens)]
        self._parts, self._inner, self._memory = parts, inner, memory
        self._traced = forward
        self._rounding = rounding
        self._refused = ""  # why the last batch had no bucket
        self._captured: dict[int, Captured] = {}  # in pieces
        self._whole: dict[int, Captured] = {}
        self._compiled: set[Hashable] = {None}  # variants of the attention kernel
        weight = parts.model.embedding.weight
        shape = self.buckets[-1].num_rows, weight.shape[1]
        self._embedded = torch.zeros(shape, dtype=weight.dtype, device=weight.device)

    @torch.inference_mode()
    def trial(self) -> None:
        """See GraphRunner.trial; eager steps last: captures empty the allocator's cache."""
        largest = self.buckets[-1].num_rows
        self._captured[largest] = self._in_pieces(largest)
        if self._may_be_whole(largest):
            self._whole[largest] = self._in_one(largest)
        self._inner.trial()

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every bucket, the largest first, so that smaller ones reuse its memory."""
        self._inner.capture()
        began, free = time.monotonic(), self._memory.free_bytes()
        for bucket in reversed(self.buckets):
            num_rows = bucket.num_rows
            self._captured[num_rows] = self._in_pieces(num_rows)
            self._compile_attention(num_rows)
            if self._may_be_whole(num_rows):
                self._whole[num_rows] = self._in_one(num_rows)
                bucket.whole = True
        captured = *self._captured.values(), *self._whole.values()
        log.info(
            "captured chunks of %s tokens: %d graphs in %.1f s, %.2f GiB",
            ", ".join(str(bucket.num_rows) for bucket in self.buckets),
            sum(each.capture.num_segments for each in captured),
            time.monotonic() - began, (free - self._memory.free_bytes()) / (1 << 30),
        )  # fmt: skip
        began = time.monotonic()
        for bucket in self.buckets:
            self._check(bucket)
        log.info("compared them with eager in %.1f s", time.monotonic() - began)

    def padded(
        self, num_tokens: int, num_reqs: int, max_seq_len_ub: int, *, hooked: bool
    ) -> Padding:
        """See GraphRunner.padded."""
        buffers = self._parts.buffers
        few = num_reqs <= buffers.num_slots and max_seq_len_ub <= buffers.max_steady_len
        padding, self._refused = admit(num_tokens, self.buckets, watched=hooked or not few)
        if padding.num_rows and num_reqs > buffers.max_reqs(padding.num_rows):
            padding, self._refused = Padding(), "many"
        return padding

    def launch(self, batch: Batch, on_layer: Callable[[int], None] | None = None) -> Tensor:
        """See GraphRunner.launch; a batch of a bucket's size is replayed whatever it holds."""
        steady = batch.host is None
        captured = (self._whole if steady else self._captured).get(batch.num_tokens)
        num_wanted = batch.num_tokens if batch.wanted is None else len(batch.wanted)
        if captured is None or len(captured.hidden) != num_wanted:
            self.path = f"eager_{self._refused}"
            return self._inner.launch(batch, on_layer)
        attention, model = self._parts.attention.prefill, self._parts.model
        self._embedded[: batch.num_tokens].copy_(model.embed(batch.input_ids))
        if steady:
            assert on_layer is None, "a graph without breaks calls nobody"
            self.path = "graph"
            captured.capture.replay()
        else:
            self.path = "piecewise"
            attn_plan = attention.plan(batch)
            with forward_context(batch, attention, attn_plan, on_layer=on_layer):
                captured.capture.replay()
        return captured.hidden

    def decode(
        self, rows: Sequence[int], max_seq_len_ub: int, tail: Tail
    ) -> tuple[Tensor, Result | None]:
        """See GraphRunner.decode."""
        drawn = self._inner.decode(rows, max_seq_len_ub, tail)
        self.path = self._inner.path
        return drawn

    def close(self) -> None:
        """See GraphRunner.close."""
        self._captured.clear()
        self._whole.clear()
        self._inner.close()

    def _may_be_whole(self, num_rows: int) -> bool:
        config = self._parts.config
        # Who names a number of layer groups wants every step in pieces.
        hooked = config.role == "prefill" and config.kv.num_groups not in ("auto", 1)
        static = self._parts.attention.prefill.static_plan
        return static and not hooked and num_rows <= MAX_WHOLE

    def _in_pieces(self, num_rows: int) -> Captured:
        attention, capture = self._parts.attention.prefill, Capture(self._memory)
        batch = self._parts.buffers.blank_chunk(num_rows)

        def body(breaks: Capture | None) -> Tensor:
            attn_plan = attention.plan(batch) if breaks is None else None  # no break runs now
            with forward_context(batch, attention, attn_plan, breaks=breaks):
                return self._forward(batch)

        hidden = capture.record(body)
        return Captured(capture, self._memory.alias(hidden))

    def _in_one(self, num_rows: int) -> Captured:
        attention, capture = self._parts.attention.prefill, Capture(self._memory)
        length = min(num_rows, self._parts.max_len)
        plan = Plan(0, chunks=(Chunk(0, 0, (0,) * length),), max_seq_len_ub=length)  # the sink's
        batch = self._parts.buffers.chunks(plan, num_rows, steady=True)

        def body(under_way: Capture | None) -> Tensor:
            cuts = None if under_way is None else Cuts(under_way, CUT_AFTER)
            with forward_context(batch, attention, attention.plan(batch), breaks=cuts):
                return self._forward(batch)

        hidden = capture.record(body)
        return Captured(capture, self._memory.alias(hidden))

    def _forward(self, batch: Batch) -> Tensor:
        embedded = self._embedded[: batch.num_tokens]
        if self._traced is None:
            return self._parts.model.forward(embedded, batch.positions, batch.wanted)
        hidden = self._traced(embedded, batch.positions)
        return hidden if batch.wanted is None else hidden.index_select(0, batch.wanted)

    def _compile_attention(self, num_rows: int) -> None:
        """Launch every kernel that batches of a bucket can ask for: to compile one is a stall."""
        parts, attention = self._parts, self._parts.attention.prefill
        longest = min(num_rows, parts.max_len)
        lengths = {min(longest, 1 << i) for i in range(power_of_two(longest).bit_length())}
        counts = range(1, min(parts.config.engine.max_num_reqs, num_rows) + 1)
        for length, bound, num_reqs in product(lengths, {1, parts.max_len}, counts):
            coarse, longest_ub = min(num_rows, power_of_two(length)), max(length, bound)
            variant = attention.variant(num_reqs, num_rows, coarse, longest_ub)
            if num_reqs - 1 > num_rows - length or variant in self._compiled:
                continue
            self._compiled.add(variant)
            chunks = (Chunk(0, 0, (0,) * length), *[Chunk(0, 0, (0,))] * (num_reqs - 1))  # sink's
            plan = Plan(0, chunks=chunks, max_seq_len_ub=longest_ub)
            shape = num_rows, parts.model.heads.num_heads, parts.model.spec.head_dim
            q = torch.zeros(shape, dtype=self._embedded.dtype, device=self._embedded.device)
            batch = parts.buffers.chunks(plan, num_rows)
            with forward_context(batch, attention, attention.plan(batch)):
                attention.forward(q, None, None, 0)

    def _check(self, bucket: Bucket) -> None:
        """Compare a bucket with eager, result and time, and drop what does not win.

        Raises:
            AssertionError: they differ, and engine.strict is set.
        """
        num_rows = bucket.num_rows
        pieces = self._compare(num_rows, steady=False)
        whole = self._compare(num_rows, steady=True) if num_rows in self._whole else None
        if pieces is not None:
            bucket.eager_ms, bucket.pieces_ms = pieces.eager_ms, pieces.graph_ms
            bucket.pieces = pieces.graph_ms < TIE * pieces.eager_ms
        bucket.whole = False  # what was not compared is not replayed; the pieces will do
        if whole is not None:
            bucket.whole_ms = whole.graph_ms
            bucket.whole = whole.graph_ms < min(whole.eager_ms, bucket.pieces_ms or whole.eager_ms)
        for kept, captured, what in (
            (bucket.pieces, self._captured, "in pieces"),
            (bucket.whole, self._whole, "whole"),
        ):
            if not kept and captured.pop(num_rows, None) is not None:
                log.info("%5d tokens: not %s, others are as fast", num_rows, what)

    def _compare(self, num_rows: int, *, steady: bool) -> BucketCheck | None:
        what = "whole" if steady else "in pieces"
        found = check_chunk_bucket(
            self._parts, num_rows, self._inner.launch, self.launch,
            steady=steady, rounding=self._rounding,
        )  # fmt: skip
        if found is None:
            log.info("%5d tokens, %s: not compared, the KV pool is too small", num_rows, what)
            return None
        self.checks.append(found)
        log.info(
            "%5d tokens, %s: graph %.3f ms, eager %.3f ms, %s", num_rows, what, found.graph_ms,
            found.eager_ms, "equal" if found.equal else "DIFFERENT",
        )  # fmt: skip
        assert found.equal or not self._parts.config.engine.strict, (
            f"the graphs of {num_rows} tokens differ from eager"
        )
        return found


def admit(
    num_tokens: int, buckets: Sequence[Bucket], *, watched: bool = True
) -> tuple[Padding, str]:
    """How a batch of `num_tokens` is replayed; or no padding, and why it is launched eagerly.

    The reason is part of a metric's label: too_long, dropped, padding (the rows that pad it would
    cost more than launching op by op: more than as many again, or by the times of the buckets);
    `PiecewiseRunner.padded` adds many (more requests than hidden states are computed of).

    Args:
        num_tokens: of the batch.
        buckets: by number of rows, ascending.
        watched: it has to be in pieces, for its hook, its requests or their length.
    """
    at = bisect.bisect_left([bucket.num_rows for bucket in buckets], num_tokens)
    if at == len(buckets):
        return Padding(), "too_long"
    bucket = buckets[at]
    steady = bucket.whole and not watched
    if not steady and not bucket.pieces:
        return Padding(), "dropped"
    if bucket.num_rows > max(2 * num_tokens, FREE_ROWS):
        return Padding(), "padding"
    graph_ms = bucket.whole_ms if steady else bucket.pieces_ms
    if at and graph_ms:
        below = buckets[at - 1]
        share = (num_tokens - below.num_rows) / (bucket.num_rows - below.num_rows)
        eager_ms = below.eager_ms + share * (bucket.eager_ms - below.eager_ms)
        if below.eager_ms and graph_ms > TIE * eager_ms:
            return Padding(), "padding"
    return Padding(bucket.num_rows, steady=steady), ""


def chunk_buckets(max_tokens: int) -> list[int]:
    """Numbers of tokens that get graphs, ascending; the last is `max_tokens`, or MAX_BUCKET."""
    last = min(max_tokens, MAX_BUCKET)
    sizes = [16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536]
    sizes += range(2048, MAX_BUCKET, 1024)
    return [size for size in sizes if size < last] + [last]
