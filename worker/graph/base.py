"""The seam between a step and the launch of its device work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from worker.attention.base import AttentionBackend
from worker.batch import Batch
from worker.buffers import BatchBuffers
from worker.cache.pool import KVPool
from worker.config import WorkerConfig
from worker.models.decoder import Decoder
from worker.plan import Tail
from worker.state import StepState
from worker.tail import Result


@dataclass(slots=True, frozen=True)
class Parts:
    """What a step's device work is made of. Filled by `build_engine`."""

    model: Decoder
    attention: AttentionBackend
    pool: KVPool
    state: StepState
    buffers: BatchBuffers
    config: WorkerConfig  # resolved
    max_len: int  # tokens of one request at most


@dataclass(slots=True, frozen=True)
class BucketCheck:
    """What the start-up check of one bucket of rows found. Filled by `graph.check`."""

    bucket: int
    equal: bool  # bit for bit, to the same step launched op by op
    graph_ms: float  # a greedy step
    eager_ms: float


class GraphRunner(Protocol):
    """Launches the device work of steps, built as `cls(parts)`."""

    path: str  # how the last step was launched, for the metrics
    checks: list[BucketCheck]  # of the buckets that were captured

    def trial(self) -> None:
        """Run the largest steps once, over whatever small pool there is, and keep their memory."""
        ...

    def capture(self) -> None:
        """Prepare every bucket; called once, before the first launch."""
        ...

    def launch(self, batch: Batch) -> Tensor:
        """Enqueue one forward; hidden states after the final norm, [num_tokens, hidden]."""
        ...

    def decode(
        self, rows: Sequence[int], max_seq_len_ub: int, tail: Tail
    ) -> tuple[Tensor, Result | None]:
        """Enqueue one decode step.

        Args:
            rows: of the step state, one token each.
            max_seq_len_ub: host bound of their KV lengths after it.
            tail: which sampling follows; "none" = the caller draws.

        Returns:
            Hidden states [len(rows), hidden], and what was drawn; both may be overwritten by the
            next step, so whatever reads them has to be enqueued before that.
        """
        ...

    def close(self) -> None:
        """Free captured graphs."""
        ...


GRAPHS = {
    "eager": "worker.graph.eager:EagerRunner",
    "full": "worker.graph.full:FullRunner",
}
