"""ModelRunner: one step on the device, launched without waiting; and Step, the wait for it."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from worker.buffers import BatchBuffers
from worker.graph.base import GraphRunner
from worker.models.decoder import Decoder
from worker.plan import Drawn, Plan
from worker.sampler import SamplingRows, sample
from worker.state import StepState


class Step:
    """A launched step. `wait()` is the only host sync of the engine's loop."""

    def __init__(
        self,
        plan: Plan,
        running: Future[Tensor | None] | None,
        result: Tensor | None = None,
        event: torch.cuda.Event | None = None,
    ) -> None:
        self.plan = plan
        self._running = running
        self._result = result
        self._event = event

    def wait(self) -> list[Drawn]:
        """Block until the device is through; the tokens of plan.sampled_rows."""
        if self._event is not None:
            self._event.synchronize()
        result = self._running.result() if self._running is not None else self._result
        if result is None:
            return []
        return [
            Drawn(token, bool(valid), bool(finished)) for token, valid, finished in result.tolist()
        ]


class ModelRunner:
    """Applies plans to the step state, runs the body, draws tokens, all on one stream.

    On CUDA the stream is the current one. On CPU it is a thread of its own that takes one step
    after the other, so that launching, settling and pulling overlap with compute there as well.
    """

    def __init__(
        self, model: Decoder, graph: GraphRunner, state: StepState, page_size: int
    ) -> None:
        self._model = model
        self._graph = graph
        self._state = state
        self._buffers = BatchBuffers(state, page_size)
        cpu = state.device.type == "cpu"
        self._stream = ThreadPoolExecutor(1, "kvlane-stream") if cpu else None

    def launch(self, plan: Plan) -> Step:
        """Enqueue one step; returns before the device is through."""
        if self._stream is not None:
            return Step(plan, self._stream.submit(self._run, plan))
        drawn = self._run(plan)
        if drawn is not None:
            host = torch.empty(drawn.shape, dtype=drawn.dtype, pin_memory=True)
            drawn = host.copy_(drawn, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return Step(plan, None, drawn, event)

    def close(self) -> None:
        """Finish what was launched and free what the graph runner holds."""
        if self._stream is not None:
            self._stream.shutdown()
        self._graph.close()

    @torch.inference_mode()
    def _run(self, plan: Plan) -> Tensor | None:
        self._state.apply(plan)
        hidden = self._graph.launch(self._buffers.build(plan))
        return self._draw(plan, hidden) if plan.tail != "none" else None

    def _draw(self, plan: Plan, hidden: Tensor) -> Tensor:
        """The sampling tail: [num sampled rows, 3] i64 of (token, valid, finished)."""
        state = self._state
        if plan.decode:
            rows = self._buffers.live_rows(plan)
            valid = state.active[rows]
            position = state.seq_len[rows] + 1
        else:
            hidden = hidden[self._state.upload(_last_of_sampled(plan), torch.int64)]
            rows = state.upload(plan.sampled_rows, torch.int64)
            valid = torch.ones_like(rows, dtype=torch.bool)
            ends = [chunk.start + len(chunk.tokens) for chunk in plan.chunks if chunk.sample]
            position = state.upload(ends, torch.int64)
        params = SamplingRows.gather(state, rows, position)
        token = sample(self._model.logits(hidden), params, plan.tail)
        stop = (params.stop_ids == token[:, None]).any(-1) & (position >= params.min_len)
        finished = stop | (position + 1 >= state.max_len[rows])
        state.seq_len[rows] = torch.where(valid, position, state.seq_len[rows])
        state.last_token[rows] = torch.where(valid, token, state.last_token[rows])
        state.active[rows] = valid & ~finished
        return torch.stack((token, valid.long(), finished.long()), dim=-1)


def _last_of_sampled(plan: Plan) -> list[int]:
    """Index in the batch of the last token of each chunk that samples."""
    last, indices = -1, []
    for chunk in plan.chunks:
        last += len(chunk.tokens)
        if chunk.sample:
            indices.append(last)
    return indices
