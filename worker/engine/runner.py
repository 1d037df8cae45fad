"""ModelRunner: one step on the device, launched without waiting; and Step, the wait for it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor

from worker.graph.base import GraphRunner, Parts
from worker.plan import Drawn, Plan
from worker.sampling.tail import Result, draw
from worker.step.sampled import SampledRows, decoding_rows


class HostEvent:
    """What torch.cuda.Event is on CUDA, for the thread that is the CPU's stream."""

    def __init__(self) -> None:
        self._passed = threading.Event()

    def record(self) -> None:
        """Called by the stream when it gets here."""
        self._passed.set()

    def query(self) -> bool:
        """Whether the stream has been here."""
        return self._passed.is_set()

    def synchronize(self) -> None:
        """Block until it has."""
        self._passed.wait()


GroupEvent = HostEvent | torch.cuda.Event
# A moment before the last layer: 0.6 ms at 512 tokens of the Qwen3-8B shape, 2.4 at 2048.
NEARLY_LAYERS = 2


@cache
def step_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream of this process for all steps on a CUDA device.

    Engines are built on it, too: the allocator keeps free memory for the stream that it was for.
    """
    return torch.cuda.Stream(device)


class Step:
    """A launched step. `wait()` is the only host sync of the engine's loop.

    `group_events` has one event for each layer group of the KV: passed when that group's KV of the
    step's chunks is final, of the last one before the step is. Empty unless they were asked for.
    `nearly` is passed a moment before the last of them.
    """

    def __init__(self, plan: Plan, runner: ModelRunner) -> None:
        self.plan = plan
        self.group_events: list[GroupEvent] = []
        self.nearly: GroupEvent | None = None
        self.failed = False  # while its groups were computed; `wait` raises why
        self._runner = runner
        self._running: Future[Any] | None = None  # of Result | None; of the body: None
        self._result: Result | None = None
        self._event: torch.cuda.Event | None = None

    def draw(self, masks: Tensor) -> None:
        """Launch the tail of a masked plan, with what `Grammars.masks` allows."""
        assert self.plan.masked
        self._runner.launch_tail(self, masks)

    @property
    def num_groups_final(self) -> int:
        """Layer groups, from the first on, whose events have passed; never waits."""
        pending = (i for i, event in enumerate(self.group_events) if not event.query())
        num_final = next(pending, len(self.group_events))
        return 0 if self.failed else num_final

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

    On CUDA it is `step_stream`, which becomes the current one of the thread that launches: pulls of
    KV are copies that wait for the device's default stream, and would wait for the step in flight.
    On CPU it is a thread of its own that takes one step after the other, so that launching,
    settling and pulling overlap with compute there as well.
    """

    def __init__(self, parts: Parts, graph: GraphRunner) -> None:
        self.parts = parts
        self.model = parts.model
        self.graph = graph
        self._state = parts.state
        self._buffers = parts.buffers
        device = parts.state.device
        cpu = device.type == "cpu"
        self._thread = ThreadPoolExecutor(1, "kvlane-stream") if cpu else None
        self._stream = None if cpu else step_stream(device)
        # The KV of another region would be final after the events of this one.
        (region,) = parts.pool.layout.regions
        self._num_groups = region.num_groups
        self._layers_per_group = region.layers_per_group
        self._hidden: Tensor | None = None  # of a masked plan whose tail is still to come

    @property
    def path(self) -> str:
        """How the last step was launched: a graph's replay, or eager."""
        return self.graph.path

    def launch(self, plan: Plan) -> Step:
        """Enqueue one step (a masked plan's body only); returns before the device is through."""
        step = Step(plan, self)
        if self._thread is not None:
            work = self._body if plan.masked else self._run
            step._running = self._thread.submit(work, plan)
            return step
        self._enter_stream()
        if plan.masked:
            self._body(plan)
        else:
            self._record(step, self._run(plan))
        return step

    def launch_in_groups(self, plan: Plan, at_layer: Callable[[], None]) -> Step:
        """Enqueue a step of chunks that says when each layer group's KV is final.

        Args:
            plan: chunks of which nothing is sampled.
            at_layer: called between layers while the launch of a step keeps this thread busy.
        """
        step = Step(plan, self)
        make = HostEvent if self._thread is not None else torch.cuda.Event
        step.group_events += [make() for _ in range(self._num_groups)]
        step.nearly = make()
        if self._thread is not None:
            step._running = self._thread.submit(self._run_in_groups, step, None)
        else:
            self._enter_stream()
            self._run_in_groups(step, at_layer)
            self._record(step, None)
        return step

    def launch_tail(self, step: Step, masks: Tensor) -> None:
        """Enqueue the rest of a masked step."""
        if self._thread is not None:
            assert step._running is not None
            step._running = self._thread.submit(self._tail, step.plan, step._running, masks)
        else:
            self._enter_stream()
            self._record(step, self._tail(step.plan, None, masks))

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

    def close(self) -> None:
        """Finish what was launched and free what the graph runner holds."""
        if self._thread is not None:
            self._thread.shutdown()
        if self._stream is not None:
            self._stream.synchronize()
        self.graph.close()

    @torch.inference_mode()
    def _run(self, plan: Plan) -> Result | None:
        """A plan without masks, from its row changes to its tokens."""
        if plan.decode and not plan.adjust and plan.num_logprobs < 0:
            self._state.apply(plan)
            _, result = self.graph.decode(plan.decode, plan.max_seq_len_ub, plan.tail)
            return result
        hidden = self._forward(plan)
        return self._draw(plan, hidden, None) if plan.tail != "none" else None

    @torch.inference_mode()
    def _run_in_groups(self, step: Step, at_layer: Callable[[], None] | None) -> None:
        events, nearly = step.group_events, step.nearly
        assert nearly is not None
        nearly_layer = max(0, self._num_groups * self._layers_per_group - 1 - NEARLY_LAYERS)

        def on_layer(layer_id: int) -> None:
            group, within = divmod(layer_id + 1, self._layers_per_group)
            if not within:
                events[group - 1].record()
            if layer_id == nearly_layer:
                nearly.record()
            if at_layer is not None:
                at_layer()

        try:
            self._forward(step.plan, on_layer)
        except BaseException:
            step.failed = True
            # whoever waits for them goes on to `wait`, which raises this
            for event in (*events, nearly):
                event.record()
            raise

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

    def _forward(self, plan: Plan, on_layer: Callable[[int], None] | None = None) -> Tensor:
        """The plan's row changes; hidden states of the decode rows, or of the chunks that sample.

        If none does, they are whatever the launch left.

        A forward over chunks reads nothing of the rows but their pages, so the rest of the changes
        is enqueued while the device is at it.
        """
        if plan.decode:
            self._state.apply(plan)
            return self.graph.decode(plan.decode, plan.max_seq_len_ub, "none")[0]
        num_tokens = sum(len(chunk.tokens) for chunk in plan.chunks)
        shape = self.graph.padded(
            num_tokens, len(plan.chunks), plan.max_seq_len_ub, hooked=on_layer is not None
        )
        batch = self._buffers.chunks(plan, shape.num_rows, steady=shape.steady)
        hidden = self.graph.launch(batch, on_layer)
        self._state.apply_rows(plan)
        if sampled := _sampled(plan, one_each=batch.wanted is not None):
            hidden = hidden[self._state.upload(sampled, torch.int64)]
        return hidden

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
            self.model,
            state,
            sampled,
            hidden,
            plan.tail,
            adjust=plan.adjust,
            num_logprobs=plan.num_logprobs,
            mask=mask,
        )


def _sampled(plan: Plan, *, one_each: bool) -> list[int]:
    """Which hidden state is that of the last token of each chunk that samples.

    `one_each`: there is one for each chunk, else one for each token.
    """
    ends = itertools.accumulate(len(chunk.tokens) for chunk in plan.chunks)
    last = range(len(plan.chunks)) if one_each else [end - 1 for end in ends]
    return [row for row, chunk in zip(last, plan.chunks, strict=True) if chunk.sample]
