"""Decode steps as CUDA graphs: everything from the rows to the drawn tokens in one replay.

For each bucket of rows there is a graph of the body alone, whose tail is launched op by op (for
grammars, penalties and logprobs), and one for each kind of tail, fused with the body. A graph's
only input is the tensor of its rows; places beyond the batch hold row 0, the sink, which writes to
page 0 and draws for nobody. Chunks of prompts are the inner runner's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from worker.errors import Unsupported
from worker.forward.batch import Batch
from worker.graph.base import BucketCheck, GraphRunner, Padding, Parts
from worker.graph.check import check_bucket
from worker.graph.eager import EagerRunner
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


class FullRunner:
    """The GraphRunner that replays decode steps.

    Args:
        parts: what a step is made of, on a CUDA device.
        inner: launches chunks.
        memory: of all captures.

    Raises:
        Unsupported: the decode backend plans on the host, which a replay cannot repeat.
    """

    def __init__(self, parts: Parts, inner: GraphRunner, memory: GraphMemory) -> None:
        if not parts.attention.decode.static_plan:
            raise Unsupported(
                "engine.graph.decode=full needs an attention backend with a static plan; "
                "set engine.graph.decode=eager or engine.attention.decode=triton",
                "engine.graph",
            )
        self.path = "eager"
        self.buckets = buckets(parts.config.engine.max_num_reqs)
        self._parts = parts
        self._inner, self._memory = inner, memory
        self._eager = EagerRunner(parts)
        device = parts.state.device
        self._rows = torch.zeros(self.buckets[-1], dtype=torch.int64, device=device)
        self._captured: dict[tuple[int, Tail], Captured] = {}
        self.checks: list[BucketCheck] = []

    @torch.inference_mode()
    def trial(self) -> None:
        """See GraphRunner.trial."""
        for tail in get_args(Tail):
            self._captured[self.buckets[-1], tail] = self._capture_one(self.buckets[-1], tail)
        self._inner.trial()

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every bucket, the largest first, so that smaller ones reuse its memory."""
        self._inner.capture()
        self.checks += self._inner.checks
        began = time.monotonic()
        for bucket in reversed(self.buckets):
            for tail in get_args(Tail):
                self._captured[bucket, tail] = self._capture_one(bucket, tail)
            log.info("captured decode graphs of %d rows", bucket)
        log.info("%d decode graphs in %.1f s", len(self._captured), time.monotonic() - began)
        self._check()

    def padded(
        self, num_tokens: int, num_reqs: int, max_seq_len_ub: int, *, hooked: bool
    ) -> Padding:
        """See GraphRunner.padded."""
        return self._inner.padded(num_tokens, num_reqs, max_seq_len_ub, hooked=hooked)

    def launch(self, batch: Batch, on_layer: Callable[[int], None] | None = None) -> Tensor:
        """See GraphRunner.launch."""
        hidden = self._inner.launch(batch, on_layer)
        self.path = self._inner.path
        return hidden

    def decode(
        self, rows: Sequence[int], max_seq_len_ub: int, tail: Tail
    ) -> tuple[Tensor, Result | None]:
        """See GraphRunner.decode."""
        bucket = next(each for each in self.buckets if each >= len(rows))
        padded = torch.zeros(bucket, dtype=torch.int64)
        padded[: len(rows)] = torch.tensor(rows, dtype=torch.int64)
        self._rows[:bucket].copy_(padded.pin_memory(), non_blocking=True)
        captured = self._captured[bucket, tail]
        captured.capture.replay()
        self.path = "graph"
        result = captured.result
        if result is not None:
            result = Result(result.drawn[: len(rows)])
        return captured.hidden[: len(rows)], result

    def close(self) -> None:
        """See GraphRunner.close."""
        self._captured.clear()
        self._inner.close()

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
        captured.capture.replay()
        return captured.hidden, captured.result

    def _capture_one(self, bucket: int, tail: Tail) -> Captured:
        rows, max_len, capture = self._rows[:bucket], self._parts.max_len, Capture(self._memory)
        hidden, result = capture.record(lambda _: self._eager.step(rows, max_len, tail))
        return Captured(capture, hidden, result)


def buckets(max_num_reqs: int) -> list[int]:
    """Numbers of rows that get graphs of their own, ascending; the last is `max_num_reqs`."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_reqs + 1, 32)]
    return [size for size in sizes if size < max_num_reqs] + [max_num_reqs]
