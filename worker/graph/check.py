"""The start-up self-check: every captured bucket against the same step launched op by op.

Results have to be equal bit for bit at the same padded shape, hidden states, tokens and the KV that
was written (near, where a compiler has fused what is rounded); times say what a bucket is worth.
Runs on an idle engine and leaves state and pages zero.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from worker.forward.batch import Batch
from worker.graph.base import BucketCheck, Parts
from worker.plan import Chunk, Plan, Tail
from worker.sampling.tail import Result

log = logging.getLogger("kvlane.graph")

NUM_ROUNDS, NUM_TIMED = 3, 2
MAX_CHECK_LEN = 256  # tokens of KV that the rows of a check pretend to have

TAILS_CHECKED: tuple[Tail, ...] = ("none", "greedy", "filtered")
Launch = Callable[[Tensor, Tail], tuple[Tensor, Result | None]]
LaunchChunks = Callable[[Batch], Tensor]


def check_bucket(parts: Parts, bucket: int, eager: Launch, graph: Launch) -> BucketCheck | None:
    """Run one bucket both ways from the same state; None where the pool is too small for that.

    Args:
        parts: the engine's; its state and pages must be unused, and are zero afterwards.
        bucket: rows.
        eager: launches a step op by op.
        graph: replays it.
    """
    scene = Scene(parts, bucket)
    if scene.num_pages == 0:
        return None
    equal = True
    for tail in TAILS_CHECKED:
        found = []
        for launch in (eager, graph):
            scene.set()
            hidden, result = launch(scene.rows, tail)
            drawn = result.drawn.clone() if result is not None else hidden.new_zeros(0)
            found.append((hidden.clone(), drawn, scene.written()))
        same = [torch.equal(a, b) for a, b in zip(*found, strict=True)]
        if not all(same):
            equal = False
            log.error("%d rows, tail %s: equal hidden, tokens, KV: %s", bucket, tail, same)
    graph_ms, eager_ms = scene.times_ms(graph, eager)
    scene.clear()
    return BucketCheck("decode", bucket, equal, graph_ms, eager_ms)


class Scene:
    """Rows 1 to `bucket` with a history, as if they had been served for a while."""

    def __init__(self, parts: Parts, bucket: int) -> None:
        pool = parts.pool
        page_size, device = pool.region().page_size, parts.state.device
        longest = min(MAX_CHECK_LEN, parts.max_len - 1)
        self.num_pages = min(-(-longest // page_size), (pool.num_pages - 1) // bucket)  # of a row
        self.rows = torch.arange(1, bucket + 1, device=device)
        self._longest = self.num_pages * page_size - 2 * NUM_ROUNDS * NUM_TIMED - 3
        self._state, self._parts = parts.state, parts
        self._caches = [
            cache[: bucket * self.num_pages + 1]
            for layer in range(parts.model.spec.num_layers)
            for cache in pool.layer(layer)
        ]
        self._generator = torch.Generator(device)

    def set(self) -> None:
        """The same history every time."""
        self.clear()
        state, rows = self._state, self.rows
        pages = 1 + torch.arange(len(rows) * self.num_pages, device=rows.device)
        state.page_table[rows, : self.num_pages] = pages.view(len(rows), -1).int()
        state.seq_len[rows] = 1 + rows * 7 % max(1, self._longest)
        state.last_token[rows] = rows % self._parts.model.spec.vocab_size
        state.max_len[rows] = self._parts.max_len
        state.seed[rows] = rows
        state.temperature[rows] = (rows % 2).float()
        state.top_p[rows] = 0.9
        state.active[rows] = True
        self._generator.manual_seed(7)
        for cache in self._caches:
            cache.normal_(generator=self._generator)

    def written(self) -> Tensor:
        """A digest of all pages that a step may have changed."""
        return _digest(cache[1:] for cache in self._caches)

    def times_ms(self, *launches: Launch) -> list[float]:
        """Mean time of a greedy step by each."""
        self.set()
        calls = [partial(launch, self.rows, "greedy") for launch in launches]
        return _mean_ms(calls, self._state.device)

    def clear(self) -> None:
        """State and pages as at the start."""
        state, rows = self._state, self.rows
        for column in (state.page_table, state.seq_len, state.last_token, state.max_len):
            column[rows] = 0
        state.seed[rows] = 0
        state.temperature[rows] = 0.0
        state.top_p[rows] = 1.0
        state.active[rows] = False
        for cache in self._caches:
            cache.zero_()


def check_chunk_bucket(
    parts: Parts,
    num_rows: int,
    eager: LaunchChunks,
    graph: LaunchChunks,
    *,
    steady: bool,
    rounding: float = 0.0,
) -> BucketCheck | None:
    """Run one batch of chunks, padded to `num_rows`, both ways; None if the pool is too small.

    Compared are the hidden states of rows that are not padding, or those that are wanted of a long
    step, and the KV. See `check_bucket`, and `BatchBuffers.chunks` for `steady`. With `rounding`
    nothing is equal bit for bit: a row of hidden states may differ by so much of its norm, and the
    KV shows in them, as it is attended to.
    """
    scene = ChunkScene(parts, num_rows, steady=steady)
    if not scene.fits:
        return None
    found = []
    for launch in (eager, graph):
        batch = scene.set()
        found.append((launch(batch)[: scene.num_tokens].clone(), scene.written()))
    same = [torch.equal(a, b) for a, b in zip(*found, strict=True)]
    if rounding:
        same = [_is_near(found[1][0], found[0][0], rounding)]
    if not all(same):
        log.error("chunks of %d tokens: equal hidden, KV: %s", num_rows, same)
    graph_ms, eager_ms = scene.times_ms(graph, eager)
    scene.clear()
    kind = "prefill_whole" if steady else "prefill"
    return BucketCheck(kind, num_rows, all(same), graph_ms, eager_ms)


class ChunkScene:
    """Chunks that almost fill a bucket, every second one behind a prefix that was there before."""

    def __init__(self, parts: Parts, num_rows: int, *, steady: bool) -> None:
        pool, max_len, page_size = parts.pool, parts.max_len, parts.pool.region().page_size
        most = parts.buffers.num_slots if steady else parts.config.engine.max_num_reqs
        self.num_tokens = num_rows - num_rows // 16
        prefix = min(page_size + 1, max_len // 2)
        num_reqs = max(min(3, most, self.num_tokens), -(-self.num_tokens // (max_len - prefix)))
        counts = [self.num_tokens // num_reqs] * num_reqs
        counts[0] += self.num_tokens - sum(counts)
        starts = [prefix * (i % 2) for i in range(num_reqs)]
        self._num_pages = -(-(max(counts) + prefix) // page_size)  # of a row
        self.fits = num_reqs <= most and num_reqs * self._num_pages < pool.num_pages
        vocab = parts.model.spec.vocab_size
        chunks = tuple(
            Chunk(1 + i, start, tuple(7 * token % vocab for token in range(i, i + count)))
            for i, (start, count) in enumerate(zip(starts, counts, strict=True))
        )
        longest = max(start + count for start, count in zip(starts, counts, strict=True))
        self._plan = Plan(0, chunks=chunks, max_seq_len_ub=longest)
        self._num_rows, self._steady, self._parts = num_rows, steady, parts
        self._caches = [
            cache[1 : num_reqs * self._num_pages + 1]
            for layer in range(parts.model.spec.num_layers)
            for cache in pool.layer(layer)
        ]

    def set(self) -> Batch:
        """The same pages every time, and the batch over them."""
        table = self._parts.state.page_table
        generator = torch.Generator(table.device).manual_seed(7)
        for cache in self._caches:
            cache.normal_(generator=generator)
        num_reqs = len(self._plan.chunks)
        pages = 1 + torch.arange(num_reqs * self._num_pages, device=table.device)
        table[1 : 1 + num_reqs, : self._num_pages] = pages.view(num_reqs, -1).int()
        return self._parts.buffers.chunks(self._plan, self._num_rows, steady=self._steady)

    def written(self) -> Tensor:
        """A digest of the pages."""
        return _digest(self._caches)

    def times_ms(self, *launches: LaunchChunks) -> list[float]:
        """Mean time of a forward by each."""
        batch = self.set()
        return _mean_ms([partial(launch, batch) for launch in launches], self._parts.state.device)

    def clear(self) -> None:
        """State and pages as at the start."""
        self._parts.state.page_table[1 : 1 + len(self._plan.chunks)] = 0
        for cache in self._caches:
            cache.zero_()


def _is_near(found: Tensor, wanted: Tensor, rounding: float) -> bool:
    """Whether no row differs by more than `rounding` of its norm; a NaN is far from everything."""
    error = torch.linalg.vector_norm(found.float() - wanted.float(), dim=-1)
    return bool((error <= rounding * torch.linalg.vector_norm(wanted.float(), dim=-1)).all())


def _digest(caches: Iterable[Tensor]) -> Tensor:
    """Of bits and not of values, which may be NaN: [number of caches] i64."""
    words = {2: torch.int16, 4: torch.int32}
    sums = [cache.view(words[cache.element_size()]).sum(dtype=torch.int64) for cache in caches]
    return torch.stack(sums)


def _mean_ms(launches: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """Of runs of each that the host waits for at the end, after one that warms up.

    The best of a few rounds: what else the machine does may disturb one. They take turns: a GPU at
    the limit of its power slows down by 10 % and more within a second, whoever comes last.
    """
    for launch in launches:
        launch()
    best = [float("inf")] * len(launches)
    for _ in range(NUM_ROUNDS):
        for i, launch in enumerate(launches):
            _synchronize(device)
            began = time.perf_counter()
            for _ in range(NUM_TIMED):
                launch()
            _synchronize(device)
            best[i] = min(best[i], time.perf_counter() - began)
    return [1e3 * each / NUM_TIMED for each in best]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
