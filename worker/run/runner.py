"""ModelRunner launches one step without waiting; Step waits for its end."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from worker.draw.tail import Result
from worker.forward.draws import Masks
from worker.plan import Drawn, Plan
from worker.run.base import Decoded, LoadedModel, PaddedShape
from worker.run.build import Graphs
from worker.run.eager import draw_eagerly
from worker.run.groups import LayerGroups
from worker.run.stream import Handle, stream_of
from worker.step.state import SampledRows

JOINED = 8  # elements of an all-reduce that is a barrier: 16 bytes or more, as our kernel needs


class Step:
    """A launched step; `wait()` blocks until it has finished. Filled by ModelRunner.

    Args:
        plan: of the step.
        shape: of a prefill step's batch.
        groups: the layer hook of a prefill step; None: it has none.
    """

    def __init__(self, plan: Plan, shape: PaddedShape, groups: LayerGroups | None = None) -> None:
        self.plan, self.shape, self.groups = plan, shape, groups
        # How it was launched, for metrics, and tokens of its forward, padding included; known once
        # it has been waited for.
        self.path, self.num_tokens = "", 0
        self.end: Handle | None = None  # of all of it; None: a masked step's tail is to come
        self.verifies: Handle | None = None  # the drafts of a masked step; None: the width is 1

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self.end is not None and self.end.done()

    def tells(self, wake: Callable[[], None]) -> bool:
        """Have another thread call `wake` when the step is done; False: nothing will.

        Only on the CPU, where a loop that polls takes the step's own core.
        """
        return self.end is not None and self.end.tells(wake)

    def drafts(self) -> list[list[int]]:
        """What each row of a masked step verifies, width - 1 ids; -1 = none. Width 1: [].

        Known as soon as the step before has ended, when masks can be made.
        """
        return [] if self.verifies is None else self.verifies.wait().ids.tolist()

    def wait(self) -> list[Drawn]:
        """Block until the step has finished; returns what plan.sampled_rows drew."""
        assert self.end is not None, "the tail of a masked step is not launched"
        result: Result | None = self.end.wait()
        return result.read() if result is not None else []


class ModelRunner:
    """Runs plans on one stream: row changes and forward, then the sampling tail.

    A decode step starts and releases rows before its forward, a prefill step after it (see `Plan`).
    """

    def __init__(self, loaded: LoadedModel, graphs: Graphs) -> None:
        self.loaded = loaded
        self.graphs = graphs
        self.stream = stream_of(loaded.state.device)
        self._state = loaded.state
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
        shape = shape or padded_shape(self.graphs, plan, hooked=groups is not None)
        step = Step(plan, shape, groups)
        if not plan.masked:
            step.end = self.stream.submit(partial(self._run, step))
            return step
        if plan.decode:
            begun = self.stream.submit(partial(self._begin, plan))
            step.verifies = begun if plan.width > 1 else None
        self.stream.submit(partial(self._forward, step))
        return step

    def launch_tail(self, step: Step, masks: Masks) -> None:
        """Enqueue the tail of a masked step; masks: on the host."""
        assert step.plan.masked
        step.end = self.stream.submit(partial(self._tail, step.plan, masks))

    def close(self) -> None:
        """Wait for launched steps and free captured graphs."""
        self.stream.close()
        self.graphs.close()

    @torch.inference_mode()
    def _run(self, step: Step) -> Result | None:
        """Run a plan without masks, from its row changes to its tokens."""
        if step.plan.decode:
            self._begin(step.plan)
            forwarded = self.graphs.decode.launch(step.plan)
        else:
            forwarded = self.run_chunks(step)
        step.path, step.num_tokens = forwarded.path, forwarded.num_tokens
        if forwarded.sampled is None:
            return forwarded.result
        return self._draw(step.plan, forwarded)

    @torch.inference_mode()
    def _begin(self, plan: Plan) -> _Drafts | None:
        """Apply a decode plan's row changes; returns what a masked step verifies."""
        self._state.apply(plan)
        self._seed(plan)
        if not plan.masked or plan.width == 1:
            return None
        rows = self._state.upload(plan.decode, torch.int64)
        return _Drafts(self._state.columns.drafts[rows, : plan.width - 1])

    @torch.inference_mode()
    def _forward(self, step: Step) -> None:
        """The forward of a masked step; its tail is launched once the masks are made."""
        decode = step.plan.decode
        forwarded = self.graphs.decode.launch(step.plan) if decode else self.run_chunks(step)
        step.path, step.num_tokens = forwarded.path, forwarded.num_tokens
        self._forwarded = forwarded

    @torch.inference_mode()
    def _tail(self, plan: Plan, masks: Masks) -> Result:
        assert self._forwarded is not None
        forwarded, self._forwarded = self._forwarded, None
        return self._draw(plan, forwarded, masks)

    def run_chunks(self, step: Step) -> Decoded:
        """Run the forward of a prefill step, then apply the plan's row changes.

        If no chunk samples, `sampled` is None, and `hidden` is not of sampled rows: not to be used.
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
        # e.g. "eager_padding": launched eagerly, because padding to a bucket would have cost more
        path = f"{path}_{shape.refused}" if shape.refused else path
        sampled = _sampled_chunks(plan, one_each=batch.last_token_rows is not None)
        if not sampled:
            return Decoded(hidden, None, None, path, batch.num_tokens)
        at, rows, position = (
            self._state.upload(column, torch.int64) for column in zip(*sampled, strict=True)
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


class _Drafts(NamedTuple):
    """What a masked step verifies."""

    ids: Tensor  # [rows, width - 1] i64

    def to_host(self) -> _Drafts:
        host = torch.empty(self.ids.shape, dtype=self.ids.dtype, pin_memory=True)
        return _Drafts(host.copy_(self.ids, non_blocking=True))


def _join_ranks(loaded: LoadedModel) -> None:
    """On a prefill worker with a drafter, go on once all ranks have stored the drafter's rows.

    The leader announces KV for all ranks. Later all-reduces tell it that all have stored the
    model's KV; after the drafter's there may be none.
    """
    collective = loaded.model.collective
    if collective.size > 1 and loaded.drafter is not None and not loaded.decodes:
        nothing = collective.buffer((JOINED,), loaded.model.embedding.weight.dtype)
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
