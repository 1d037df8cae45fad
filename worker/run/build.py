"""Builds the ChunkGraphs and DecodeGraphs that `engine.graph` names, and runs the largest steps.

They run op by op and captured, which measures memory and compiles kernels. All tokens and
rows are padding. Draws run for every number of rows for which kernels differ.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from worker.api import MAX_LOGPROBS
from worker.config.progress import Progress, no_progress
from worker.draw.sampler import Draws
from worker.errors import Unsupported
from worker.forward.batch import HostLengths, WindowShape
from worker.forward.draws import Masks
from worker.ops.compile_ahead import compile_ahead
from worker.plan import TAILS, Plan, max_rows
from worker.registry import resolve
from worker.run.base import (
    CHUNK_GRAPHS,
    DECODE_GRAPHS,
    BucketCheck,
    ChunkGraphs,
    Decoded,
    DecodeGraphs,
    LoadedModel,
)
from worker.run.eager import EagerChunks, EagerDecode, draw_rows
from worker.run.segments import GraphMemory
from worker.step.state import SampledRows

log = logging.getLogger("kvlane.graph")


@dataclass(slots=True, frozen=True)
class Graphs:
    """What launches the steps of one engine. Filled by `build_graphs`."""

    chunks: ChunkGraphs
    decode: DecodeGraphs
    loaded: LoadedModel

    def run_largest_steps(self) -> None:
        """Run the largest steps once, so that their peak memory can be measured.

        Captures come before the eager steps, because a capture empties the allocator's cache. The
        cache has to hold the eager steps' peak when it is measured.
        """
        if self.loaded.state.device.type == "cuda":
            began = time.monotonic()
            num, took_s = compile_ahead(self._run_all), time.monotonic() - began
            log.info("found or compiled %d kernels in %.1f s", num, took_s)
        if self.loaded.decodes:
            self.decode.capture_largest()
        self.chunks.capture_largest()
        self._run_eagerly()

    def _run_all(self) -> None:
        """Run eager steps and everything that will be captured."""
        self._run_eagerly()
        self.chunks.run_buckets()
        if self.loaded.decodes:
            self.decode.run_buckets()

    def _run_eagerly(self) -> None:
        if self.loaded.decodes:
            _run_largest_windows(self.loaded)
        _run_largest_chunks(self.loaded)

    def capture(self, progress: Progress = no_progress) -> Sequence[BucketCheck]:
        """See StepGraphs.capture; `progress` counts chunks first."""
        if not self.loaded.decodes:
            return self.chunks.capture(progress)
        of_chunks = self.chunks.capture(lambda stage, done, n: progress(stage, done, 2 * n))
        of_decode = self.decode.capture(lambda stage, done, n: progress(stage, n + done, 2 * n))
        return [*of_chunks, *of_decode]

    def close(self) -> None:
        """Free captured graphs."""
        self.decode.close()
        self.chunks.close()


def build_graphs(loaded: LoadedModel) -> Graphs:
    """Build what `engine.graph` names; Unsupported if the device or `loaded` cannot have it."""
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


@torch.inference_mode()
def _run_largest_chunks(loaded: LoadedModel) -> None:
    """Run the largest prefill step; on a prefill worker also the draws of first tokens."""
    batch = loaded.buffers.blank_chunk(int(loaded.config.max_prefill_tokens))
    hidden, _ = EagerChunks(loaded).launch(batch)
    if loaded.decodes:
        return
    most = min(int(loaded.config.max_num_reqs), int(loaded.config.max_prefill_tokens))
    for num_rows in _sizes(most):
        rows = torch.zeros(num_rows, dtype=torch.int64, device=hidden.device)
        sampled = SampledRows(rows, rows, torch.zeros_like(rows, dtype=torch.bool))
        for tail in TAILS[1:]:
            draw_rows(loaded, Decoded(hidden[rows], sampled, None, "", 0), Draws(tail))


@torch.inference_mode()
def _run_largest_windows(loaded: LoadedModel) -> None:
    """Run the largest decode steps of all widths, and the draws with penalties and logprobs."""
    decode, device = EagerDecode(loaded), loaded.state.device
    plan = Plan(0, tail=TAILS[-1], penalized=True, num_logprobs=MAX_LOGPROBS)
    for width in loaded.widths:
        num_rows = max_rows(width, int(loaded.config.max_num_reqs))
        rows = torch.zeros(num_rows, dtype=torch.int64, device=device)
        host = HostLengths([1] * num_rows, [loaded.max_len] * num_rows) if width == 1 else None
        window = WindowShape(width, loaded.max_len + width - 1, host)
        decode.step(rows, window, TAILS[-1])
        forwarded = decode.step(rows, window)
        assert forwarded.sampled is not None
        for num in _sizes(num_rows):
            hidden, sampled = forwarded.hidden[: num * width], forwarded.sampled.first(num)
            first = forwarded._replace(hidden=hidden, sampled=sampled)
            decode.draw(first, plan, Masks.none(num * width, loaded.model.shape.vocab_size))
            if loaded.drafter is not None and width == 1:
                loaded.drafter.seed(rows[:num])


def _sizes(most: int) -> set[int]:
    return {most, *(1 << i for i in range(most.bit_length()))}
