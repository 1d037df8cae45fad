"""Prompt chunks as CUDA graphs with breaks at the attention of their layers.

A piecewise capture depends only on the padded number of tokens. Token ids, positions and slots lie
in the static buffers of `BatchBuffers`, padded with tokens of page 0. Requests, lengths and pages
matter to attention only, which is planned and launched for the live batch. The graphs hold the
layers and the final norm, not embedding and head.

Buckets of up to MAX_FULL tokens are also captured without breaks, for a few short requests, those
of up to MAX_FAR again, for a few of any length, as behind a prefix that was found: gaps between
pieces cost time when a layer takes about 100 us. For these captures the attention backend has to
read lengths on the device (static_plan). Steps with a layer hook never use them.
"""

import bisect
import logging
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product

import torch
from torch import Tensor

from worker.config.progress import Progress, no_progress
from worker.forward.batch import Batch, Bounds
from worker.forward.context import LayerHook, forward_context
from worker.ops.jit import power_of_two
from worker.ops.product import MAX_STREAMED_ROWS
from worker.plan import Chunk, Plan
from worker.run.base import BucketCheck, ChunkGraphs, Forward, LoadedModel, PaddedShape
from worker.run.check import check_chunk_bucket
from worker.run.eager import EagerChunks
from worker.run.segments import Capture, Cuts, GraphMemory

log = logging.getLogger("kvlane.graph")

MAX_BUCKET = 4096  # beyond, a layer of any model takes longer to compute than to launch
MAX_FULL = 1024  # beyond, gaps between pieces are negligible beside a layer's time
MAX_FAR = 256  # as that, where requests may be long; all graphs add to the time of a start
# A full capture is cut after attention of these layers, from 1; a layer launches in 8 us.
CUT_AFTER = frozenset({2, 8})
# A piecewise graph is kept below TIE times eager's time: graphs relieve the host, and two
# measurements of one launch differ by 2 %.
TIE = 1.02
FREE_TOKENS = MAX_STREAMED_ROWS  # padding up to here is free: a GEMM is bound by its weights' reads


@dataclass(slots=True)
class Bucket:
    """A padded number of tokens that may have graphs; times from the start-up check, 0 = none.

    `choose_shape` may choose pieces if `piecewise` is set, and the unbroken graphs in `full_ms`.
    """

    num_tokens: int
    eager_ms: float = 0.0
    piecewise_ms: float = 0.0
    piecewise: bool = True
    # Of what is captured without breaks (in up to 3 segments), by the tokens of a request.
    full_ms: dict[int, float] = field(default_factory=dict[int, float])


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
        # By padded tokens and `fixed_len` (0: piecewise), with the hidden states [tokens, hidden],
        # or of the last-token rows. The next replay of any bucket overwrites these.
        self.captured: dict[tuple[int, int], Capture[Tensor]] = {}
        self._launched_variants: set[Hashable] = {None}  # of attention; None: it has only one
        placement = loaded.model.placement
        shape = self.buckets[-1].num_tokens, loaded.model.shape.hidden_size
        self.embedded = torch.zeros(shape, dtype=placement.dtype, device=placement.device)

    @torch.inference_mode()
    def run_buckets(self) -> None:
        for bucket in reversed(self.buckets):
            self._launch_variants(bucket.num_tokens)
            if self.traced is None:  # else torch.compile comes with the captures
                for fixed_len in self._kinds(bucket):
                    self._body(bucket.num_tokens, fixed_len)(None)

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
        captured = self.captured.values()
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
        fixed_len = 0
        if num_reqs <= buffers.fixed_reqs and not hooked:
            fixed_len = next((most for most in buffers.fixed_lens if max_seq_len_ub <= most), 0)
        shape = choose_shape(num_tokens, self.buckets, fixed_len)
        if shape.num_tokens and num_reqs > buffers.max_reqs(shape.num_tokens):
            return PaddedShape(refused="many")
        return shape

    def launch(self, batch: Batch, on_layer: LayerHook | None = None) -> Forward:
        fixed_len = batch.bounds.max_seq_len if batch.host is None else 0
        captured = self.captured.get((batch.num_tokens, fixed_len))
        rows = batch.last_token_rows
        num_hidden = batch.num_tokens if rows is None else len(rows)
        if captured is None or len(captured.made) != num_hidden:
            return self._eager.launch(batch, on_layer)  # the batch matches no graph
        attention, model = self.loaded.attention.prefill, self.loaded.model
        self.embedded[: batch.num_tokens].copy_(model.embed(batch.input_ids))
        if fixed_len:
            assert on_layer is None, "a graph without breaks calls no hook"
            captured.replay()
            return Forward(captured.made, "graph")
        with forward_context(batch, attention, attention.plan(batch), on_layer=on_layer):
            captured.replay()
        return Forward(captured.made, "piecewise")

    def close(self) -> None:
        self.captured.clear()

    def capture_bucket(self, bucket: Bucket) -> None:
        """Capture the graphs of one bucket."""
        for fixed_len in self._kinds(bucket):
            capture = Capture[Tensor](self._memory)
            capture.made = self._memory.alias(
                capture.record(self._body(bucket.num_tokens, fixed_len))
            )
            self.captured[bucket.num_tokens, fixed_len] = capture

    def _kinds(self, bucket: Bucket) -> Sequence[int]:
        """The `fixed_len` of its graphs; 0 is the piecewise one."""
        if not self.loaded.attention.prefill.static_plan or self.loaded.always_hooked:
            return (0,)
        short, *far = self.loaded.buffers.fixed_lens
        size = bucket.num_tokens
        return 0, *([short] if size <= MAX_FULL else []), *(far if size <= MAX_FAR else [])

    def _body(self, num_tokens: int, fixed_len: int) -> Callable[[Capture[Tensor] | None], Tensor]:
        """What is captured: the forward of a batch of padding."""
        attention, buffers = self.loaded.attention.prefill, self.loaded.buffers
        longest = min(num_tokens, self.loaded.max_len)
        if fixed_len:
            batch = buffers.chunks(_sink_plan([longest], longest), num_tokens, fixed_len=fixed_len)
        else:
            batch = buffers.blank_chunk(num_tokens)

        def body(under_way: Capture[Tensor] | None) -> Tensor:
            breaks = under_way
            if fixed_len and under_way is not None:
                breaks = Cuts(under_way, CUT_AFTER)
            # A piecewise capture only notes its breaks.
            runs_attention = fixed_len > 0 or under_way is None
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
        kinds = [fixed_len for size, fixed_len in self.captured if size == num_tokens]
        compared = [compare(fixed_len=fixed_len) for fixed_len in kinds]
        checks = [check for check in compared if check is not None]
        bucket.full_ms.clear()  # without a comparison only the piecewise graph is used
        for check in checks:
            if not check.fixed_len:
                bucket.eager_ms, bucket.piecewise_ms = check.eager_ms, check.graph_ms
                bucket.piecewise = check.graph_ms < TIE * check.eager_ms
            elif check.graph_ms < min(check.eager_ms, bucket.piecewise_ms or check.eager_ms):
                bucket.full_ms[check.fixed_len] = check.graph_ms
        for fixed_len in kinds:
            kept = fixed_len in bucket.full_ms if fixed_len else bucket.piecewise
            if kept or self.loaded.model.collective.size > 1:
                continue
            del self.captured[num_tokens, fixed_len]
            kind = f"graph of requests to {fixed_len}" if fixed_len else "piecewise graph"
            why = "not faster, or not compared"
            log.info("%d tokens: dropped the %s (%s)", num_tokens, kind, why)
        return checks


def _sink_plan(counts: Sequence[int], max_seq_len_ub: int) -> Plan:
    """A plan of chunks with so many tokens, all of row 0."""
    chunks = tuple(Chunk(0, 0, (0,) * count) for count in counts)
    return Plan(0, chunks=chunks, max_seq_len_ub=max_seq_len_ub)


def choose_shape(num_tokens: int, buckets: Sequence[Bucket], fixed_len: int = 0) -> PaddedShape:
    """Choose the bucket to which a batch is padded, or say why it is launched eagerly.

    Reasons: `too_long`; `dropped`: eager was as fast; `padding`: the padded step would take longer
    than eager, by its tokens (over twice as many) or by the measured times. `padded` adds `many`:
    there are more requests than the graph computes hidden states for. buckets: ascending;
    fixed_len: of the unbroken graphs that can serve the batch: no layer hook, and it fits; 0: none.
    """
    at = bisect.bisect_left([bucket.num_tokens for bucket in buckets], num_tokens)
    if at == len(buckets):
        return PaddedShape(refused="too_long")
    bucket = buckets[at]
    full_ms = bucket.full_ms.get(fixed_len)
    if full_ms is None and not bucket.piecewise:
        return PaddedShape(refused="dropped")
    if bucket.num_tokens > max(2 * num_tokens, FREE_TOKENS):
        return PaddedShape(refused="padding")
    graph_ms = bucket.piecewise_ms if full_ms is None else full_ms
    if at and graph_ms:
        below = buckets[at - 1]
        share = (num_tokens - below.num_tokens) / (bucket.num_tokens - below.num_tokens)
        eager_ms = below.eager_ms + share * (bucket.eager_ms - below.eager_ms)
        if below.eager_ms and graph_ms > TIE * eager_ms:
            return PaddedShape(refused="padding")
    return PaddedShape(bucket.num_tokens, 0 if full_ms is None else fixed_len)


def chunk_buckets(max_tokens: int) -> list[int]:
    """Numbers of tokens that get graphs, ascending, up to `max_tokens` or MAX_BUCKET."""
    last = min(max_tokens, MAX_BUCKET)
    # Between 512 and 1024 buckets are close. There a step's time grows with its tokens, padding
    # included, and a short rest in a step of its own costs at least a read of the weights.
    sizes = [16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 576, 640, 704, 768, 896, 1024, 1536]
    sizes += range(2048, MAX_BUCKET, 1024)
    return [size for size in sizes if size < last] + [last]
