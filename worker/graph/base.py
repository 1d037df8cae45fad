"""The seam between a step and the launch of its device work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from worker.attention.base import Attentions
from worker.cache.pool import KVPool
from worker.config import WorkerConfig
from worker.forward.batch import Batch
from worker.models.decoder import Decoder
from worker.plan import Tail
from worker.sampling.tail import Result
from worker.step.buffers import BatchBuffers
from worker.step.state import StepState


@dataclass(slots=True, frozen=True)
class Parts:
    """What a step's device work is made of. Filled by `build_engine`."""

    model: Decoder
    attention: Attentions
    pool: KVPool
    state: StepState
    buffers: BatchBuffers
    config: WorkerConfig  # resolved
    max_len: int  # tokens of one request at most


@dataclass(slots=True, frozen=True)
class Padding:
    """The shape in which a batch of chunks is to be built; see `BatchBuffers.chunks`."""

    num_rows: int = 0  # 0: as many as it has tokens
    steady: bool = False


@dataclass(slots=True, frozen=True)
class BucketCheck:
    """What the start-up check of one bucket of rows found. Filled by `graph.check`."""

    kind: Literal["prefill", "prefill_whole", "decode"]
    bucket: int  # rows: tokens of chunks, or requests that decode
    equal: bool  # to the same step launched op by op: bit for bit, or but for a compiler's rounding
    graph_ms: float  # a forward of chunks, or a greedy step
    eager_ms: float


class GraphRunner(Protocol):
    """Launches the device work of steps.

    Runners stand one around the other, see `graph.build`: each hands on what it has no graphs for.
    """

    path: str  # of the last step, for metrics: graph, piecewise, eager or eager_<why no graph>
    checks: list[BucketCheck]  # of the buckets that were captured

    def trial(self) -> None:
        """Run the largest steps once, over whatever small pool there is, and keep their memory."""
        ...

    def capture(self) -> None:
        """Prepare every bucket; called once, before the first launch."""
        ...

    def padded(
        self, num_tokens: int, num_reqs: int, max_seq_len_ub: int, *, hooked: bool
    ) -> Padding:
        """How a batch of chunks has to be built for `launch`, `hooked` if with on_layer."""
        ...

    def launch(self, batch: Batch, on_layer: Callable[[int], None] | None = None) -> Tensor:
        """Enqueue one forward of chunks.

        Args:
            batch: built last by `BatchBuffers.chunks`, as `padded` says.
            on_layer: called with each layer's id, in order, once its KV is enqueued, whether by a
                graph or not.

        Returns:
            Hidden states after the final norm, [num_tokens, hidden], or those of `batch.wanted`
            alone; the next step may overwrite them.
        """
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


# Built as cls(parts, inner, memory): the runner around which it stands, and the memory of captures.
GRAPHS = {
    "piecewise": "worker.graph.piecewise:PiecewiseRunner",
    "compiled": "worker.graph.compiled:compiled",
    "compiled_plain": "worker.graph.compiled:compiled_plain",
    "full": "worker.graph.full:FullRunner",
}
