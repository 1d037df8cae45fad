"""Launches a step without graphs: the host launches every op, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from worker.api import MAX_LOGPROBS
from worker.attention.base import AttentionBackend
from worker.draw.tail import Result, draw
from worker.forward.batch import Batch, HostLengths
from worker.forward.context import LayerHook, forward_context
from worker.forward.draws import Masks
from worker.observe.metrics import Progress, untold
from worker.plan import TAILS, Plan, Tail, max_rows
from worker.run.base import BucketCheck, Decoded, Forward, LoadedModel, PaddedShape
from worker.run.segments import GraphMemory
from worker.step.state import SampledRows


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
    loaded: LoadedModel,
    forwarded: Decoded,
    plan: Plan,
    masks: Masks | None,
    *,
    ends_prompts: bool = False,
) -> Result:
    """Sample what a forward is followed by, op by op; see DecodeGraphs.draw.

    ends_prompts: it was of chunks.
    """
    state, tail = loaded.state, plan.tail
    assert forwarded.sampled is not None
    if state.device.type == "cuda" and (plan.penalized or masks is not None):
        # A tail that serves every batch: otherwise there would be six times as many kernels to
        # compile, some of them for the first time while requests wait.
        tail = TAILS[-1]
        masks = masks or Masks.none(len(forwarded.hidden), loaded.model.spec.vocab_size)
    sent = masks and Masks(*map(state.upload_tensor, masks))
    changes = plan.penalized, plan.num_logprobs, sent
    if not ends_prompts:
        return draw_and_propose(loaded, forwarded, tail, *changes)
    result = _draw(loaded, forwarded, tail, *changes)
    if loaded.drafter is not None and loaded.decodes:
        loaded.drafter.seed(forwarded.sampled.rows)
    return result


def draw_and_propose(
    loaded: LoadedModel,
    forwarded: Decoded,
    tail: Tail,
    penalized: bool = False,
    num_logprobs: int = -1,
    masks: Masks | None = None,
) -> Result:
    """What follows a decode step's forward: draws, and the next step's drafts. Device work only."""
    result = _draw(loaded, forwarded, tail, penalized, num_logprobs, masks)
    if loaded.drafter is not None:
        assert forwarded.sampled is not None
        loaded.drafter.advance(
            forwarded.sampled, forwarded.hidden, result.drawn, greedy=tail == "greedy"
        )
    return result


def _draw(
    loaded: LoadedModel,
    forwarded: Decoded,
    tail: Tail,
    penalized: bool,
    num_logprobs: int,
    masks: Masks | None,
) -> Result:
    assert forwarded.sampled is not None
    return draw(
        loaded.model,
        loaded.state,
        forwarded.sampled,
        forwarded.hidden,
        tail,
        penalized=penalized,
        num_logprobs=num_logprobs,
        masks=masks,
    )


class _Eager:
    """StepGraphs that captures nothing."""

    def __init__(self, loaded: LoadedModel, memory: GraphMemory | None = None) -> None:
        self._loaded = loaded

    def run_buckets(self) -> None:
        """Nothing will be captured."""

    def capture_largest(self) -> None:
        """Nothing to capture."""

    def capture(self, progress: Progress = untold) -> Sequence[BucketCheck]:
        """Nothing to prepare."""
        return ()

    def close(self) -> None:
        """Nothing to free."""


class EagerChunks(_Eager):
    """ChunkGraphs without graphs."""

    @torch.inference_mode()
    def run_largest(self) -> None:
        """Run the largest prefill step; all its tokens are padding.

        On a prefill worker also the tails of first tokens, for every number of rows for which the
        kernels differ, so that serving compiles none.
        """
        loaded = self._loaded
        batch = loaded.buffers.blank_chunk(int(loaded.config.max_prefill_tokens))
        hidden, _ = self.launch(batch)
        if loaded.decodes:
            return
        most = min(int(loaded.config.max_num_reqs), int(loaded.config.max_prefill_tokens))
        for num_rows in {*(1 << i for i in range(most.bit_length())), most}:
            rows = torch.zeros(num_rows, dtype=torch.int64, device=hidden.device)
            sampled = SampledRows(rows, rows, torch.zeros_like(rows, dtype=torch.bool))
            for tail in TAILS[1:]:
                draw(loaded.model, loaded.state, sampled, hidden[rows], tail)

    def padded(
        self, num_tokens: int, num_reqs: int, max_seq_len_ub: int, *, hooked: bool
    ) -> PaddedShape:
        """See ChunkGraphs.padded."""
        return PaddedShape()

    def launch(self, batch: Batch, on_layer: LayerHook | None = None) -> Forward:
        """See ChunkGraphs.launch."""
        hidden = forward(self._loaded, batch, self._loaded.attention.prefill, on_layer)
        if self._loaded.drafter is not None:
            self._loaded.drafter.observe(batch, hidden)
        return Forward(hidden, "eager")


class EagerDecode(_Eager):
    """DecodeGraphs without graphs."""

    @torch.inference_mode()
    def run_largest(self) -> None:
        """Run the largest decode steps; all their rows are padding.

        Also the tail with penalties, masks and logprobs, for every number of rows for which the
        kernels differ, so that serving compiles none.
        """
        loaded, device = self._loaded, self._loaded.state.device
        most = int(loaded.config.max_num_reqs)
        plan = Plan(0, tail=TAILS[-1], penalized=True, num_logprobs=MAX_LOGPROBS)
        for width in loaded.widths:
            num_rows = max_rows(width, most)
            rows = torch.zeros(num_rows, dtype=torch.int64, device=device)
            ones = HostLengths([1] * num_rows, [loaded.max_len] * num_rows)
            host, bound = ones if width == 1 else None, loaded.max_len + width - 1
            self.step(rows, bound, TAILS[-1], host, width)
            forwarded = self.step(rows, bound, "none", host, width)
            assert forwarded.sampled is not None
            for num in {num_rows, *(1 << i for i in range(num_rows.bit_length()))}:
                hidden = forwarded.hidden[: num * width]
                sampled = forwarded.sampled.first(num)
                first = forwarded._replace(hidden=hidden, sampled=sampled)
                self.draw(first, plan, Masks.none(num * width, loaded.model.spec.vocab_size))
                if loaded.drafter is not None and width == 1:
                    loaded.drafter.seed(rows[:num])

    def launch(
        self, rows: Sequence[int], max_seq_len_ub: int, tail: Tail, width: int = 1
    ) -> Decoded:
        """See DecodeGraphs.launch."""
        uploaded = self._loaded.state.upload(rows, torch.int64)
        lengths = self._loaded.buffers.decode_lengths(rows) if width == 1 else None
        return self.step(uploaded, max_seq_len_ub, tail, lengths, width)

    def draw(self, forwarded: Decoded, plan: Plan, masks: Masks | None) -> Result:
        """See DecodeGraphs.draw."""
        return draw_eagerly(self._loaded, forwarded, plan, masks)

    def step(
        self,
        rows: Tensor,
        max_seq_len_ub: int,
        tail: Tail,
        host: HostLengths | None = None,
        width: int = 1,
    ) -> Decoded:
        """As `launch`, with `rows` [n] i64 on the device. Graphs capture it with `host` None."""
        loaded = self._loaded
        batch, sampled = loaded.buffers.decode(rows, max_seq_len_ub, host, width)
        attention = loaded.attention.decode if width == 1 else loaded.attention.spec
        hidden = forward(loaded, batch, attention)
        decoded = Decoded(hidden, sampled, None, "eager", batch.num_tokens)
        if tail == "none":
            return decoded
        return decoded._replace(sampled=None, result=draw_and_propose(loaded, decoded, tail))
