"""Builds the ChunkGraphs and DecodeGraphs that `engine.graph` names."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from worker.errors import Unsupported
from worker.observe.metrics import Progress, untold
from worker.ops.compile_ahead import compile_ahead
from worker.registry import resolve
from worker.run.base import (
    CHUNK_GRAPHS,
    DECODE_GRAPHS,
    BucketCheck,
    ChunkGraphs,
    DecodeGraphs,
    LoadedModel,
)
from worker.run.largest import run_largest_chunks, run_largest_windows
from worker.run.segments import GraphMemory

log = logging.getLogger("kvlane.graph")


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
        if self.loaded.state.device.type == "cuda":
            self._compile()
        if self.loaded.decodes:
            self.decode.capture_largest()
        self.chunks.capture_largest()
        self._run_eagerly()

    def _compile(self) -> None:
        """Compile the kernels of eager steps and of everything that will be captured."""

        def steps() -> None:
            self._run_eagerly()
            self.chunks.run_buckets()
            if self.loaded.decodes:
                self.decode.run_buckets()

        began = time.monotonic()
        num_kernels = compile_ahead(steps)
        log.info("found or compiled %d kernels in %.1f s", num_kernels, time.monotonic() - began)

    def _run_eagerly(self) -> None:
        if self.loaded.decodes:
            run_largest_windows(self.loaded)
        run_largest_chunks(self.loaded)

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
