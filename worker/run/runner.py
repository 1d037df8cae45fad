"""ModelRunner: launches a step without waiting for it, and settles it once it has ended."""

import itertools
import time
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from worker.draw.sampler import Result, Scores, score
from worker.forward.draws import Masks
from worker.model.decoder import Decoder
from worker.observe.meter import StepMeter
from worker.observe.metrics import WorkerMetrics
from worker.observe.step_log import StepLog
from worker.plan import LONG_STEP_TOKENS, Drawn, Plan
from worker.run.base import Decoded, LoadedModel, PaddedShape
from worker.run.build import Graphs
from worker.run.eager import draw_eagerly
from worker.run.flight import Followers, LayerGroups, Step
from worker.run.stream import stream_of
from worker.step.state import SampledRows

BARRIER_SIZE = (
    8  # elements of an all-reduce that is a barrier: 16 bytes or more, as our kernel needs
)


class ModelRunner:
    """Runs plans on one stream: row changes and forward, then the sampling tail.

    A decode step starts and releases rows before its forward, a prefill step after it (see `Plan`).
    sums: counts the all-reduces of steps; None: the worker has one rank.
    """

    def __init__(
        self,
        graphs: Graphs,
        meter: StepMeter,
        step_log: StepLog | None = None,
        sums: WorkerMetrics | None = None,
    ) -> None:
        self.loaded, self.graphs, self.meter = graphs.loaded, graphs, meter
        self.stream = stream_of(self.loaded.state.device)
        self.followers: Followers | None = None  # set by `Worker` on the leader of several ranks
        self._state, self._log, self._sums = self.loaded.state, step_log, sums
        self._forwarded: Decoded | None = None  # of a masked plan, until its tail is launched

    def launch(
        self, plan: Plan, groups: LayerGroups | None = None, shape: PaddedShape | None = None
    ) -> Step:
        """Enqueue one step, or only its forward if the plan is masked; returns without waiting.

        groups: the layer hook of a prefill step; the tail is enqueued behind its last event.
        shape: chosen by `padded_shape` on the leader; None: this rank leads, and chooses here.
        """
        assert groups is None or not plan.decode, "layer groups are for prefill steps"
        log = self._log
        began, began_at = log.event() if log is not None else None, time.monotonic()
        shape = shape or padded_shape(self.graphs, plan, hooked=groups is not None)
        if self.followers is not None:
            self.followers.launch(plan, shape)
        step = Step(plan, shape, groups)
        if plan.masked:
            if plan.decode:
                begun = self.stream.submit(partial(self.begin, plan))
                step.verifies = begun if plan.width > 1 else None
            self.stream.submit(partial(self.forward, step))
        else:
            step.end = self.stream.submit(partial(self.run, step))
        self.meter.launched(plan)
        if log is not None:
            log.launched(plan, began, time.monotonic() - began_at)
        return step

    def launch_tail(self, step: Step, masks: Masks) -> None:
        """Enqueue the tail of a masked step; masks: on the host."""
        assert step.plan.masked
        if self.followers is not None:
            self.followers.launch_tail(masks)
        step.end = self.stream.submit(partial(self.tail, step.plan, masks))
        if self._log is not None:
            self._log.tail_launched(step.plan)

    def settle(self, step: Step) -> list[Drawn]:
        """Wait for a step and read its tokens; raises PeerLost as `check_ranks`.

        A turn waits for the device in three places: here, `LayerGroups.wait` and `Step.drafts`.
        """
        began_at, cpu_at = time.monotonic(), time.thread_time()
        drawn = step.wait()
        self.check_ranks()
        if self.followers is not None:
            self.followers.settled(step, drawn)
        self.meter.settled(step.plan, step.path)
        if self._sums is not None:
            count_sums(self.loaded.model, self._sums, step)
        if self._log is not None:
            wait_s, wait_cpu_s = time.monotonic() - began_at, time.thread_time() - cpu_at
            self._log.settled(step.plan, step.path, wait_s, wait_cpu_s, drawn)
        return drawn

    def check_ranks(self) -> None:
        """Raise PeerLost if another rank was late in an all-reduce; its results are invalid."""
        if self.loaded.model.collective.size > 1:
            self.loaded.model.collective.check()

    def close(self) -> None:
        """Wait for launched steps and free captured graphs."""
        self.stream.close()
        self.graphs.close()
        if self._log is not None:
            self._log.close()

    @torch.inference_mode()
    def run(self, step: Step) -> Result | None:
        """Run a plan without masks, from its row changes to its tokens."""
        plan = step.plan
        if plan.decode:
            self.begin(plan)
            apart = plan.penalized or plan.num_logprobs >= 0  # no graph of whole steps has that
            made = self.graphs.decode.launch(plan, "none" if apart else plan.tail)
        else:
            made = self.run_chunks(step)
        step.path, step.num_tokens = made.path, made.num_tokens
        if made.sampled is not None:
            return self.draw(plan, made)
        if made.scores is not None:
            nothing = made.hidden.new_empty(0, 3, dtype=torch.int64)
            return Result(nothing, scores=made.scores)
        return made.result

    @torch.inference_mode()
    def begin(self, plan: Plan) -> "_Drafts | None":
        """Apply a decode plan's row changes; returns the drafts that a masked step verifies."""
        self._state.apply(plan)
        self._seed(plan)
        if not plan.masked or plan.width == 1:
            return None
        rows = self._state.upload(plan.decode, torch.int64)
        return _Drafts(self._state.columns.drafts[rows, : plan.width - 1])

    @torch.inference_mode()
    def forward(self, step: Step) -> None:
        """The forward of a masked step; its tail is launched once the masks are made."""
        plan = step.plan
        made = self.graphs.decode.launch(plan, "none") if plan.decode else self.run_chunks(step)
        step.path, step.num_tokens = made.path, made.num_tokens
        self._forwarded = made

    @torch.inference_mode()
    def tail(self, plan: Plan, masks: Masks) -> Result:
        """The draws of the masked step whose forward has just run."""
        assert self._forwarded is not None
        forwarded, self._forwarded = self._forwarded, None
        return self.draw(plan, forwarded, masks)

    def run_chunks(self, step: Step) -> Decoded:
        """Run the forward of a prefill step, then apply the plan's row changes.

        If no chunk samples, `sampled` is None, and `hidden` must not be used.
        """
        plan, shape, groups = step.plan, step.shape, step.groups
        with nullcontext() if groups is None else groups.released_on_error():
            batch = self.loaded.buffers.chunks(plan, shape.num_tokens, fixed_shape=shape.fixed)
            on_layer = None if groups is None else groups.on_layer
            hidden, path = self.graphs.chunks.launch(batch, on_layer)
            _join_ranks(self.loaded)
            if groups is not None:
                groups.on_regions()
        self._state.apply_rows(plan)  # behind the forward, which does not read them
        self._seed(plan)
        # For example "eager_padding": launched eagerly, as padding to a bucket would cost more.
        path = f"{path}_{shape.refused}" if shape.refused else path
        one_each = batch.last_token_rows is not None  # hidden states are one a chunk, not a token
        ends = itertools.accumulate(len(chunk.tokens) for chunk in plan.chunks)
        sampled = [  # index of the hidden state, row, position to draw
            (i if one_each else end - 1, chunk.row, chunk.start + len(chunk.tokens))
            for i, (chunk, end) in enumerate(zip(plan.chunks, ends, strict=True))
            if chunk.sample
        ]
        scores = self._scored(plan, hidden)
        if not sampled:
            return Decoded(hidden, None, None, path, batch.num_tokens, scores)
        columns = zip(*sampled, strict=True)
        at, rows, position = (self._state.upload(column, torch.int64) for column in columns)
        sampled_rows = SampledRows(rows, position, torch.ones_like(rows, dtype=torch.bool))
        return Decoded(hidden[at], sampled_rows, None, path, batch.num_tokens, scores)

    def _scored(self, plan: Plan, hidden: Tensor) -> Scores | None:
        """Score the prompts of a prefill step; hidden: of all its tokens."""
        if plan.num_prompt_logprobs < 0:
            return None
        starts = itertools.accumulate((len(chunk.tokens) for chunk in plan.chunks), initial=0)
        at = [
            start + i
            for start, chunk in zip(starts, plan.chunks, strict=False)
            for i in range(len(chunk.scored))
        ]
        tokens = [token for chunk in plan.chunks for token in chunk.scored]
        where, token = (self._state.upload(column, torch.int64) for column in (at, tokens))
        return score(self.loaded.model.head, hidden, where, token, plan.num_prompt_logprobs)

    def _seed(self, plan: Plan) -> None:
        rows = [start.row for start in plan.starts if start.active]
        if self.loaded.drafter is not None and rows:
            self.loaded.drafter.seed(self._state.upload(rows, torch.int64))

    def draw(self, plan: Plan, forwarded: Decoded, masks: Masks | None = None) -> Result:
        """Draw what follows a forward; masks: of its rows, on the host."""
        if plan.decode:
            return self.graphs.decode.draw(forwarded, plan, masks)
        result = draw_eagerly(self.loaded, forwarded, plan, masks)
        result.scores = forwarded.scores
        return result


class _Drafts(NamedTuple):
    """The drafts that a masked step verifies."""

    ids: Tensor  # [rows, width - 1] i64

    def to_host(self) -> "_Drafts":
        host = torch.empty(self.ids.shape, dtype=self.ids.dtype, pin_memory=True)
        return _Drafts(host.copy_(self.ids, non_blocking=True))


def _join_ranks(loaded: LoadedModel) -> None:
    """On a prefill worker with a drafter, go on once all ranks have stored the drafter's rows.

    The leader announces KV for all ranks. For the model's KV a later layer's all-reduce shows that
    all ranks have stored theirs. Behind the drafter's there may be no all-reduce, so here is one.
    """
    collective = loaded.model.collective
    if collective.size > 1 and loaded.drafter is not None and not loaded.decodes:
        barrier = collective.buffer((BARRIER_SIZE,), loaded.model.placement.dtype)
        collective.all_reduce(barrier.zero_())


def count_sums(model: Decoder, metrics: WorkerMetrics, step: Step) -> None:
    """Count algorithm and bytes of a step's all-reduces (a long step's last layer has smaller).

    A replayed graph runs no Python, so a sum cannot be counted where it is launched. But its
    algorithm depends on the number of tokens alone, in captured graphs as well.
    """
    dtype, kind = model.placement.dtype, "prefill" if step.plan.chunks else "decode"
    num_bytes = step.num_tokens * model.shape.hidden_size * dtype.itemsize
    algorithm = model.collective.algorithm(num_bytes, dtype)
    metrics.all_reduce_bytes(kind, algorithm).observe(num_bytes)


def padded_shape(graphs: Graphs, plan: Plan, *, hooked: bool) -> PaddedShape:
    """Choose how to build the batch of a prefill step; hooked: it gets a layer hook."""
    if plan.decode:
        return PaddedShape()
    num_tokens = sum(len(chunk.tokens) for chunk in plan.chunks)
    longest = plan.max_seq_len_ub
    shape = graphs.chunks.padded(num_tokens, len(plan.chunks), longest, hooked=hooked)
    # A graph of a long step has no hidden states of all tokens, which scores are made of.
    scores = plan.num_prompt_logprobs >= 0
    if scores and max(num_tokens, shape.num_tokens) >= LONG_STEP_TOKENS:
        return PaddedShape(refused="scored")
    return shape
