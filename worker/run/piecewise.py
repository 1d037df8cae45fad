"""Prompt chunks as CUDA graphs with breaks at the attention of their layers.

A piecewise capture depends only on the padded number of tokens. Token ids, positions and slots lie
in the static buffers of `BatchBuffers`, padded with tokens of page 0. Requests, lengths and pages
matter to attention only, which is planned and launched for the live batch. The graphs hold the
layers and the final norm, not embedding and head.

Buckets of up to MAX_FULL tokens are also captured without breaks, for a few short requests: gaps
between pieces cost time when a layer takes about 100 us. For these captures the attention backend
has to read lengths on the device (static_plan). Steps with a layer hook never use them.
"""

import bisect
import logging
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from worker.config.progress import Progress, no_progress
from worker.forward.batch import Batch, Bounds
from worker.forward.context import LayerHook, forward_context
from worker.ops.launch import power_of_two
from worker.ops.product import MAX_STREAMED_ROWS
from worker.plan import Chunk, Plan
from worker.run.base import BucketCheck, ChunkGraphs, Forward, LoadedModel, PaddedShape
from worker.run.check import check_chunk_bucket
from worker.run.eager import EagerChunks
from worker.run.segments import Capture, Cuts, GraphMemory

log = logging.getLogger("kvlane.graph")

MAX_BUCKET = 4096  # beyond, a layer of any model takes longer to compute than to launch
MAX_FULL = 1024  # beyond, gaps between pieces are negligible beside a layer's time
# A full capture is cut after attention of these layers, from 1; a layer launches in 8 us.
CUT_AFTER = frozenset({2, 8})
# A piecewise graph is kept below TIE times eager's time: graphs relieve the host, and two
# measurements of one launch differ by 2 %.
TIE = 1.02
FREE_TOKENS = MAX_STREAMED_ROWS  # padding up to here is free: a GEMM is bound by its weights' reads


@dataclass(slots=True)
class Bucket:
    """A padded number of tokens that may have graphs; times from the start-up check, 0 = none.

    `choose_shape` may choose the graphs whose flags, `piecewise` and `full`, are set.
    """

    num_tokens: int
    eager_ms: float = 0.0
    piecewise_ms: float = 0.0
    full_ms: float = 0.0
    piecewise: bool = True
    full: bool = False  # captured without breaks (in up to 3 segments)


class PiecewiseChunks(ChunkGraphs):
    """ChunkGraphs by piecewise (and for small buckets unbroken) CUDA graphs.

    traced: the forward to capture, from [num_tokens, hidden] and positions to hidden states; None:
    the model's own, see Decoder.forward. rounding: see `check_chunk_bucket`.
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
        self.loaded, self._memory, self._eager = loaded, memory, EagerChunks(loaded)
        self.traced, self.rounding = traced, rounding
        # By padded tokens, with the hidden states [tokens, hidden], or of the last-token rows. The
        # next replay of any bucket overwrites these.
        self.piecewise: dict[int, Capture[Tensor]] = {}
        self.full: dict[int, Capture[Tensor]] = {}
        self._launched_variants: set[Hashable] = {None}  # of attention; None: it has only one
        placement = loaded.model.placement
        shape = self.buckets[-1].num_tokens, loaded.model.shape.hidden_size
        self.embedded = torch.zeros(shape, dtype=placement.dtype, device=placement.device)

    @torch.inference_mode()
    def run_buckets(self) -> None:
        for bucket in reversed(self.buckets):
            self._launch_variants(bucket.num_tokens)
            if self.traced is None:  # else torch.compile comes with the captures
                for full in self._kinds(bucket):
                    self._body(bucket.num_tokens, full=full)(None)

    @torch.inference_mode()
    def capture_largest(self) -> None:
        self.capture_bucket(self.buckets[-1])

    @torch.inference_mode()
    def capture(self, progress: Progress = no_progress) -> Sequence[BucketCheck]:
        began, free = time.monotonic(), self._memory.free_bytes()
        for i, bucket in enumerate(reversed(self.buckets)):  # smaller ones reuse its memory
            progress("capture", i, len(self.buckets))
            self.capture_bucket(bucket)
            self._launch_variants(bucket.num_tokens)
        captured = *self.piecewise.values(), *self.full.values()
        log.info(
            "captured chunks of %s tokens: %d graphs in %.1f s, %.2f GiB",
            ", ".join(str(bucket.num_tokens) for bucket in self.buckets),
            sum(graph.num_segments for graph in captured),
            time.monotonic() - began, (free - self._memory.free_bytes()) / (1 << 30),
        )  # fmt: skip
        began = time.monotonic()
        checks = [check for bucket in self.buckets for check in self.check(bucket)]
        log.info("compared them with eager in %.1f s", time.monotonic() - began)
        return checks

    def padded(
        self, num_tokens: int, num_reqs: int, max_seq_len_ub: int, *, hooked: bool
    ) -> PaddedShape:
        buffers = self.loaded.buffers
        fits = num_reqs <= buffers.fixed_reqs and max_seq_len_ub <= buffers.max_fixed_len
        shape = choose_shape(num_tokens, self.buckets, full=fits and not hooked)
        if shape.num_tokens and num_reqs > buffers.max_reqs(shape.num_tokens):
            return PaddedShape(refused="many")
        return shape

    def launch(self, batch: Batch, on_layer: LayerHook | None = None) -> Forward:
        fixed = batch.host is None
        captured = (self.full if fixed else self.piecewise).get(batch.num_tokens)
        rows = batch.last_token_rows
        num_hidden = batch.num_tokens if rows is None else len(rows)
        if captured is None or len(captured.made) != num_hidden:
            return self._eager.launch(batch, on_layer)  # the batch matches no graph
        attention, model = self.loaded.attention.prefill, self.loaded.model
        self.embedded[: batch.num_tokens].copy_(model.embed(batch.input_ids))
        if fixed:
            assert on_layer is None, "a graph without breaks calls no hook"
            captured.replay()
            return Forward(captured.made, "graph")
        with forward_context(batch, attention, attention.plan(batch), on_layer=on_layer):
            captured.replay()
        return Forward(captured.made, "piecewise")

    def close(self) -> None:
        self.piecewise.clear()
        self.full.clear()

    def capture_bucket(self, bucket: Bucket) -> None:
        """Capture the graphs of one bucket."""
        for full in self._kinds(bucket):
            capture = Capture[Tensor](self._memory)
            capture.made = self._memory.alias(
                capture.record(self._body(bucket.num_tokens, full=full))
            )
            (self.full if full else self.piecewise)[bucket.num_tokens] = capture
        bucket.full = bucket.num_tokens in self.full

    def _kinds(self, bucket: Bucket) -> Sequence[bool]:
        """Its graphs; True is the one without breaks."""
        static = self.loaded.attention.prefill.static_plan
        unbroken = static and not self.loaded.always_hooked and bucket.num_tokens <= MAX_FULL
        return (False, True) if unbroken else (False,)

    def _body(self, num_tokens: int, *, full: bool) -> Callable[[Capture[Tensor] | None], Tensor]:
        """What is captured: the forward of a batch of padding."""
        attention, buffers = self.loaded.attention.prefill, self.loaded.buffers
        longest = min(num_tokens, self.loaded.max_len)
        if full:
            batch = buffers.chunks(_sink_plan([longest], longest), num_tokens, fixed_shape=True)
        else:
            batch = buffers.blank_chunk(num_tokens)

        def body(under_way: Capture[Tensor] | None) -> Tensor:
            breaks = Cuts(under_way, CUT_AFTER) if full and under_way is not None else under_way
            runs_attention = full or under_way is None  # a piecewise capture only notes its breaks
            attn_plan = attention.plan(batch) if runs_attention else None
            with forward_context(batch, attention, attn_plan, breaks=breaks):
                return self.forward(batch)

        return body

    def forward(self, batch: Batch) -> Tensor:
        """What is captured: hidden states of a batch whose embedded tokens are in `embedded`."""
        embedded, rows = self.embedded[: batch.num_tokens], batch.last_token_rows
        if self.traced is None:
            hidden = self.loaded.model.forward(embedded, batch.positions, rows)
            if self.loaded.drafter is not None:  # depends on the number of tokens alone
                self.loaded.drafter.observe(batch, hidden)
            return hidden
        hidden = self.traced(embedded, batch.positions)
        return hidden if rows is None else hidden.index_select(0, rows)

    def _launch_variants(self, num_tokens: int) -> None:
        """Launch all attention variants that batches of this bucket can need, to compile it now."""
        loaded, attention = self.loaded, self.loaded.attention.prefill
        attended = loaded.model.attended
        longest = min(num_tokens, loaded.max_len)
        # Lengths in powers of two, the lowest and the highest bound, any number of requests.
        lengths = {min(longest, 1 << i) for i in range(power_of_two(longest).bit_length())}
        counts = range(1, min(int(loaded.config.max_num_reqs), num_tokens) + 1)
        for length, bound, num_reqs in product(lengths, {1, loaded.max_len}, counts):
            coarse, longest_ub = min(num_tokens, power_of_two(length)), max(length, bound)
            variant = attention.variant(Bounds(num_reqs, num_tokens, coarse, longest_ub))
            if num_reqs - 1 > num_tokens - length or variant in self._launched_variants:
                continue
            self._launched_variants.add(variant)
            plan = _sink_plan([length] + [1] * (num_reqs - 1), longest_ub)
            shape = num_tokens, attended.num_heads, attended.head_dim
            q = torch.zeros(shape, dtype=self.embedded.dtype, device=self.embedded.device)
            batch = loaded.buffers.chunks(plan, num_tokens)
            with forward_context(batch, attention, attention.plan(batch)):
                attention.forward(q, 0)

    def check(self, bucket: Bucket) -> Sequence[BucketCheck]:
        """Compare results and times of a bucket with eager's; drop the graphs that do not win.

        Several ranks of a worker keep all: the leader chooses, by its own times.
        """
        num_tokens = bucket.num_tokens
        ways = self._eager.launch, self.launch
        compare = partial(check_chunk_bucket, self.loaded, num_tokens, ways, rounding=self.rounding)
        piecewise = compare(fixed_shape=False)
        full = compare(fixed_shape=True) if num_tokens in self.full else None
        if piecewise is not None:
            bucket.eager_ms, bucket.piecewise_ms = piecewise.eager_ms, piecewise.graph_ms
            bucket.piecewise = piecewise.graph_ms < TIE * piecewise.eager_ms
        bucket.full = False  # without a comparison only the piecewise graph is used
        if full is not None:
            bucket.full_ms = full.graph_ms
            bucket.full = full.graph_ms < min(full.eager_ms, bucket.piecewise_ms or full.eager_ms)
        for kind, kept, captured in (
            ("piecewise", bucket.piecewise, self.piecewise),
            ("unbroken", bucket.full, self.full),
        ):
            if kept or self.loaded.model.collective.size > 1 or num_tokens not in captured:
                continue
            del captured[num_tokens]
            why = "not faster, or not compared"
            log.info("%d tokens: dropped the %s graph (%s)", num_tokens, kind, why)
        return [check for check in (piecewise, full) if check is not None]


def _sink_plan(counts: Sequence[int], max_seq_len_ub: int) -> Plan:
    """A plan of chunks with so many tokens, all of row 0."""
    chunks = tuple(Chunk(0, 0, (0,) * count) for count in counts)
    return Plan(0, chunks=chunks, max_seq_len_ub=max_seq_len_ub)


def choose_shape(num_tokens: int, buckets: Sequence[Bucket], *, full: bool = False) -> PaddedShape:
    """Choose the bucket to which a batch is padded, or say why it is launched eagerly.

    Reasons: `too_long`; `dropped`: eager was as fast; `padding`: the padded step would take longer
    than eager, by its tokens (over twice as many) or by the measured times. `padded` adds `many`:
    there are more requests than the graph computes hidden states for. buckets: ascending; full: the
    unbroken graph can serve the batch: no layer hook, and it fits the fixed shape.
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
    """Numbers of tokens that get graphs, ascending, up to `max_tokens` or MAX_BUCKET."""
    last = min(max_tokens, MAX_BUCKET)
    # Between 512 and 1024 buckets are close. There a step's time grows with its tokens, padding
    # included, and a short rest in a step of its own costs at least a read of the weights.
    sizes = [16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 576, 640, 704, 768, 896, 1024, 1536]
    sizes += range(2048, MAX_BUCKET, 1024)
    return [size for size in sizes if size < last] + [last]
