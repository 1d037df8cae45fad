"""Drawing tokens as a pure function of (logits, seed, position).

    token_t = argmax(log p_t + Gumbel(seed, t))

where p_t is the model's distribution after temperature, min_p, top_k and top_p, in this order.
The noise is counter-based, so a token does not depend on what else is in the batch, on the width
of a speculative window, or on which worker draws it. (Gumbel-max: E. J. Gumbel 1954; used for
sampling by Maddison, Tarlow, Minka, "A* Sampling", NeurIPS 2014.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from worker.forward.draws import Changes, DrawParams, Masks
from worker.ops.best_pairs import VocabPart, best_ids_ref, best_pairs_ref
from worker.ops.op import op
from worker.ops.philox import gumbel_ref
from worker.plan import Tail
from worker.step.rows import gather_rows
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
    """Draw one token for each row.

    Args:
        logits: [n, vocab], of the model's dtype; not written.
        tail: "greedy" if all rows are greedy, "random" if none filters, else "filtered".
        changes: penalties, biases and masks; None when no row has any.
        part: which tokens the columns of logits are, if other ranks have others. Then neither a
            filter nor `changes` is served; all ranks call, and draw the same.

    Returns:
        [n] i64; of equal values the lowest id. A row's token is the same under every tail that
        serves it, and with `changes` that do not concern it.
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


def penalize(logits: Tensor, rows: SamplingRows, changes: Changes) -> Tensor:
    """Apply bias, then repetition, frequency and presence penalty; neutral rows keep their bits.

    Repetition: Keskar et al., "CTRL", 2019 (divide positive logits, multiply negative ones), over
    prompt and output; frequency and presence: OpenAI's definition, over the output.
    """
    slot = rows.penalty_slot
    counts = changes.counts[slot]
    if changes.drafts is not None:
        counts = counts + drafted(changes.drafts, logits.shape[1])
    logits = logits + changes.bias[slot]
    repeated = changes.in_prompt[slot] | (counts > 0)
    factor = torch.where(repeated, rows.repetition_penalty[:, None], 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    logits = logits - rows.frequency_penalty[:, None] * counts
    return logits - rows.presence_penalty[:, None] * (counts > 0)


def drafted(drafts: Tensor, vocab_size: int) -> Tensor:
    """How often each token is among the drafts before each row of a window.

    drafts: [m, width - 1] i64, -1 = none. Returns [m * width, vocab_size] i64: row j of a window
    counts its first j drafts.
    """
    once = torch.nn.functional.one_hot(drafts + 1, vocab_size + 1)[..., 1:]
    none = once.new_zeros(len(drafts), 1, vocab_size)
    return torch.cat((none, once), 1).cumsum(1).flatten(0, 1)


def apply_masks(masks: Masks, banned: Tensor, logits: Tensor) -> Tensor:
    """Set tokens that grammars forbid to -inf in `banned`, which is `logits` without early stops.

    A grammar that allows only stop tokens wins over min_len: its row is made from `logits`.
    """
    forbidden = ~unpack(masks.words[masks.line], logits.shape[1])
    left = banned.masked_fill(forbidden, float("-inf"))
    stuck = (left.amax(-1) == float("-inf")) & (masks.line > 0)
    return torch.where(stuck[:, None], logits.masked_fill(forbidden, float("-inf")), left)


def unpack(mask: Tensor, vocab_size: int) -> Tensor:
    """Unpack [n, words] i32 of 32 bits, lowest first, into [n, vocab_size] bool."""
    bits = (mask[:, :, None] >> torch.arange(32, device=mask.device, dtype=torch.int32)) & 1
    return bits.flatten(1)[:, :vocab_size].bool()


def keep_likely(scaled: Tensor, rows: SamplingRows) -> Tensor:
    """Set every token outside min_p, then top_k, then top_p to -inf; the likeliest always stays.

    top_p keeps the smallest set of likeliest tokens whose probability, renormalised over the tokens
    that top_k left, reaches top_p. A filter that is off for a row does not change the row's bits.
    """
    best = scaled.amax(-1, keepdim=True)
    scaled = scaled.masked_fill(scaled < best + rows.min_p.log()[:, None], float("-inf"))
    ordered, index = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[1], device=scaled.device)
    top_k = torch.where(rows.top_k > 0, rows.top_k, scaled.shape[1])[:, None]
    drop = rank >= top_k
    probs = ordered.masked_fill(drop, float("-inf")).softmax(-1)
    before = probs.cumsum(-1) - probs
    top_p = rows.top_p[:, None]
    drop |= (before >= top_p) & (top_p < 1) & (rank > 0)
    return scaled.masked_fill(torch.zeros_like(drop).scatter(1, index, drop), float("-inf"))
