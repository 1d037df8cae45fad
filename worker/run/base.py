"""The seam of graphs: ChunkGraphs launches a step of prompt chunks, DecodeGraphs a decode step."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import Tensor

from worker.attention.base import Attentions
from worker.cache.pool import KVPool
from worker.config import EngineConfig
from worker.config.progress import Progress, no_progress
from worker.drafts.base import Drafter
from worker.drafts.drafter import DrafterModel
from worker.draw.logprobs import Scores
from worker.draw.sampler import Result
from worker.forward.batch import Batch
from worker.forward.context import LayerHook
from worker.forward.draws import Masks
from worker.model.decoder import Decoder
from worker.plan import PaddedShape as PaddedShape
from worker.plan import Plan, Tail
from worker.step.buffers import BatchBuffers
from worker.step.state import SampledRows, StepState, Windows


class Weights(NamedTuple):
    """The models of a worker, the same in both roles. Filled by `worker.start.load`."""

    model: Decoder
    drafter: DrafterModel | None
    digest: str  # of all that a page's bytes depend on; equal for any number of ranks


@dataclass(slots=True, frozen=True)
class LoadedModel:
    """A model on its device with all that its steps need. Filled by `worker.start.load`."""

    model: Decoder
    attention: Attentions
    pool: KVPool
    state: StepState
    buffers: BatchBuffers  # of prefill steps
    windows: Windows  # of decode steps
    config: EngineConfig  # resolved
    max_len: int  # tokens of one request at most
    widths: tuple[int, ...]  # of windows of decode steps, ascending; 1 is the first
    decodes: bool  # a decode worker; prefill workers draw first tokens only
    always_hooked: bool  # the loop passes a layer hook with every prefill step
    drafter: Drafter | None = None  # takes part in every step


@dataclass(slots=True, frozen=True)
class BucketCheck:
    """Result of the start-up check of one bucket. Filled by `run/check.py`."""

    kind: Literal["prefill", "decode"]
    bucket: int  # tokens of chunks, or requests that decode
    width: int = field(default=1, kw_only=True)  # of their windows
    fixed_len: int = field(default=0, kw_only=True)  # of an unbroken graph of chunks; 0: piecewise
    equal: bool  # graph and eager agree: bit for bit, or within `rounding` if a compiler fused ops
    graph_ms: float  # time of one prefill forward, or of one greedy decode step
    eager_ms: float

    @property
    def name(self) -> str:
        """The bucket, with the width of windows."""
        return str(self.bucket) if self.width == 1 else f"{self.bucket}x{self.width}"


class Forward(NamedTuple):
    """One launched forward of chunks."""

    # After the final norm, [num_tokens, hidden]; if the batch has n last_token_rows, of these
    # tokens only, [n, hidden]. The next step may overwrite it.
    hidden: Tensor
    path: str  # for metrics: "graph" (without breaks), "piecewise" or "eager"


class Decoded(NamedTuple):
    """What a launched forward left; the next step may overwrite the tensors."""

    hidden: Tensor  # [len(rows) * width, hidden]; of a prefill step: [rows that sample, hidden]
    sampled: SampledRows | None  # the rows to draw for; None: drawn already, or nothing to draw
    result: Result | None  # None: not drawn yet
    path: str  # for metrics: "graph" or "eager"
    num_tokens: int  # computed by the forward, padding included
    scores: Scores | None = None  # of prompts


class Outcome(NamedTuple):
    """What a step has come to, on its way to the host."""

    result: Result | None  # None: nothing was drawn
    scores: Scores | None  # of prompts; None: none were to be scored
    path: str  # how it was launched, for metrics: see Forward and Decoded
    num_tokens: int  # of its forward, with padding

    def to_host(self) -> "Outcome":
        """See OnDevice."""
        result = None if self.result is None else self.result.to_host()
        scores = None if self.scores is None else self.scores.to_host()
        return self._replace(result=result, scores=scores)


class StepGraphs:
    """Launches one kind of step. Built as `cls(loaded, memory)`; without graphs memory is None."""

    def run_buckets(self) -> None:
        """Run what `capture` will capture, for `compile_ahead`. The pool may be tiny."""

    def capture_largest(self) -> None:
        """Capture the largest bucket, to measure its memory. The pool may be tiny."""

    def capture(self, progress: Progress = no_progress) -> Sequence[BucketCheck]:
        """Prepare and check every bucket; called once, before the first launch.

        Raises AssertionError if a graph and eager differ, and engine.strict is set.
        """
        return ()

    def close(self) -> None:
        """Free captured graphs."""


class ChunkGraphs(StepGraphs, ABC):
    """Launches forwards over prompt chunks."""

    def padded(
        self, num_tokens: int, num_reqs: int, max_seq_len_ub: int, *, hooked: bool
    ) -> PaddedShape:
        """Choose how to build a batch for `launch`; hooked: `launch` will get a layer hook."""
        return PaddedShape()

    @abstractmethod
    def launch(self, batch: Batch, on_layer: LayerHook | None = None) -> Forward:
        """Enqueue one forward over the batch that `BatchBuffers.chunks` built last.

        Its shape is what `padded` chose. on_layer: see ForwardContext; a replay calls it as well.
        """


class DecodeGraphs(StepGraphs, ABC):
    """Launches decode steps."""

    @abstractmethod
    def launch(self, plan: Plan, tail: Tail) -> Decoded:
        """Enqueue one decode step; its row changes are applied already.

        tail: of its draws; "none": the forward alone, and `draw` follows.
        """

    @abstractmethod
    def draw(self, forwarded: Decoded, plan: Plan, masks: Masks | None) -> Result:
        """Enqueue the draws behind what `launch` returned last, if they are launched apart.

        masks: of the plan's rows, on the host; None: no row has a grammar.
        """


CHUNK_GRAPHS = {
    "eager": "worker.run.eager:EagerChunks",
    "piecewise": "worker.run.piecewise:PiecewiseChunks",
    "compiled": "worker.run.compiled:compiled_chunks",
}
DECODE_GRAPHS = {"eager": "worker.run.eager:EagerDecode", "full": "worker.run.full:FullDecode"}
