"""ModelRunner launches one step without waiting; Step waits for its end."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from worker.draw.tail import Result
from worker.forward.draws import Masks
from worker.plan import Drawn, Plan, Tail
from worker.run.base import Decoded, LoadedModel, PaddedShape
from worker.run.build import Graphs
from worker.run.eager import draw_eagerly
from worker.run.groups import LayerGroups
from worker.step.state import SampledRows

JOINED = 8  # elements of an all-reduce that is a barrier: 16 bytes or more, as our kernel needs


@cache
def step_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of this process for all steps on a CUDA device.

    Loading runs on it too: the caching allocator reuses freed memory only on the stream that
    allocated it.
    """
    return torch.cuda.Stream(device)


class Step:
    """A launched step; `wait()` blocks until it has finished. Filled by ModelRunner."""

    def __init__(self, plan: Plan, shape: PaddedShape, groups: LayerGroups | None = None) -> None:
        self.plan = plan
        self.shape = shape  # of a prefill step's batch
        self.groups = groups  # None: launched without a layer hook
        # How it was launched, for metrics, and tokens of its forward, padding included; known once
        # it has been waited for.
        self.path = ""
        self.num_tokens = 0
        # CPU: the step's future. Of a masked step that of the forward, then that of the tail.
        self._running: Future[Any] | None = None
        self._is_to_tell = False  # it wakes a loop when it is done
        self._result: Result | None = None  # CUDA
        self._event: torch.cuda.Event | None = None  # CUDA: after the copies to the host
        # What a masked step verifies, on its way to the host. CPU: a future of it; CUDA: it, and
        # the event behind its copy.
        self._drafts: Future[Tensor] | tuple[Tensor, torch.cuda.Event] | None = None

    def done(self) -> bool:
        """Whether `wait` would return at once; not to be asked before a masked step's tail."""
        if self._event is not None:
            return self._event.query()
        return self._running is not None and self._running.done()

    def tells(self, wake: Callable[[], None]) -> bool:
        """Have another thread call `wake` when the step is done; False: nothing will.

        Only on the CPU, where a loop that polls takes the step's own core. Like `done`, not to be
        asked before a masked step's tail.
        """
        if self._running is None:
            return False
        if not self._is_to_tell:
            self._is_to_tell = True
            self._running.add_done_callback(lambda _: wake())
        return True

    def drafts(self) -> list[list[int]]:
        """What each row of a masked step verifies, width - 1 ids; -1 = none. Width 1: [].

        Known as soon as the step before has ended, when masks can be made.
        """
        if self._drafts is None:
            return []
        if isinstance(self._drafts, Future):
            return self._drafts.result().tolist()
        drafts, copied = self._drafts
        copied.synchronize()
        return drafts.tolist()

    def wait(self) -> list[Drawn]:
        """Block until the step has finished; returns what plan.sampled_rows drew."""
        if self._event is not None:
            self._event.synchronize()
        result = self._result if self._running is None else self._running.result()
        return result.read() if result is not None else []


class ModelRunner:
    """Runs plans on one stream: row changes and forward, then the sampling tail.

    A decode step starts and releases rows before its forward, a prefill step after it (see `Plan`).

    On CUDA the stream is `step_stream`, made current in the thread that launches. It is not the
    default stream: KV pulls are copies that wait for the default stream, so they would wait for
    the step in flight. On the CPU it is a thread that runs one step after the other, so launching,
    settling and pulling overlap with compute there as well.
    """

    def __init__(self, loaded: LoadedModel, graphs: Graphs) -> None:
        self.loaded = loaded
        self.graphs = graphs
        self._state = loaded.state
        device = loaded.state.device
        cpu = device.type == "cpu"
        self._thread = ThreadPoolExecutor(1, "kvlane-stream") if cpu else None
        self._stream = None if cpu else step_stream(device)
        # What the forward of a masked plan returned, until its tail is launched.
        self._forwarded: Decoded | None = None

    def launch(
        self, plan: Plan, groups: LayerGroups | None = None, shape: PaddedShape | None = None
    ) -> Step:
        """Enqueue one step, or only its forward if the plan is masked; returns without waiting.

        Args:
            plan: of the step.
            groups: the layer hook of a prefill step; the tail is enqueued behind their last event.
            shape: what `padded_shape` chose, on the rank that decides; None: it is chosen here.
        """
        assert groups is None or not plan.decode, "layer groups are for prefill steps"
        step = Step(
            plan, shape or padded_shape(self.graphs, plan, hooked=groups is not None), groups
        )
        if plan.masked and plan.width > 1 and self._thread is not None:
            step._drafts = Future()
        work = self._run_forward if plan.masked else self._run
        if self._thread is not None:
            step._running = self._thread.submit(work, step)
            return step
        self._enter_stream()
        result = work(step)
        if not plan.masked:
            self._record(step, result)
        return step

    def launch_tail(self, step: Step, masks: Masks) -> None:
        """Enqueue the tail of a masked step; masks: on the host."""
        assert step.plan.masked
        if self._thread is not None:
            assert step._running is not None
            step._running = self._thread.submit(self._run_tail, step.plan, step._running, masks)
        else:
            self._enter_stream()
            self._record(step, self._run_tail(step.plan, None, masks))

    def close(self) -> None:
        """Wait for launched steps and free captured graphs."""
        if self._thread is not None:
            self._thread.shutdown()
        if self._stream is not None:
            self._stream.synchronize()
        self.graphs.close()

    def _enter_stream(self) -> None:
        """CUDA: make the step stream current; it first waits for the thread's former stream."""
        assert self._stream is not None
        current = torch.cuda.current_stream(self._stream.device)
        if current != self._stream:
            self._stream.wait_stream(current)
            torch.cuda.set_stream(self._stream)

    def _record(self, step: Step, result: Result | None) -> None:
        """CUDA: enqueue the copies to the host, and the event that says they are done."""
        step._result = result.to_host() if result is not None else None
        step._event = torch.cuda.Event()
        step._event.record()

    @torch.inference_mode()
    def _run(self, step: Step) -> Result | None:
        """Run a plan without masks, from its row changes to its tokens."""
        plan = step.plan
        if plan.decode and not plan.penalized and plan.num_logprobs < 0:
            return self._launch_decode(step, plan.tail).result
        with step.groups.released_on_error() if step.groups is not None else nullcontext():
            forwarded = self._forward(step)
        return None if forwarded.sampled is None else self._draw(plan, forwarded)

    @torch.inference_mode()
    def _run_forward(self, step: Step) -> None:
        try:
            self._forwarded = self._forward(step)
        except BaseException as error:
            if isinstance(step._drafts, Future) and not step._drafts.done():
                step._drafts.set_exception(error)  # who makes its masks waits for its drafts
            raise

    @torch.inference_mode()
    def _run_tail(self, plan: Plan, forward: Future[Any] | None, masks: Masks) -> Result:
        if forward is not None:
            forward.result()  # never waits, as this thread has run it already; raises its error
        assert self._forwarded is not None
        forwarded, self._forwarded = self._forwarded, None
        return self._draw(plan, forwarded, masks)

    def _forward(self, step: Step) -> Decoded:
        """Run the forward and apply the plan's row changes, in the order that `Plan` gives.

        If no chunk samples, `sampled` is None, and `hidden` is not of sampled rows: not to be used.
        """
        return self._launch_decode(step, "none") if step.plan.decode else self._launch_chunks(step)

    def _launch_decode(self, step: Step, tail: Tail) -> Decoded:
        plan = step.plan
        self._state.apply(plan)
        self._seed(plan)
        if plan.masked and plan.width > 1:
            self._send_drafts(step)
        decoded = self.graphs.decode.launch(plan.decode, plan.max_seq_len_ub, tail, plan.width)
        step.path, step.num_tokens = decoded.path, decoded.num_tokens
        return decoded

    def _send_drafts(self, step: Step) -> None:
        """Enqueue the copy of what a masked step verifies, behind the step before."""
        rows = self._state.upload(step.plan.decode, torch.int64)
        drafts = self._state.columns.drafts[rows, : step.plan.width - 1]
        if isinstance(step._drafts, Future):
            step._drafts.set_result(drafts)
            return
        host = torch.empty(drafts.shape, dtype=drafts.dtype, pin_memory=True)
        host.copy_(drafts, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        step._drafts = host, copied

    def _launch_chunks(self, step: Step) -> Decoded:
        plan, on_layer = step.plan, step.groups.on_layer if step.groups is not None else None
        shape = step.shape
        batch = self.loaded.buffers.chunks(plan, shape.num_tokens, fixed_shape=shape.fixed)
        hidden, path = self.graphs.chunks.launch(batch, on_layer)
        _join_ranks(self.loaded)
        if step.groups is not None:
            step.groups.on_regions()
        # e.g. "eager_padding": launched eagerly, because padding to a bucket would have cost more
        step.path = f"{path}_{shape.refused}" if shape.refused else path
        step.num_tokens = batch.num_tokens
        self._state.apply_rows(plan)  # behind the forward, which does not read them
        self._seed(plan)
        sampled = _sampled_chunks(plan, one_each=batch.last_token_rows is not None)
        if not sampled:
            return Decoded(hidden, None, None, path, batch.num_tokens)
        at, rows, position = (
            self._state.upload(each, torch.int64) for each in zip(*sampled, strict=True)
        )
        valid = torch.ones_like(rows, dtype=torch.bool)
        sampled_rows = SampledRows(rows, position, valid)
        return Decoded(hidden[at], sampled_rows, None, path, batch.num_tokens)

    def _seed(self, plan: Plan) -> None:
        rows = [start.row for start in plan.starts if start.active]
        if self.loaded.drafter is not None and rows:
            self.loaded.drafter.seed(self._state.upload(rows, torch.int64))

    def _draw(self, plan: Plan, forwarded: Decoded, masks: Masks | None = None) -> Result:
        if plan.decode:
            return self.graphs.decode.draw(forwarded, plan, masks)
        return draw_eagerly(self.loaded, forwarded, plan, masks, ends_prompts=True)


def _join_ranks(loaded: LoadedModel) -> None:
    """On a prefill worker with a drafter, go on once all ranks have stored the drafter's rows.

    The leader announces KV for all ranks. Later all-reduces tell it that all have stored the
    model's KV; after the drafter's there may be none.
    """
    collective = loaded.model.collective
    if collective.size > 1 and loaded.drafter is not None and not loaded.decodes:
        nothing = collective.buffer((JOINED,), loaded.model.placement.dtype)
        collective.all_reduce(nothing.zero_())


def padded_shape(graphs: Graphs, plan: Plan, *, hooked: bool) -> PaddedShape:
    """Choose how to build the batch of a prefill step; hooked: it gets a layer hook."""
    if plan.decode:
        return PaddedShape()
    num_tokens = sum(len(chunk.tokens) for chunk in plan.chunks)
    longest = plan.max_seq_len_ub
    return graphs.chunks.padded(num_tokens, len(plan.chunks), longest, hooked=hooked)


def _sampled_chunks(plan: Plan, *, one_each: bool) -> list[tuple[int, int, int]]:
    """For each chunk that samples: the index of its hidden state, its row, the position to draw.

    one_each: there is one hidden state for each chunk, not for every token.
    """
    ends = itertools.accumulate(len(chunk.tokens) for chunk in plan.chunks)
    last = range(len(plan.chunks)) if one_each else [end - 1 for end in ends]
    return [
        (at, chunk.row, chunk.start + len(chunk.tokens))
        for at, chunk in zip(last, plan.chunks, strict=True)
        if chunk.sample
    ]
