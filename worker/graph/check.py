"""The start-up self-check: every captured bucket against the same step launched op by op.

Hidden states, tokens and the KV that was written have to be equal bit for bit at the same padded
shape (or close, where a compiler has fused what is rounded); times say what a bucket is worth.
Runs on an idle engine and leaves step state and pages zero.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from worker.api import Sampling
from worker.forward.batch import Batch
from worker.graph.base import BucketCheck, LoadedModel
from worker.plan import Chunk, Plan, RowPages, RowStart, Tail
from worker.sampling.tail import Result

log = logging.getLogger("kvlane.graph")

NUM_ROUNDS, NUM_TIMED = 3, 2
MAX_CHECK_LEN = 256  # tokens of KV that the rows of a check pretend to have

TAILS_CHECKED: tuple[Tail, ...] = ("none", "greedy", "filtered")
Launch = Callable[[Tensor, Tail], tuple[Tensor, Result | None]]
LaunchChunks = Callable[[Batch], Tensor]


def report(check: BucketCheck, what: str, *, strict: bool) -> None:
    """Log what was found of `what`.

    Raises:
        AssertionError: its result is not eager's, and `strict` is set.
    """
    log.info(
        "%s: graph %.3f ms, eager %.3f ms, %s",
        what, check.graph_ms, check.eager_ms, "equal" if check.equal else "DIFFERENT",
    )  # fmt: skip
    assert check.equal or not strict, f"the graph of {what} differs from eager"


def check_bucket(
    loaded: LoadedModel, bucket: int, eager: Launch, graph: Launch
) -> BucketCheck | None:
    """Run one decode bucket both ways from the same state; None if the pool is too small for that.

    Args:
        loaded: its state and pages must be unused, and are zero afterwards.
        bucket: rows.
        eager: launches a step op by op.
        graph: replays it.
    """
    scene = DecodeScene(loaded, bucket)
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


class DecodeScene:
    """Rows 1 to `bucket` with a history, as if they had been served for a while."""

    def __init__(self, loaded: LoadedModel, bucket: int) -> None:
        pool, page_size = loaded.pool, loaded.pool.region().page_size
        longest = min(MAX_CHECK_LEN, loaded.max_len - 1)
        self.num_pages = min(-(-longest // page_size), (pool.num_pages - 1) // bucket)  # of a row
        self.rows = torch.arange(1, bucket + 1, device=loaded.state.device)
        longest = max(1, self.num_pages * page_size - 2 * NUM_ROUNDS * NUM_TIMED - 3)
        vocab_size = loaded.model.spec.vocab_size
        self._plan = Plan(
            0,
            starts=tuple(
                RowStart(
                    row,
                    Sampling(0, row % 2, 0.9, seed=row, ignore_eos=True),
                    loaded.max_len,
                    min_len=0,
                    active=True,
                    seq_len=1 + row * 7 % longest,
                    last_token=row % vocab_size,
                )
                for row in range(1, bucket + 1)
            ),
            pages=pages_of_rows(bucket, self.num_pages),
        )
        self._loaded = loaded
        self._caches = caches_of(loaded, bucket * self.num_pages + 1)

    def set(self) -> None:
        """The same history every time."""
        self.clear()
        self._loaded.state.apply(self._plan)
        fill(self._caches)

    def written(self) -> Tensor:
        """A digest of all pages that a step may have changed."""
        return _digest(cache[1:] for cache in self._caches)

    def times_ms(self, *launches: Launch) -> list[float]:
        """Mean time of a greedy step by each."""
        self.set()
        calls = [partial(launch, self.rows, "greedy") for launch in launches]
        return _mean_ms(calls, self._loaded.state.device)

    def clear(self) -> None:
        """State and pages as at the start."""
        clear(self._loaded, self._caches)


def check_chunk_bucket(
    loaded: LoadedModel,
    num_tokens: int,
    eager: LaunchChunks,
    graph: LaunchChunks,
    *,
    fixed_shape: bool,
    rounding: float = 0.0,
) -> BucketCheck | None:
    """Run one batch of chunks, padded to `num_tokens`, both ways; None if the pool is too small.

    Compared are the KV and the hidden states, those of padding left out. See `check_bucket`, and
    `BatchBuffers.chunks` for `fixed_shape`.

    Args:
        rounding: 0 demands equal bits. Otherwise each row of hidden states may differ by so much of
            its norm, and the KV is not compared: hidden states that attend to it show it.
    """
    scene = ChunkScene(loaded, num_tokens, fixed_shape=fixed_shape)
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
        log.error("chunks of %d tokens: equal hidden, KV: %s", num_tokens, same)
    graph_ms, eager_ms = scene.times_ms(graph, eager)
    scene.clear()
    kind = "prefill_full" if fixed_shape else "prefill"
    return BucketCheck(kind, num_tokens, all(same), graph_ms, eager_ms)


class ChunkScene:
    """Chunks that almost fill a bucket, every second one behind a prefix that was there before."""

    def __init__(self, loaded: LoadedModel, padded_tokens: int, *, fixed_shape: bool) -> None:
        page_size, max_len = loaded.pool.region().page_size, loaded.max_len
        most = loaded.buffers.fixed_reqs if fixed_shape else loaded.config.max_num_reqs
        self.num_tokens = padded_tokens - padded_tokens // 16
        prefix = min(page_size + 1, max_len // 2)
        num_reqs = max(min(3, most, self.num_tokens), -(-self.num_tokens // (max_len - prefix)))
        counts = [self.num_tokens // num_reqs] * num_reqs
        counts[0] += self.num_tokens - sum(counts)
        starts = [prefix * (i % 2) for i in range(num_reqs)]
        num_pages = -(-(max(counts) + prefix) // page_size)  # of a row
        self.fits = num_reqs <= most and num_reqs * num_pages < loaded.pool.num_pages
        vocab_size = loaded.model.spec.vocab_size
        chunks = tuple(
            Chunk(1 + i, start, tuple(7 * token % vocab_size for token in range(i, i + count)))
            for i, (start, count) in enumerate(zip(starts, counts, strict=True))
        )
        longest = max(start + count for start, count in zip(starts, counts, strict=True))
        pages = pages_of_rows(num_reqs, num_pages)
        self._plan = Plan(0, pages=pages, chunks=chunks, max_seq_len_ub=longest)
        self._padded_tokens, self._fixed_shape, self._loaded = padded_tokens, fixed_shape, loaded
        self._caches = caches_of(loaded, num_reqs * num_pages + 1)

    def set(self) -> Batch:
        """The same pages every time, and the batch over them."""
        fill(self._caches)
        buffers = self._loaded.buffers
        return buffers.chunks(self._plan, self._padded_tokens, fixed_shape=self._fixed_shape)

    def written(self) -> Tensor:
        """A digest of the pages."""
        return _digest(cache[1:] for cache in self._caches)

    def times_ms(self, *launches: LaunchChunks) -> list[float]:
        """Mean time of a forward by each."""
        batch = self.set()
        calls = [partial(launch, batch) for launch in launches]
        return _mean_ms(calls, self._loaded.state.device)

    def clear(self) -> None:
        """State and pages as at the start."""
        clear(self._loaded, self._caches)


def pages_of_rows(num_rows: int, num_pages: int) -> tuple[RowPages, ...]:
    """Rows 1 to num_rows with `num_pages` pages each, from page 1 on."""
    firsts = range(1, 1 + num_rows * num_pages, num_pages) if num_pages else ()
    return tuple(
        RowPages(row, 0, tuple(range(first, first + num_pages)))
        for row, first in enumerate(firsts, 1)
    )


def caches_of(loaded: LoadedModel, num_pages: int) -> list[Tensor]:
    """Keys and values of each layer, of the first `num_pages` pages, the sink among them."""
    return [
        cache[:num_pages]
        for layer in range(loaded.model.spec.num_layers)
        for cache in loaded.pool.layer(layer)
    ]


def fill(caches: Sequence[Tensor]) -> None:
    """The same random content every time."""
    generator = torch.Generator(caches[0].device).manual_seed(7)
    for cache in caches:
        cache.normal_(generator=generator)


def clear(loaded: LoadedModel, caches: Iterable[Tensor]) -> None:
    """State and pages as at the start."""
    loaded.state.reset()
    for cache in caches:
        cache.zero_()


def _is_near(found: Tensor, expected: Tensor, rounding: float) -> bool:
    """Whether no row differs by more than `rounding` of its norm; a NaN is far from everything."""
    error = torch.linalg.vector_norm(found.float() - expected.float(), dim=-1)
    return bool((error <= rounding * torch.linalg.vector_norm(expected.float(), dim=-1)).all())


def _digest(caches: Iterable[Tensor]) -> Tensor:
    """Sums of bits, not of values, which may be NaN: [number of caches] i64."""
    words = {2: torch.int16, 4: torch.int32}
    sums = [cache.view(words[cache.element_size()]).sum(dtype=torch.int64) for cache in caches]
    return torch.stack(sums)


def _mean_ms(launches: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """Mean time of each launch, from synchronize to synchronize, after one that warms up.

    The best of a few rounds, because other work on the machine may disturb one. The launches take
    turns: a GPU at the limit of its power slows down by 10 % and more within a second, and the last
    one would always look slow.
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
