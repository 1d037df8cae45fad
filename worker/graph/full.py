"""Decode steps as CUDA graphs: everything from the rows to the drawn tokens in one replay.

Each bucket of rows has a graph of the body alone, whose tail is launched op by op (for grammars,
penalties and logprobs), and one for each kind of tail, fused with the body. A graph's only input is
the tensor of its rows; places beyond the batch hold row 0, the sink, which writes to page 0 and
draws for nobody.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from worker.errors import Unsupported
from worker.graph.base import BucketCheck, Decoded, LoadedModel
from worker.graph.check import check_bucket, report
from worker.graph.eager import EagerDecode
from worker.graph.segments import Capture, GraphMemory
from worker.plan import Tail
from worker.sampling.tail import Result

log = logging.getLogger("kvlane.graph")


@dataclass(slots=True)
class Captured:
    """One graph and its outputs, which the next replay overwrites."""

    capture: Capture  # without a break
    hidden: Tensor  # [bucket, hidden]
    result: Result | None


class FullDecode:
    """The DecodeGraphs that replays whole steps.

    Args:
        loaded: on a CUDA device.
        memory: of all captures.

    Raises:
        Unsupported: the decode backend plans on the host, which a replay cannot repeat.
    """

    def __init__(self, loaded: LoadedModel, memory: GraphMemory) -> None:
        if not loaded.attention.decode.static_plan:
            raise Unsupported(
                "engine.graph.decode=full needs an attention backend with a static plan; "
                "set engine.graph.decode=eager or engine.attention.decode=triton",
                "engine.graph",
            )
        self.buckets = buckets(loaded.config.max_num_reqs)
        self._loaded, self._memory = loaded, memory
        self._eager = EagerDecode(loaded)
        device = loaded.state.device
        self._rows = torch.zeros(self.buckets[-1], dtype=torch.int64, device=device)
        self._captured: dict[tuple[int, Tail], Captured] = {}

    @torch.inference_mode()
    def try_largest(self) -> None:
        """See ChunkGraphs.try_largest."""
        for tail in get_args(Tail):
            self._captured[self.buckets[-1], tail] = self._capture_one(self.buckets[-1], tail)

    @torch.inference_mode()
    def capture(self) -> Sequence[BucketCheck]:
        """Capture every bucket, the largest first, so that smaller ones reuse its memory.

        Raises:
            AssertionError: a graph and eager differ, and engine.strict is set.
        """
        began = time.monotonic()
        for bucket in reversed(self.buckets):
            for tail in get_args(Tail):
                self._captured[bucket, tail] = self._capture_one(bucket, tail)
            log.info("captured decode graphs of %d rows", bucket)
        log.info("%d decode graphs in %.1f s", len(self._captured), time.monotonic() - began)
        found = [self._check(bucket) for bucket in self.buckets]
        return [check for check in found if check is not None]

    def launch(self, rows: Sequence[int], max_seq_len_ub: int, tail: Tail) -> Decoded:
        """See DecodeGraphs.launch."""
        bucket = next(each for each in self.buckets if each >= len(rows))
        padded = torch.zeros(bucket, dtype=torch.int64)
        padded[: len(rows)] = torch.tensor(rows, dtype=torch.int64)
        self._rows[:bucket].copy_(padded.pin_memory(), non_blocking=True)
        captured = self._captured[bucket, tail]
        captured.capture.replay()
        result = captured.result
        if result is not None:
            result = Result(result.drawn[: len(rows)])
        return Decoded(captured.hidden[: len(rows)], result, "graph")

    def close(self) -> None:
        """See ChunkGraphs.close."""
        self._captured.clear()

    def _check(self, bucket: int) -> BucketCheck | None:
        """Compare a bucket with eager, result and time."""
        found = check_bucket(self._loaded, bucket, self._eager_step, self._replay)
        if found is not None:
            report(found, f"{bucket} decode rows", strict=self._loaded.config.strict)
        return found

    def _eager_step(self, rows: Tensor, tail: Tail) -> tuple[Tensor, Result | None]:
        return self._eager.step(rows, self._loaded.max_len, tail)

    def _replay(self, rows: Tensor, tail: Tail) -> tuple[Tensor, Result | None]:
        self._rows[: len(rows)].copy_(rows)
        captured = self._captured[len(rows), tail]
        captured.capture.replay()
        return captured.hidden, captured.result

    def _capture_one(self, bucket: int, tail: Tail) -> Captured:
        rows, max_len, capture = self._rows[:bucket], self._loaded.max_len, Capture(self._memory)
        hidden, result = capture.record(lambda _: self._eager.step(rows, max_len, tail))
        return Captured(capture, hidden, result)


def buckets(max_num_reqs: int) -> list[int]:
    """Numbers of rows that get graphs of their own, ascending; the last is `max_num_reqs`."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_reqs + 1, 32)]
    return [size for size in sizes if size < max_num_reqs] + [max_num_reqs]
