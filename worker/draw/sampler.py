"""Drawing tokens as a pure function of (logits, seed, position).

    token_t = argmax(log p_t + Gumbel(seed, t))

where p_t is the model's distribution after temperature, min_p, top_k and top_p, in this order.
The noise is counter-based, so a token does not depend on what else is in the batch, on the width
of a speculative window, or on which worker draws it. (Gumbel-max: E. J. Gumbel 1954; used for
sampling by Maddison, Tarlow, Minka, "A* Sampling", NeurIPS 2014.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from worker.draw.changes import apply_masks, keep_likely, penalize
from worker.draw.logprobs import Head, Scores, logprobs, pinned_copy
from worker.forward.draws import Changes, DrawParams, Masks
from worker.ops.best_pairs import VocabPart, best_ids_ref, best_pairs_ref
from worker.ops.op import op
from worker.ops.philox import gumbel_ref
from worker.plan import Drawn, Tail
from worker.step.rows import NUM_COUNTS, SampledRows, gather_rows
from worker.step.state import FloatColumns, StepState


@dataclass(slots=True, frozen=True)
class SamplingRows(DrawParams):
    """DrawParams taken from the step state."""

    @classmethod
    def gather(cls, state: StepState, rows: Tensor, position: Tensor) -> SamplingRows:
        """Gather the parameters of `rows` [n] i64, to draw at `position` [n] i64."""
        columns = state.ints
        ints = columns.seed, columns.top_k, columns.min_len, columns.penalty_slot
        ints, floats, stop_ids = gather_rows(ints, state.floats, state.stop_ids, rows)
        seed, top_k, min_len, penalty_slot = ints
        return cls(
            position=position,
            seed=seed,
            top_k=top_k,
            min_len=min_len,
            penalty_slot=penalty_slot,
            stop_ids=stop_ids,
            **FloatColumns(*floats)._asdict(),
        )


def draw_ref(
    logits: Tensor,
    rows: SamplingRows,
    tail: Tail,
    changes: Changes | None = None,
    part: VocabPart | None = None,
) -> Tensor:
    """Draw one token a row: [n] i64; of equal values the lowest id.

    A row's token is the same under every tail that serves it, and with `changes` that do not
    concern it.

    Args:
        logits: [n, vocab], of the model's dtype; not written.
        tail: "greedy" if all rows are greedy, "random" if none filters, else "filtered".
        changes: penalties, biases and masks; None when no row has any.
        part: which tokens the columns of logits are, if other ranks have others. Then neither a
            filter nor `changes` is served; all ranks call, and draw the same.
    """
    if part is None:
        return _perturbed(logits, rows, tail, changes).argmax(-1)
    assert tail != "filtered", "these need the logits of all tokens"
    assert changes is None, "these need the logits of all tokens"
    ids = part.first + torch.arange(logits.shape[1], device=logits.device)
    pairs = best_pairs_ref(_perturbed(logits, rows, tail, None, part.first), ids)
    return best_ids_ref(part.gather(pairs))


sample = op(draw_ref)


def _perturbed(
    logits: Tensor, rows: SamplingRows, tail: Tail, changes: Changes | None, first: int = 0
) -> Tensor:
    """Scores whose largest is drawn; without changes the columns may be tokens from `first` on."""
    logits = change(logits, rows, changes, first)
    if tail == "greedy":
        return logits
    greedy = rows.temperature == 0
    scaled = logits / torch.where(greedy, 1.0, rows.temperature)[:, None]
    if tail == "filtered":
        scaled = keep_likely(scaled, rows)
    perturbed = scaled + gumbel_ref(rows.seed, rows.position, logits.shape[1], first)
    return torch.where(greedy[:, None], logits, perturbed)


def change(logits: Tensor, rows: SamplingRows, changes: Changes | None, first: int = 0) -> Tensor:
    """What a draw sees of logits [n, vocab], in f32; kernels: `changes_triton.py`.

    first: token of the first column, 0 with changes.
    """
    logits = logits.float()
    if changes is None:
        return ban_early_stops(logits, rows, first)
    logits = penalize(logits, rows, changes)
    banned = ban_early_stops(logits, rows)
    return banned if changes.masks is None else apply_masks(changes.masks, banned, logits)


def ban_early_stops(logits: Tensor, rows: SamplingRows, first: int = 0) -> Tensor:
    """Set the stop tokens of rows that draw below their min_len to -inf; first: of the columns."""
    n, columns = logits.shape
    at = rows.stop_ids - first
    too_early = (rows.position < rows.min_len)[:, None] & (at >= 0) & (at < columns)
    banned = torch.zeros(n, columns + 1, dtype=torch.bool, device=logits.device)
    banned.scatter_(1, torch.where(too_early, at, columns), True)
    return logits.masked_fill(banned[:, :columns], float("-inf"))


class Draws(NamedTuple):
    """How the tokens of a step are drawn."""

    tail: Tail  # which kernels are needed, see `sampler.sample`
    penalized: bool = False  # some row has a penalty slot
    num_logprobs: int = -1  # likeliest alternatives to report; -1 = no logprobs
    masks: Masks | None = None  # what grammars allow in n * width draws, on the device


@dataclass(slots=True)
class Result:
    """Draws of a tail, on their way to the host."""

    drawn: Tensor  # [n, 2 * width + 1] i64, see accept_rows_ref; n sampled rows
    scores: Scores | None = None  # logprobs of its n * width draws

    def first(self, num_rows: int, num_logprobs: int) -> Result:
        """The result of the first rows, with so many alternatives; -1 = no logprobs."""
        if self.scores is None or num_logprobs < 0:
            return Result(self.drawn[:num_rows])
        part = slice(num_rows * (self.drawn.shape[1] // 2)), slice(1 + num_logprobs)
        scores = Scores(*(each[part].contiguous() for each in self.scores))
        return Result(self.drawn[:num_rows], scores)

    def to_host(self) -> Result:
        """Enqueue copies to pinned memory on the current stream."""
        scores = None if self.scores is None else self.scores.to_host()
        return Result(pinned_copy(self.drawn), scores)

    def read(self) -> list[Drawn]:
        """One entry a sampled row. Call it only once the device has finished."""
        lines, width = self.drawn.tolist(), self.drawn.shape[1] // 2
        if self.scores is None and width == 1:  # the common case, quick for hundreds of rows
            return [Drawn((token,) if num else (), bool(ended)) for token, num, ended in lines]
        tokens = [] if self.scores is None else self.scores.read()
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
    head: Head,
    state: StepState,
    sampled: SampledRows,
    hidden: Tensor,
    draws: Draws,
) -> Result:
    """Draw a window of tokens for the rows of `sampled`, and advance a row by those that count.

    Enqueues device work only. hidden: [n * width, hidden] after the final norm.
    """
    tail, penalized, num_logprobs, masks = draws
    width, rows = sampled.width, sampled.rows
    if width > 1:
        rows = rows.repeat_interleave(width)
    params = SamplingRows.gather(state, rows, sampled.position)
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
    return Result(
        drawn, Scores(*logprobs(logits, ids, num_logprobs)) if num_logprobs >= 0 else None
    )
