"""ModelRunner: one step on the device, launched without waiting; and Step, the wait for it."""

from __future__ import annotations

import itertools
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from worker.engine.groups import LayerGroups
from worker.graph.base import LoadedModel
from worker.graph.build import Graphs
from worker.plan import Drawn, Plan, Tail
from worker.sampling.tail import Result, draw
from worker.step.sampled import SampledRows, decoding_rows


@cache
def step_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream of this process for all steps on a CUDA device.

    Engines are built on it, too: the allocator keeps freed memory for the stream that used it.
    """
    return torch.cuda.Stream(device)


class Step:
    """A launched step. `wait()` is the only host sync of the engine's loop.

    Filled by ModelRunner.
    """

    def __init__(self, plan: Plan, groups: LayerGroups | None) -> None:
        self.plan = plan
        self.groups = groups  # None: nobody waits for its layer groups
        self.path = ""  # how it was launched, for metrics; known once it has been waited for
        self._running: Future[Any] | None = None  # CPU: of Result | None; of a masked body: None
        self._result: Result | None = None  # CUDA
        self._event: torch.cuda.Event | None = None  # CUDA: the copies to the host have ended

    def wait(self) -> list[Drawn]:
        """Block until the device is through; the tokens of plan.sampled_rows."""
        if self._event is not None:
            self._event.synchronize()
        result = self._result if self._running is None else self._running.result()
        return result.read() if result is not None else []


class ModelRunner:
    """Applies plans to the step state, runs the body, draws tokens, all on one stream.

    On CUDA it is `step_stream`, which becomes the current stream of the thread that launches: pulls
    of KV are copies that wait for the device's default stream, and would wait for the step in
    flight if that ran there. On CPU it is a thread of its own that takes one step after the other,
    so that launching, settling and pulling overlap with compute there as well.
    """

    def __init__(self, loaded: LoadedModel, graphs: Graphs) -> None:
        self.loaded = loaded
        self.graphs = graphs
        self._state = loaded.state
        device = loaded.state.device
        cpu = device.type == "cpu"
        self._thread = ThreadPoolExecutor(1, "kvlane-stream") if cpu else None
        self._stream = None if cpu else step_stream(device)
        self._hidden: Tensor | None = None  # of a masked plan whose tail is still to come

    def launch(self, plan: Plan, groups: LayerGroups | None = None) -> Step:
        """Enqueue one step (a masked plan's body only); returns before the device is through.

        Args:
            plan: the step.
            groups: the layer hook of a step of chunks from which nothing is drawn.
        """
        assert groups is None or plan.tail == "none", "a tail would run within the hook's scope"
        step = Step(plan, groups)
        work = self._body if plan.masked else self._run
        if self._thread is not None:
            step._running = self._thread.submit(work, step)
            return step
        self._enter_stream()
        result = work(step)
        if not plan.masked:
            self._record(step, result)
        return step

    def launch_tail(self, step: Step, masks: Tensor) -> None:
        """Enqueue the rest of a masked step.

        masks: what grammars allow, see `sampler.sample`; on the host.
        """
        assert step.plan.masked
        if self._thread is not None:
            assert step._running is not None
            step._running = self._thread.submit(self._tail, step.plan, step._running, masks)
        else:
            self._enter_stream()
            self._record(step, self._tail(step.plan, None, masks))

    def close(self) -> None:
        """Finish what was launched and free captured graphs."""
        if self._thread is not None:
            self._thread.shutdown()
        if self._stream is not None:
            self._stream.synchronize()
        self.graphs.close()

    def _enter_stream(self) -> None:
        """CUDA: go on, on our stream, after whatever this thread has launched elsewhere."""
        assert self._stream is not None
        current = torch.cuda.current_stream(self._stream.device)
        if current != self._stream:
            self._stream.wait_stream(current)
            torch.cuda.set_stream(self._stream)

    def _record(self, step: Step, result: Result | None) -> None:
        """CUDA: the copies to the host, and the event that says they are done."""
        step._result = result.to_host() if result is not None else None
        step._event = torch.cuda.Event()
        step._event.record()

    @torch.inference_mode()
    def _run(self, step: Step) -> Result | None:
        """A plan without masks, from its row changes to its tokens."""
        plan = step.plan
        if plan.decode and not plan.penalized and plan.num_logprobs < 0:
            return self._decode(step, plan.tail)[1]
        with step.groups.released_on_error() if step.groups is not None else nullcontext():
            hidden = self._forward(step)
        return self._draw(plan, hidden, None) if plan.tail != "none" else None

    @torch.inference_mode()
    def _body(self, step: Step) -> None:
        self._hidden = self._forward(step)

    @torch.inference_mode()
    def _tail(self, plan: Plan, body: Future[Any] | None, masks: Tensor) -> Result:
        if body is not None:
            body.result()  # it ran before us on this stream; its error is ours
        hidden, self._hidden = self._hidden, None
        assert hidden is not None
        return self._draw(plan, hidden, self._state.send(masks))

    def _forward(self, step: Step) -> Tensor:
        """The plan's row changes, and the hidden states from which its tokens are drawn.

        [len(plan.sampled_rows), hidden]; any rows where nothing is drawn.
        """
        return self._decode(step, "none")[0] if step.plan.decode else self._chunks(step)

    def _decode(self, step: Step, tail: Tail) -> tuple[Tensor, Result | None]:
        plan = step.plan
        self._state.apply(plan)
        hidden, result, step.path = self.graphs.decode.launch(
            plan.decode, plan.max_seq_len_ub, tail
        )
        return hidden, result

    def _chunks(self, step: Step) -> Tensor:
        plan, on_layer = step.plan, step.groups.on_layer if step.groups is not None else None
        num_tokens = sum(len(chunk.tokens) for chunk in plan.chunks)
        shape = self.graphs.chunks.padded(
            num_tokens, len(plan.chunks), plan.max_seq_len_ub, hooked=on_layer is not None
        )
        batch = self.loaded.buffers.chunks(plan, shape.num_tokens, fixed_shape=shape.fixed)
        hidden, path = self.graphs.chunks.launch(batch, on_layer)
        step.path = f"{path}_{shape.refused}" if shape.refused else path
        # The forward reads nothing of a row but its pages: the rest is enqueued behind it.
        self._state.apply_rows(plan)
        at = _last_tokens(plan, one_each=batch.last_token_rows is not None)
        return hidden[self._state.upload(at, torch.int64)] if at else hidden

    def _draw(self, plan: Plan, hidden: Tensor, mask: Tensor | None) -> Result:
        state = self._state
        if plan.decode:
            sampled = decoding_rows(state, state.upload(plan.decode, torch.int64))
        else:
            rows = state.upload(plan.sampled_rows, torch.int64)
            ends = [chunk.start + len(chunk.tokens) for chunk in plan.chunks if chunk.sample]
            position = state.upload(ends, torch.int64)
            sampled = SampledRows(rows, position, torch.ones_like(rows, dtype=torch.bool))
        return draw(
            self.loaded.model,
            state,
            sampled,
            hidden,
            plan.tail,
            penalized=plan.penalized,
            num_logprobs=plan.num_logprobs,
            mask=mask,
        )


def _last_tokens(plan: Plan, *, one_each: bool) -> list[int]:
    """Rows of the hidden states that belong to the last token of each chunk that samples.

    `one_each`: the hidden states are of one row for each chunk, not of every token.
    """
    ends = itertools.accumulate(len(chunk.tokens) for chunk in plan.chunks)
    last = range(len(plan.chunks)) if one_each else [end - 1 for end in ends]
    return [row for row, chunk in zip(last, plan.chunks, strict=True) if chunk.sample]
