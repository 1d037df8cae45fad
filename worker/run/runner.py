"""ModelRunner: launches a step without waiting for it, and settles it once it has ended."""

import time
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from worker.draw.logprobs import pinned_copy
from worker.draw.sampler import Result
from worker.forward.draws import Masks
from worker.model.decoder import Decoder
from worker.observe.meter import StepMeter
from worker.observe.metrics import WorkerMetrics
from worker.observe.step_log import StepLog
from worker.plan import PaddedShape, Plan
from worker.run.base import Decoded, Outcome
from worker.run.build import Graphs
from worker.run.chunks import padded_shape, run_chunks, seed_started
from worker.run.eager import draw_eagerly
from worker.run.flight import Followers, Launched, MaskedStep, Step, StepResult
from worker.run.layer_groups import LayerGroups
from worker.run.stream import stream_of


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
    ) -> Launched:
        """Enqueue one step, or only its forward if the plan is masked; returns without waiting.

        groups: the layer hook of a prefill step; the tail is enqueued behind its last event.
        shape: of a prefill step's batch, chosen on the leader; None: this rank is the leader.
        """
        assert groups is None or not plan.decode, "layer groups are for prefill steps"
        log = self._log
        began, began_at = log.event() if log is not None else None, time.monotonic()
        if shape is None:
            hooked = groups is not None
            shape = PaddedShape() if plan.decode else padded_shape(self.graphs, plan, hooked=hooked)
        if self.followers is not None:
            self.followers.launch(plan, shape)
        if plan.masked:
            begun = self.stream.submit(partial(self.begin, plan)) if plan.decode else None
            self.stream.submit(partial(self.forward, plan, shape))
            step = MaskedStep(plan, begun if plan.width > 1 else None)
        else:
            work = partial(self.run, plan, shape, groups)
            step = Step(plan, self.stream.submit(work), groups)
        self.meter.launched(plan)
        if log is not None:
            log.launched(plan, began, time.monotonic() - began_at)
        return step

    def launch_tail(self, step: MaskedStep, masks: Masks) -> Step:
        """Enqueue the tail of a masked step; masks: on the host."""
        if self.followers is not None:
            self.followers.launch_tail(masks)
        outcome = self.stream.submit(partial(self.tail, step.plan, masks))
        if self._log is not None:
            self._log.tail_launched(step.plan)
        return Step(step.plan, outcome)

    def settle(self, step: Step) -> StepResult:
        """Wait for a step and read what it has come to; raises PeerLost as `check_ranks`.

        A turn waits for the device in three places: here, `LayerGroups.wait`, `MaskedStep.drafts`.
        """
        if self._log is not None:
            self._log.waits()
        result = step.wait()
        self.check_ranks()
        if self.followers is not None:
            self.followers.settled(step, result.drawn)
        self.meter.settled(step.plan, result.path)
        if self._sums is not None:
            count_sums(self.loaded.model, self._sums, step.plan, result.num_tokens)
        if self._log is not None:
            self._log.settled(step.plan, result.path, result.drawn)
        return result

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
    def run(self, plan: Plan, shape: PaddedShape, groups: LayerGroups | None = None) -> Outcome:
        """Run a plan without masks, from its row changes to its tokens."""
        if plan.decode:
            self.begin(plan)
            apart = plan.penalized or plan.num_logprobs >= 0  # no graph of whole steps has that
            made = self.graphs.decode.launch(plan, "none" if apart else plan.tail)
        else:
            made = run_chunks(self.graphs, plan, shape, groups)
        result = made.result if made.sampled is None else self.draw(plan, made)
        return Outcome(result, made.scores, made.path, made.num_tokens)

    @torch.inference_mode()
    def begin(self, plan: Plan) -> "_Drafts | None":
        """Apply a decode plan's row changes; returns the drafts that a masked step verifies."""
        if plan.copies is not None:
            self.loaded.pool.copy(plan.copies)
        self._state.apply(plan)
        if plan.starts:
            seed_started(self.loaded, plan)
        if not plan.masked or plan.width == 1:
            return None
        rows = self._state.upload(plan.decode, torch.int64)
        return _Drafts(self._state.columns.drafts[rows, : plan.width - 1])

    @torch.inference_mode()
    def forward(self, plan: Plan, shape: PaddedShape) -> None:
        """The forward of a masked step; its tail is launched once the masks are made."""
        if plan.decode:
            self._forwarded = self.graphs.decode.launch(plan, "none")
        else:
            self._forwarded = run_chunks(self.graphs, plan, shape)

    @torch.inference_mode()
    def tail(self, plan: Plan, masks: Masks) -> Outcome:
        """The draws of the masked step whose forward has just run."""
        assert self._forwarded is not None
        made, self._forwarded = self._forwarded, None
        return Outcome(self.draw(plan, made, masks), made.scores, made.path, made.num_tokens)

    def draw(self, plan: Plan, forwarded: Decoded, masks: Masks | None = None) -> Result:
        """Draw what follows a forward; masks: of its rows, on the host."""
        if plan.decode:
            return self.graphs.decode.draw(forwarded, plan, masks)
        return draw_eagerly(self.loaded, forwarded, plan, masks)


class _Drafts(NamedTuple):
    """The drafts that a masked step verifies."""

    ids: Tensor  # [rows, width - 1] i64

    def to_host(self) -> "_Drafts":
        return _Drafts(pinned_copy(self.ids))


def count_sums(model: Decoder, metrics: WorkerMetrics, plan: Plan, num_tokens: int) -> None:
    """Count algorithm and bytes of a step's all-reduces (a long step's last layer has smaller).

    A replayed graph runs no Python, so a sum cannot be counted where it is launched. But its
    algorithm depends on the number of tokens alone, in captured graphs as well.
    """
    dtype, kind = model.placement.dtype, "prefill" if plan.chunks else "decode"
    num_bytes = num_tokens * model.shape.hidden_size * dtype.itemsize
    algorithm = model.collective.algorithm(num_bytes, dtype)
    metrics.all_reduce_bytes(kind, algorithm).observe(num_bytes)
