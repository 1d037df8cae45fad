"""Launches a step without graphs: the host launches every op, one after the other."""

import torch
from torch import Tensor

from worker.attention.base import AttentionBackend
from worker.draw.sampler import Draws, Result, draw
from worker.forward.batch import Batch, WindowShape
from worker.forward.context import LayerHook, forward_context
from worker.forward.draws import Masks
from worker.plan import TAILS, Plan, Tail
from worker.run.base import ChunkGraphs, Decoded, DecodeGraphs, Forward, LoadedModel
from worker.run.segments import GraphMemory


def forward(
    loaded: LoadedModel,
    batch: Batch,
    attention: AttentionBackend,
    on_layer: LayerHook | None = None,
) -> Tensor:
    """Compute hidden states after the final norm from token ids; see Decoder.forward."""
    model, attn_plan = loaded.model, attention.plan(batch)
    with forward_context(batch, attention, attn_plan, on_layer=on_layer):
        embedded = model.embed(batch.input_ids)
        return model.forward(embedded, batch.positions, batch.last_token_rows)


def draw_eagerly(
    loaded: LoadedModel, forwarded: Decoded, plan: Plan, masks: Masks | None
) -> Result:
    """Draw the tokens behind a forward op by op; see DecodeGraphs.draw."""
    state, tail = loaded.state, plan.tail
    if state.device.type == "cuda" and (plan.penalized or masks is not None):
        # One tail serves every batch: with several, six times as many kernels would be compiled,
        # some for the first time while requests wait.
        tail = TAILS[-1]
        masks = masks or Masks.none(len(forwarded.hidden), loaded.model.shape.vocab_size)
    sent = masks and Masks(*(state.pinned(x).to(state.device, non_blocking=True) for x in masks))
    draws = Draws(tail, plan.penalized, plan.num_logprobs, sent)
    if not plan.chunks:
        return draw_and_propose(loaded, forwarded, draws)
    result = draw_rows(loaded, forwarded, draws)
    if loaded.drafter is not None and loaded.decodes:
        assert forwarded.sampled is not None
        loaded.drafter.seed(forwarded.sampled.rows)
    return result


def draw_and_propose(loaded: LoadedModel, forwarded: Decoded, draws: Draws) -> Result:
    """Draw behind a decode step's forward, and draft for the next step. Device work only."""
    result = draw_rows(loaded, forwarded, draws)
    if loaded.drafter is not None:
        assert forwarded.sampled is not None
        greedy = draws.tail == "greedy"
        loaded.drafter.advance(forwarded.sampled, forwarded.hidden, result.drawn, greedy=greedy)
    return result


def draw_rows(loaded: LoadedModel, forwarded: Decoded, draws: Draws) -> Result:
    """Draw for the rows of a forward, and advance them."""
    assert forwarded.sampled is not None
    return draw(loaded.model.head, loaded.state, forwarded.sampled, forwarded.hidden, draws)


class EagerChunks(ChunkGraphs):
    """ChunkGraphs without graphs."""

    def __init__(self, loaded: LoadedModel, memory: GraphMemory | None = None) -> None:
        self._loaded = loaded

    def launch(self, batch: Batch, on_layer: LayerHook | None = None) -> Forward:
        hidden = forward(self._loaded, batch, self._loaded.attention.prefill, on_layer)
        if self._loaded.drafter is not None:
            self._loaded.drafter.observe(batch, hidden)
        return Forward(hidden, "eager")


class EagerDecode(DecodeGraphs):
    """DecodeGraphs without graphs."""

    def __init__(self, loaded: LoadedModel, memory: GraphMemory | None = None) -> None:
        self._loaded = loaded

    def launch(self, plan: Plan, tail: Tail) -> Decoded:
        rows = self._loaded.state.upload(plan.decode, torch.int64)
        host = self._loaded.windows.lengths(plan.decode) if plan.width == 1 else None
        window = WindowShape(plan.width, plan.max_seq_len_ub, host)
        return self.step(rows, window, tail)

    def draw(self, forwarded: Decoded, plan: Plan, masks: Masks | None) -> Result:
        return draw_eagerly(self._loaded, forwarded, plan, masks)

    def step(self, rows: Tensor, window: WindowShape, tail: Tail = "none") -> Decoded:
        """One decode step of `rows` [n] i64, and its draws unless `tail` is "none"."""
        loaded = self._loaded
        batch, sampled = loaded.windows.batch(rows, window)
        attention = loaded.attention.decode if window.width == 1 else loaded.attention.spec
        hidden = forward(loaded, batch, attention)
        decoded = Decoded(hidden, sampled, None, "eager", batch.num_tokens)
        if tail == "none":
            return decoded
        result = draw_and_propose(loaded, decoded, Draws(tail))
        return decoded._replace(sampled=None, result=result)
