"""Decode steps as CUDA graphs: everything from the rows to the drawn tokens in one replay.

For each bucket of rows there is a graph of the body alone, whose tail is launched op by op (for
grammars, penalties and logprobs), and one for each kind of tail, fused with the body. A graph's
only input is the tensor of its rows; places beyond the batch hold row 0, the sink, which writes to
page 0 and draws for nobody. Prompts are launched op by op.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from worker.batch import Batch
from worker.graph.base import BucketCheck, Parts
from worker.graph.check import check_bucket
from worker.graph.eager import EagerRunner
from worker.plan import Tail
from worker.tail import Result

log = logging.getLogger("kvlane.graph")

NUM_WARMUPS = 2  # libraries allocate workspaces and choose kernels in the first calls


@dataclass(slots=True)
class Captured:
    """One graph and its outputs, which the next replay overwrites."""

    graph: torch.cuda.CUDAGraph
    hidden: Tensor  # [bucket, hidden]
    result: Result | None


class FullRunner:
    """The GraphRunner that replays decode steps.

    Args:
        parts: what a step is made of, on a CUDA device.
    """

    def __init__(self, parts: Parts) -> None:
        self.path = "eager"
        self.buckets = buckets(parts.config.engine.max_num_reqs)
        self._parts = parts
        self._eager = EagerRunner(parts)
        device = parts.state.device
        self._rows = torch.zeros(self.buckets[-1], dtype=torch.int64, device=device)
        self._captured: dict[tuple[int, Tail], Captured] = {}
        self.checks: list[BucketCheck] = []

    @torch.inference_mode()
    def trial(self) -> None:
        """See GraphRunner.trial."""
        self._eager.trial()
        pool = torch.cuda.graph_pool_handle()
        for tail in get_args(Tail):
            self._captured[self.buckets[-1], tail] = self._capture_one(self.buckets[-1], tail, pool)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every bucket, the largest first, so that smaller ones reuse its memory."""
        began, pool = time.monotonic(), torch.cuda.graph_pool_handle()
        for bucket in reversed(self.buckets):
            for tail in get_args(Tail):
                self._captured[bucket, tail] = self._capture_one(bucket, tail, pool)
            log.info("captured decode graphs of %d rows", bucket)
        log.info("%d decode graphs in %.1f s", len(self._captured), time.monotonic() - began)
        self._check()

    def launch(self, batch: Batch) -> Tensor:
        """See GraphRunner.launch: prompts."""
        self.path = "eager"
        return self._eager.launch(batch)

    def decode(
        self, rows: Sequence[int], max_seq_len_ub: int, tail: Tail
    ) -> tuple[Tensor, Result | None]:
        """See GraphRunner.decode."""
        bucket = next(each for each in self.buckets if each >= len(rows))
        padded = torch.zeros(bucket, dtype=torch.int64)
        padded[: len(rows)] = torch.tensor(rows, dtype=torch.int64)
        self._rows[:bucket].copy_(padded.pin_memory(), non_blocking=True)
        captured = self._captured[bucket, tail]
        captured.graph.replay()
        self.path = "graph"
        result = captured.result
        if result is not None:
            result = Result(result.drawn[: len(rows)])
        return captured.hidden[: len(rows)], result

    def close(self) -> None:
        """See GraphRunner.close."""
        self._captured.clear()

    def _check(self) -> None:
        """Compare every bucket with eager, result and time.

        Raises:
            AssertionError: a graph and eager differ, and engine.strict is set.
        """
        for bucket in self.buckets:
            found = check_bucket(self._parts, bucket, self._eager_step, self._replay)
            if found is None:
                continue
            self.checks.append(found)
            log.info(
                "%4d rows: graph %.3f ms, eager %.3f ms, %s",
                bucket, found.graph_ms, found.eager_ms, "equal" if found.equal else "DIFFERENT",
            )  # fmt: skip
            assert found.equal or not self._parts.config.engine.strict, (
                f"the decode graph of {bucket} rows differs from eager"
            )

    def _eager_step(self, rows: Tensor, tail: Tail) -> tuple[Tensor, Result | None]:
        return self._eager.step(rows, self._parts.max_len, tail)

    def _replay(self, rows: Tensor, tail: Tail) -> tuple[Tensor, Result | None]:
        self._rows[: len(rows)].copy_(rows)
        captured = self._captured[len(rows), tail]
        captured.graph.replay()
        return captured.hidden, captured.result

    def _capture_one(self, bucket: int, tail: Tail, pool: Any) -> Captured:
        rows, max_len = self._rows[:bucket], self._parts.max_len
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(NUM_WARMUPS):
                self._eager.step(rows, max_len, tail)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        gc.collect()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            hidden, result = self._eager.step(rows, max_len, tail)
        return Captured(graph, hidden, result)


def buckets(max_num_reqs: int) -> list[int]:
    """Numbers of rows that get graphs of their own, ascending; the last is `max_num_reqs`."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_reqs + 1, 32)]
    return [size for size in sizes if size < max_num_reqs] + [max_num_reqs]
