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
from worker.step.rows import NUM_COUNTS
from worker.step.state import SampledRows, StepState


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
        if self.values is not None and self.ids is not None:
            return self._with_logprobs(lines, width)
        if width == 1:
            return [
                Drawn((token,) if is_valid else (), bool(ended)) for token, is_valid, ended in lines
            ]
        return [_drawn(line, width) for line in lines]

    def _with_logprobs(self, lines: list[list[int]], width: int) -> list[Drawn]:
        assert self.values is not None
        assert self.ids is not None
        values, ids = self.values.tolist(), self.ids.tolist()
        found = []
        for i, line in enumerate(lines):
            kept = range(i * width, i * width + line[width])
            told = tuple(
                TokenLogprob(values[j][0], tuple(zip(ids[j][1:], values[j][1:], strict=True)))
                for j in kept
            )
            found.append(_drawn(line, width, told))
        return found


def _drawn(line: list[int], width: int, logprobs: tuple[TokenLogprob, ...] = ()) -> Drawn:
    """Make the entry of one line of accept_rows' result."""
    num, ended = line[width], line[width + 1]
    return Drawn(tuple(line[:num]), bool(ended), logprobs, tuple(line[width + NUM_COUNTS :]))


def draw(
    head: Head,
    state: StepState,
    sampled: SampledRows,
    hidden: Tensor,
    draws: Draws,
) -> Result:
    """Draw a window of tokens for each of `sampled` and advance its row by those that count.

    Enqueues device work only.

    Args:
        head: of the model.
        state: of the rows; changed.
        sampled: rows to draw for, with their positions.
        hidden: [n * width, hidden] after the final norm.
        draws: how.
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
    drawn = state.accept(
        sampled.rows, position, sampled.valid, ids, params.stop_ids, params.min_len, state.columns
    )  # fmt: skip
    if penalized:
        # No two rows share a slot, except slot 0, whose counts are never read.
        kept = torch.arange(width, device=drawn.device) < drawn[:, width : width + 1]
        at = params.penalty_slot, ids
        state.penalties.counts.index_put_(at, kept.view(-1).int(), accumulate=True)
    result = Result(drawn)
    if num_logprobs >= 0:
        result.values, result.ids = logprobs(logits, ids, num_logprobs)
    return result
