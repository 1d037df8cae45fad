"""Decode steps as CUDA graphs: everything from the rows to the drawn tokens in one replay.

A bucket (a padded number of rows) has one graph for each kind of tail, and one of the forward alone
for steps with grammars, penalties or logprobs, whose tail is launched eagerly. The only input is
the tensor of row numbers; padding is row 0, the sink, which writes to page 0 and draws nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from worker.errors import Unsupported
from worker.graph.base import BucketCheck, Decoded, LoadedModel
from worker.graph.check import check_bucket
from worker.graph.eager import EagerDecode
from worker.graph.segments import Capture, GraphMemory
from worker.metrics import Progress, untold
from worker.plan import TAILS, Tail
from worker.sampling.tail import Result

log = logging.getLogger("kvlane.graph")


class CapturedStep(NamedTuple):
    """One decode step as a graph without breaks; `replay` overwrites the tensors of `decoded`."""

    capture: Capture
    decoded: Decoded


class FullDecode:
    """DecodeGraphs that replays whole steps.

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
        self.buckets = decode_buckets(int(loaded.config.max_num_reqs))
        self._loaded, self._memory = loaded, memory
        self._eager = EagerDecode(loaded)
        device = loaded.state.device
        self._rows = torch.zeros(self.buckets[-1], dtype=torch.int64, device=device)
        self._captured: dict[tuple[int, Tail], CapturedStep] = {}

    @torch.inference_mode()
    def capture_largest(self) -> None:
        """See StepGraphs.capture_largest."""
        self._capture_bucket(self.buckets[-1])

    @torch.inference_mode()
    def capture(self, progress: Progress = untold) -> Sequence[BucketCheck]:
        """Capture every bucket, the largest first, so that smaller ones reuse its memory.

        Raises:
            AssertionError: a graph and eager differ, and engine.strict is set.
        """
        began = time.monotonic()
        for i, bucket in enumerate(reversed(self.buckets)):
            progress("capture", i, len(self.buckets))
            self._capture_bucket(bucket)
        log.info("%d decode graphs in %.1f s", len(self._captured), time.monotonic() - began)
        found = [
            check_bucket(self._loaded, bucket, self._eager_step, self._replay)
            for bucket in self.buckets
        ]
        return [check for check in found if check is not None]

    def launch(self, rows: Sequence[int], max_seq_len_ub: int, tail: Tail) -> Decoded:
        """See DecodeGraphs.launch."""
        bucket = next(each for each in self.buckets if each >= len(rows))
        padded = torch.zeros(bucket, dtype=torch.int64)
        padded[: len(rows)] = torch.tensor(rows, dtype=torch.int64)
        hidden, sampled, result, path = self._replay(padded.pin_memory(), tail)
        return Decoded(
            hidden[: len(rows)],
            None if sampled is None else sampled.first(len(rows)),
            None if result is None else Result(result.drawn[: len(rows)]),
            path,
        )

    def close(self) -> None:
        """See StepGraphs.close."""
        self._captured.clear()

    def _eager_step(self, rows: Tensor, tail: Tail) -> Decoded:
        return self._eager.step(rows, self._loaded.max_len, tail)

    def _replay(self, rows: Tensor, tail: Tail) -> Decoded:
        self._rows[: len(rows)].copy_(rows, non_blocking=True)
        captured = self._captured[len(rows), tail]
        captured.capture.replay()
        return captured.decoded

    def _capture_bucket(self, bucket: int) -> None:
        rows = self._rows[:bucket]
        for tail in TAILS:
            capture = Capture(self._memory)
            decoded = capture.record(lambda _, tail=tail: self._eager_step(rows, tail))
            self._captured[bucket, tail] = CapturedStep(capture, decoded._replace(path="graph"))


def decode_buckets(max_num_reqs: int) -> list[int]:
    """Numbers of rows that get graphs of their own, ascending; the last is `max_num_reqs`."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_reqs + 1, 32)]
    return [size for size in sizes if size < max_num_reqs] + [max_num_reqs]
