"""The seam between a step and the launch of its device work: chunks, and decode steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from worker.attention.base import Attentions
from worker.cache.pool import KVPool
from worker.config import EngineConfig
from worker.forward.batch import Batch
from worker.forward.context import LayerHook
from worker.models.decoder import Decoder
from worker.plan import Tail
from worker.sampling.tail import Result
from worker.step.buffers import BatchBuffers
from worker.step.state import StepState


@dataclass(slots=True, frozen=True)
class Capabilities:
    """What a worker's loop asks of its engine; each role names its own."""

    decodes: bool  # it launches decode steps and draws tokens
    hooks_every_chunk: bool = False  # it wants the layer hook in every step of chunks


@dataclass(slots=True, frozen=True)
class LoadedModel:
    """A model on its device with all that its steps need. Filled by `worker.engine.load`."""

    model: Decoder
    attention: Attentions
    pool: KVPool
    state: StepState
    buffers: BatchBuffers
    config: EngineConfig  # resolved
    max_len: int  # tokens of one request at most
    capabilities: Capabilities


@dataclass(slots=True, frozen=True)
class PaddedShape:
    """The shape in which a batch of chunks is to be built; see `BatchBuffers.chunks`."""

    num_tokens: int = 0  # 0: as many as it has
    fixed: bool = False  # the number of requests is padded as well
    refused: str = ""  # why no graph serves the batch, for metrics


@dataclass(slots=True, frozen=True)
class BucketCheck:
    """What the start-up check of one bucket found. Filled by `graph.check`."""

    kind: Literal["prefill", "prefill_full", "decode"]
    bucket: int  # tokens of chunks, or requests that decode
    equal: bool  # to the same step launched op by op: bit for bit, or but for a compiler's rounding
    graph_ms: float  # a forward of chunks, or a greedy step
    eager_ms: float


class Forward(NamedTuple):
    """One launched forward of chunks."""

    # After the final norm, [num_tokens, hidden] or of `batch.last_token_rows` alone; the next step
    # may overwrite them.
    hidden: Tensor
    path: str  # for metrics: graph, piecewise or eager


class Decoded(NamedTuple):
    """One launched decode step; the next step may overwrite the tensors."""

    hidden: Tensor  # [len(rows), hidden]
    result: Result | None  # None: the caller draws
    path: str  # for metrics: graph or eager


class ChunkGraphs(Protocol):
    """Launches forwards over prompt chunks. Built as `cls(loaded, memory)`."""

    def try_largest(self) -> None:
        """Capture the largest bucket over whatever small pool there is, and keep its memory."""
        ...

    def capture(self) -> Sequence[BucketCheck]:
        """Prepare and check every bucket; called once, before the first launch."""
        ...

    def padded(
        self, num_tokens: int, num_reqs: int, max_seq_len_ub: int, *, hooked: bool
    ) -> PaddedShape:
        """How a batch has to be built for `launch`; `hooked`: it will be given a layer hook."""
        ...

    def launch(self, batch: Batch, on_layer: LayerHook | None = None) -> Forward:
        """Enqueue one forward.

        Args:
            batch: built last by `BatchBuffers.chunks`, as `padded` says.
            on_layer: see ForwardContext; a replay calls it as well.
        """
        ...

    def close(self) -> None:
        """Free captured graphs."""
        ...


class DecodeGraphs(Protocol):
    """Launches decode steps. Built as `cls(loaded, memory)`."""

    def try_largest(self) -> None:
        """See ChunkGraphs.try_largest."""
        ...

    def capture(self) -> Sequence[BucketCheck]:
        """See ChunkGraphs.capture."""
        ...

    def launch(self, rows: Sequence[int], max_seq_len_ub: int, tail: Tail) -> Decoded:
        """Enqueue one decode step.

        Args:
            rows: of the step state, one token each.
            max_seq_len_ub: host bound of their KV lengths after it.
            tail: which sampling follows; "none" = the caller draws.
        """
        ...

    def close(self) -> None:
        """See ChunkGraphs.close."""
        ...


CHUNK_GRAPHS = {
    "eager": "worker.graph.eager:EagerChunks",
    "piecewise": "worker.graph.piecewise:PiecewiseChunks",
    "compiled": "worker.graph.compiled:compiled",
}
DECODE_GRAPHS = {
    "eager": "worker.graph.eager:EagerDecode",
    "full": "worker.graph.full:FullDecode",
}
