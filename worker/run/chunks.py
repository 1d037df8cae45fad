"""A step of prompt chunks: its padded shape, its forward, its scores."""

import itertools
from contextlib import nullcontext

import torch
from torch import Tensor

from worker.draw.logprobs import Scores, score
from worker.plan import LONG_STEP_TOKENS, PaddedShape, Plan
from worker.run.base import Decoded, LoadedModel
from worker.run.build import Graphs
from worker.run.layer_groups import LayerGroups
from worker.step.state import SampledRows

# Elements of an all-reduce that is a barrier: 16 bytes or more, as our kernel needs.
BARRIER_SIZE = 8


def padded_shape(graphs: Graphs, plan: Plan, *, hooked: bool) -> PaddedShape:
    """Choose how to build the batch of a prefill step; hooked: it gets a layer hook."""
    num_tokens = sum(len(chunk.tokens) for chunk in plan.chunks)
    longest = plan.max_seq_len_ub
    shape = graphs.chunks.padded(num_tokens, len(plan.chunks), longest, hooked=hooked)
    # A graph of a long step has no hidden states of all tokens, which scores are made of.
    scores = plan.num_prompt_logprobs >= 0
    if scores and max(num_tokens, shape.num_tokens) >= LONG_STEP_TOKENS:
        return PaddedShape(refused="scored")
    return shape


def run_chunks(
    graphs: Graphs, plan: Plan, shape: PaddedShape, groups: LayerGroups | None = None
) -> Decoded:
    """Run the forward of a prefill step, then apply the plan's row changes.

    shape: chosen by `padded_shape`. If no chunk samples, `sampled` is None, and `hidden` must not
    be used.
    """
    loaded, state = graphs.loaded, graphs.loaded.state
    if plan.copies is not None:
        loaded.pool.copy(plan.copies)
    with nullcontext() if groups is None else groups.released_on_error():
        batch = loaded.buffers.chunks(plan, shape.num_tokens, fixed_len=shape.fixed_len)
        hidden, path = graphs.chunks.launch(batch, None if groups is None else groups.on_layer)
        _join_ranks(loaded)
        if groups is not None:
            groups.on_regions()
    state.apply_rows(plan)  # behind the forward, which does not read them
    seed_started(loaded, plan)
    # For example "eager_padding": launched eagerly, as padding to a bucket would cost more.
    path = f"{path}_{shape.refused}" if shape.refused else path
    one_each = batch.last_token_rows is not None  # hidden states are one a chunk, not a token
    ends = itertools.accumulate(len(chunk.tokens) for chunk in plan.chunks)
    sampled = [  # index of the hidden state, row, position to draw
        (i if one_each else end - 1, chunk.row, chunk.start + len(chunk.tokens))
        for i, (chunk, end) in enumerate(zip(plan.chunks, ends, strict=True))
        if chunk.sample
    ]
    scores = _scored(loaded, plan, hidden)
    if not sampled:
        return Decoded(hidden, None, None, path, batch.num_tokens, scores)
    columns = zip(*sampled, strict=True)
    at, rows, position = (state.upload(column, torch.int64) for column in columns)
    sampled_rows = SampledRows(rows, position, torch.ones_like(rows, dtype=torch.bool))
    return Decoded(hidden[at], sampled_rows, None, path, batch.num_tokens, scores)


def seed_started(loaded: LoadedModel, plan: Plan) -> None:
    """Have the drafter, if there is one, propose for the rows that start and decode at once."""
    rows = [start.row for start in plan.starts if start.active]
    if loaded.drafter is not None and rows:
        loaded.drafter.seed(loaded.state.upload(rows, torch.int64))


def _scored(loaded: LoadedModel, plan: Plan, hidden: Tensor) -> Scores | None:
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
    where, token = (loaded.state.upload(column, torch.int64) for column in (at, tokens))
    return score(loaded.model.head, hidden, where, token, plan.num_prompt_logprobs)


def _join_ranks(loaded: LoadedModel) -> None:
    """On a prefill worker with a drafter, go on once all ranks have stored the drafter's rows.

    The leader announces KV for all ranks. For the model's KV a later layer's all-reduce shows that
    all ranks have stored theirs. Behind the drafter's there may be no all-reduce, so here is one.
    """
    collective = loaded.model.collective
    if collective.size > 1 and loaded.drafter is not None and not loaded.decodes:
        barrier = collective.buffer((BARRIER_SIZE,), loaded.model.placement.dtype)
        collective.all_reduce(barrier.zero_())
