"""ModelRunner: one step on the device, launched without waiting; and Step, the wait for it."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker.api import TokenLogprob
from worker.buffers import BatchBuffers
from worker.graph.base import GraphRunner
from worker.models.decoder import Decoder
from worker.plan import Drawn, Plan
from worker.sampler import SamplingRows, logprobs, sample
from worker.state import StepState


@dataclass(slots=True)
class Result:
    """What the tail leaves for the host."""

    drawn: Tensor  # [num sampled rows, 3] i64 of (token, valid, finished)
    values: Tensor | None = None  # [num sampled rows, 1 + num_logprobs] f32
    ids: Tensor | None = None  # [num sampled rows, 1 + num_logprobs] i64

    def to_host(self) -> Result:
        """Pinned copies that are under way on the current stream."""

        def copy(tensor: Tensor | None) -> Tensor | None:
            if tensor is None:
                return None
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            return host.copy_(tensor, non_blocking=True)

        drawn = copy(self.drawn)
        assert drawn is not None
        return Result(drawn, copy(self.values), copy(self.ids))

    def read(self) -> list[Drawn]:
        """One entry a sampled row; only after the device is through."""
        logprobs: list[TokenLogprob | None] = [None] * len(self.drawn)
        if self.values is not None and self.ids is not None:
            pairs = zip(self.values.tolist(), self.ids.tolist(), strict=True)
            logprobs = [TokenLogprob(v[0], tuple(zip(i[1:], v[1:], strict=True))) for v, i in pairs]
        return [
            Drawn(token, bool(valid), bool(finished), logprob)
            for (token, valid, finished), logprob in zip(self.drawn.tolist(), logprobs, strict=True)
        ]


class Step:
    """A launched step. `wait()` is the only host sync of the engine's loop."""

    def __init__(self, plan: Plan, runner: ModelRunner) -> None:
        self.plan = plan
        self._runner = runner
        self._running: Future[Any] | None = None  # of Result | None; of the body: None
        self._result: Result | None = None
        self._event: torch.cuda.Event | None = None

    def draw(self, masks: Tensor) -> None:
        """Launch the tail of a masked plan, with what `Grammars.masks` allows."""
        assert self.plan.masked
        self._runner.launch_tail(self, masks)

    def wait(self) -> list[Drawn]:
        """Block until the device is through; the tokens of plan.sampled_rows."""
        if self._event is not None:
            self._event.synchronize()
        result: Result | None = self._result
        if self._running is not None:
            result = self._running.result()
        return result.read() if result is not None else []


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
        self._hidden: Tensor | None = None  # of a masked plan whose tail is still to come

    def launch(self, plan: Plan) -> Step:
        """Enqueue one step (a masked plan's body only); returns before the device is through."""
        step = Step(plan, self)
        if self._stream is not None:
            work = self._body if plan.masked else self._run
            step._running = self._stream.submit(work, plan)
        elif plan.masked:
            self._body(plan)
        else:
            self._record(step, self._run(plan))
        return step

    def launch_tail(self, step: Step, masks: Tensor) -> None:
        """Enqueue the rest of a masked step."""
        if self._stream is not None:
            assert step._running is not None
            step._running = self._stream.submit(self._tail, step.plan, step._running, masks)
        else:
            self._record(step, self._tail(step.plan, None, masks))

    def _record(self, step: Step, result: Result | None) -> None:
        """CUDA: the copies to the host, and the event that says they are done."""
        step._result = result.to_host() if result is not None else None
        step._event = torch.cuda.Event()
        step._event.record()

    def close(self) -> None:
        """Finish what was launched and free what the graph runner holds."""
        if self._stream is not None:
            self._stream.shutdown()
        self._graph.close()

    @torch.inference_mode()
    def _run(self, plan: Plan) -> Result | None:
        hidden = self._forward(plan)
        return self._draw(plan, hidden, None) if plan.tail != "none" else None

    @torch.inference_mode()
    def _body(self, plan: Plan) -> None:
        self._hidden = self._forward(plan)

    @torch.inference_mode()
    def _tail(self, plan: Plan, body: Future[Any] | None, masks: Tensor) -> Result:
        if body is not None:
            body.result()  # it ran before us on this stream; its error is ours
        hidden, self._hidden = self._hidden, None
        assert hidden is not None
        return self._draw(plan, hidden, self._state.send(masks))

    def _forward(self, plan: Plan) -> Tensor:
        self._state.apply(plan)
        return self._graph.launch(self._buffers.build(plan))

    def _draw(self, plan: Plan, hidden: Tensor, mask: Tensor | None) -> Result:
        """The sampling tail."""
        state = self._state
        if plan.decode:
            rows = self._buffers.live_rows(plan)
            valid = state.active[rows]
            position = state.seq_len[rows] + 1
        else:
            hidden = hidden[state.upload(_last_of_sampled(plan), torch.int64)]
            rows = state.upload(plan.sampled_rows, torch.int64)
            valid = torch.ones_like(rows, dtype=torch.bool)
            ends = [chunk.start + len(chunk.tokens) for chunk in plan.chunks if chunk.sample]
            position = state.upload(ends, torch.int64)
        params = SamplingRows.gather(state, rows, position)
        logits = self._model.logits(hidden)
        extras = state.extras if plan.adjust else None
        token = sample(logits, params, plan.tail, extras, mask)
        stop = (params.stop_ids == token[:, None]).any(-1) & (position >= params.min_len)
        finished = stop | (position + 1 >= state.max_len[rows])
        state.seq_len[rows] = torch.where(valid, position, state.seq_len[rows])
        state.last_token[rows] = torch.where(valid, token, state.last_token[rows])
        state.active[rows] = valid & ~finished
        if extras is not None:
            extras.counts[params.extra, token] += 1  # a place belongs to one row; 0 to nobody
        result = Result(torch.stack((token, valid.long(), finished.long()), dim=-1))
        if plan.num_logprobs >= 0:
            result.values, result.ids = logprobs(logits, token, plan.num_logprobs)
        return result


def _last_of_sampled(plan: Plan) -> list[int]:
    """Index in the batch of the last token of each chunk that samples."""
    last, indices = -1, []
    for chunk in plan.chunks:
        last += len(chunk.tokens)
        if chunk.sample:
            indices.append(last)
    return indices
