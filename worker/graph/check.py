"""The start-up self-check: every captured bucket against the same step launched op by op.

Results have to be equal bit for bit at the same padded shape, hidden states, tokens and the KV that
was written; times say what a bucket is worth. Runs on an idle engine and leaves state and pages
zero.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from worker.graph.base import BucketCheck, Parts
from worker.plan import Tail
from worker.tail import Result

log = logging.getLogger("kvlane.graph")

NUM_TIMED = 5
MAX_CHECK_LEN = 256  # tokens of KV that the rows of a check pretend to have

TAILS_CHECKED: tuple[Tail, ...] = ("none", "greedy", "filtered")
Launch = Callable[[Tensor, Tail], tuple[Tensor, Result | None]]


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
    graph_ms, eager_ms = (scene.time_ms(launch) for launch in (graph, eager))
    scene.clear()
    return BucketCheck(bucket, equal, graph_ms, eager_ms)


class Scene:
    """Rows 1 to `bucket` with a history, as if they had been served for a while."""

    def __init__(self, parts: Parts, bucket: int) -> None:
        pool = parts.pool
        page_size, device = pool.region().page_size, parts.state.device
        longest = min(MAX_CHECK_LEN, parts.max_len - 1)
        self.num_pages = min(-(-longest // page_size), (pool.num_pages - 1) // bucket)  # of a row
        self.rows = torch.arange(1, bucket + 1, device=device)
        self._longest = self.num_pages * page_size - NUM_TIMED - 3
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
        sums = [cache[1:].sum(dtype=torch.float64) for cache in self._caches]
        return torch.stack(sums)

    def time_ms(self, launch: Launch) -> float:
        """Mean time of a greedy step."""
        self.set()
        launch(self.rows, "greedy")
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(NUM_TIMED):
            launch(self.rows, "greedy")
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / NUM_TIMED

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
