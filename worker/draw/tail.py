"""The sampling tail: from hidden states to drawn tokens and the step state after them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from worker.api import TokenLogprob
from worker.draw.logprobs import logprobs
from worker.draw.sampler import SamplingRows, sample
from worker.forward.draws import Masks
from worker.ops.best_pairs import VocabPart
from worker.plan import Drawn, Tail
from worker.step.rows import NUM_COUNTS, SampledRows
from worker.step.state import StepState


class Head(Protocol):
    """The part of a model that a tail calls."""

    part: VocabPart | None  # of the vocabulary, where ranks divide it; None: all of it

    def logits(self, hidden: Tensor, *, whole: bool = True) -> Tensor:
        """[n, hidden] -> [n, ids]: of all ids, or without `whole` of `part`."""
        ...


class Draws(NamedTuple):
    """How the tokens of a step are drawn."""

    tail: Tail  # which kernels are needed, see `sampler.sample`
    penalized: bool = False  # some row has a penalty slot
    num_logprobs: int = -1  # likeliest alternatives to report; -1 = no logprobs
    masks: Masks | None = None  # what grammars allow in each of n * width draws, on the device


@dataclass(slots=True)
class Result:
    """Draws of a tail, on their way to the host."""

    drawn: Tensor  # [n, 2 * width + 1] i64, see accept_rows_ref; n sampled rows
    values: Tensor | None = None  # [n * width, 1 + num_logprobs] f32
    ids: Tensor | None = None  # [n * width, 1 + num_logprobs] i64

    def first(self, num_rows: int, num_logprobs: int) -> Result:
        """The result of the first rows, with so many alternatives; -1 = no logprobs."""
        if self.values is None or self.ids is None or num_logprobs < 0:
            return Result(self.drawn[:num_rows])
        columns = slice(1 + num_logprobs)
        num_draws = num_rows * (self.drawn.shape[1] // 2)
        values, ids = self.values[:num_draws, columns], self.ids[:num_draws, columns]
        return Result(self.drawn[:num_rows], values.contiguous(), ids.contiguous())

    def to_host(self) -> Result:
        """Enqueue copies to pinned memory on the current stream."""

        def copy(tensor: Tensor | None) -> Tensor | None:
            if tensor is None:
                return None
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            return host.copy_(tensor, non_blocking=True)

        drawn = copy(self.drawn)
        assert drawn is not None
        return Result(drawn, copy(self.values), copy(self.ids))

    def read(self) -> list[Drawn]:
        """One entry for each sampled row. Call it only once the device has finished."""
        lines, width = self.drawn.tolist(), self.drawn.shape[1] // 2
        if self.values is None or self.ids is None:
            if width == 1:  # the common case, quick for hundreds of rows
                return [Drawn((token,) if num else (), bool(ended)) for token, num, ended in lines]
            tokens: list[TokenLogprob] = []
        else:
            draws = zip(self.values.tolist(), self.ids.tolist(), strict=True)
            tokens = [
                TokenLogprob(values[0], tuple(zip(ids[1:], values[1:], strict=True)))
                for values, ids in draws
            ]
        return [
            Drawn(
                tuple(line[: line[width]]),
                bool(line[width + 1]),
                tuple(tokens[i * width : i * width + line[width]]),
                tuple(line[width + NUM_COUNTS :]),
            )
            for i, line in enumerate(lines)
        ]


def draw(
    head: Head, state: StepState, sampled: SampledRows, hidden: Tensor, draws: Draws
) -> Result:
    """Draw a window of tokens for each of `sampled` and advance its row by those that count.

    Enqueues device work only. hidden: [n * width, hidden] after the final norm.
    """
    tail, penalized, num_logprobs, masks = draws
    width, position = sampled.width, sampled.position
    rows = sampled.rows
    if width > 1:
        rows = rows.repeat_interleave(width)
    params = SamplingRows.gather(state, rows, position)
    # Filters, changes and logprobs need the logits of all tokens. Otherwise a rank draws the best
    # token of its part of the vocabulary, and ranks compare theirs.
    looks_at_all = tail == "filtered" or penalized or masks is not None or num_logprobs >= 0
    part = None if looks_at_all else head.part
    logits = head.logits(hidden, whole=looks_at_all)
    changes = None
    if penalized or masks is not None:
        drafts = state.columns.drafts[sampled.rows, : width - 1] if width > 1 else None
        changes = state.penalties.changes(masks, drafts)
    ids = sample(logits, params, tail, changes, part)
    drawn = state.accept(sampled, ids, params.stop_ids, params.min_len, state.columns)
    if penalized:
        # No two rows share a slot, except slot 0, whose counts are never read.
        kept = torch.arange(width, device=drawn.device) < drawn[:, width : width + 1]
        at = params.penalty_slot, ids
        state.penalties.counts.index_put_(at, kept.view(-1).int(), accumulate=True)
    result = Result(drawn)
    if num_logprobs >= 0:
        result.values, result.ids = logprobs(logits, ids, num_logprobs)
    return result
