"""Builds the ChunkGraphs and DecodeGraphs that `engine.graph` names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from worker.errors import Unsupported
from worker.graph.base import (
    CHUNK_GRAPHS,
    DECODE_GRAPHS,
    BucketCheck,
    ChunkGraphs,
    DecodeGraphs,
    LoadedModel,
)
from worker.graph.eager import EagerChunks, EagerDecode
from worker.graph.segments import GraphMemory
from worker.metrics import Progress, untold
from worker.registry import resolve


@dataclass(slots=True, frozen=True)
class Graphs:
    """What launches the steps of one engine. Filled by `build_graphs`."""

    chunks: ChunkGraphs
    decode: DecodeGraphs
    loaded: LoadedModel

    def run_largest_steps(self) -> None:
        """Run the largest steps once, so that their peak memory can be measured.

        Captures run first: they empty the allocator's cache, which holds the eager steps' peak.
        """
        if self.loaded.decodes:
            self.decode.capture_largest()
        self.chunks.capture_largest()
        if self.loaded.decodes:
            EagerDecode(self.loaded).run_largest()
        EagerChunks(self.loaded).run_largest()

    def capture(self, progress: Progress = untold) -> Sequence[BucketCheck]:
        """See StepGraphs.capture; chunks are the first half of it."""
        if not self.loaded.decodes:
            return self.chunks.capture(progress)
        of_chunks = self.chunks.capture(lambda what, done, n: progress(what, done, 2 * n))
        of_decode = self.decode.capture(lambda what, done, n: progress(what, n + done, 2 * n))
        return [*of_chunks, *of_decode]

    def close(self) -> None:
        """Free captured graphs."""
        self.decode.close()
        self.chunks.close()


def build_graphs(loaded: LoadedModel) -> Graphs:
    """Build what `engine.graph` names for each kind of step.

    Raises:
        Unsupported: the device has no graphs, or `loaded` cannot be captured.
    """
    asked, device = loaded.config.graph, loaded.state.device
    names = [name for name in (asked.prefill, asked.decode) if name != "eager"]
    if names and device.type != "cuda":
        raise Unsupported(
            f"engine.graph: {', '.join(names)} needs CUDA, and engine.device is {device.type}; "
            "set engine.graph=eager or leave it auto",
            "engine.graph",
        )
    memory = GraphMemory(device) if names else None
    chunks = resolve("graphs of chunks", asked.prefill, CHUNK_GRAPHS)(loaded, memory)
    decode = resolve("graphs of decode steps", asked.decode, DECODE_GRAPHS)(loaded, memory)
    return Graphs(chunks, decode, loaded)
