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

from worker.kernels.step.draw import DrawParams, draw_triton
from worker.kernels.step.gather_rows import gather_rows
from worker.kernels.step.philox import gumbel_ref
from worker.plan import Tail
from worker.step.state import FloatColumns, PenaltyTables, StepState


@dataclass(slots=True, frozen=True)
class SamplingRows(DrawParams):
    """Parameters of the rows whose logits are given; index i belongs to logits[i]."""

    presence_penalty: Tensor  # [n] f32
    frequency_penalty: Tensor  # [n] f32
    repetition_penalty: Tensor  # [n] f32
    penalty_slot: Tensor  # [n] i64; index into StepState.penalties, 0 = neutral

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


def sample(
    logits: Tensor,
    rows: SamplingRows,
    tail: Tail,
    penalties: PenaltyTables | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Draw one token for each row.

    Args:
        logits: [n, vocab], of the model's dtype; not written.
        rows: parameters of the n rows.
        tail: "greedy" if all rows are greedy, "random" if none filters, else "filtered"; not
            "none".
        penalties: tables of penalties and logit bias; None when no row has a penalty slot.
        mask: [n, ceil(vocab / 32)] i32, bit v % 32 of word v // 32 set iff the grammar allows token
            v; None when no row has a grammar.

    Returns:
        [n] i64. A row's token is the same under every tail that serves it.
    """
    if penalties is not None:
        logits = penalize(logits.float(), rows, penalties)
    if mask is not None:
        logits = logits.float()
        logits = apply_mask(mask, ban_early_stops(logits, rows), logits)
    ban_stops = mask is None  # with a mask, apply_mask has banned them
    if logits.is_cuda:
        return draw_triton(logits, rows, filtered=tail == "filtered", stops=ban_stops)
    return draw_ref(logits, rows, tail, stops=ban_stops)


def draw_ref(logits: Tensor, rows: SamplingRows, tail: Tail, *, stops: bool = True) -> Tensor:
    """The twin of draw_triton, which defines its result.

    logits: [n, vocab]; rows and tail: see `sample`; stops: ban stop ids below min_len.
    Returns [n] i64.
    """
    logits = logits.float()
    if stops:
        logits = ban_early_stops(logits, rows)
    if tail == "greedy":
        return logits.argmax(-1)
    greedy = rows.temperature == 0
    scaled = logits / torch.where(greedy, 1.0, rows.temperature)[:, None]
    if tail == "filtered":
        scaled = keep_likely(scaled, rows)
    perturbed = scaled + gumbel_ref(rows.seed, rows.position, logits.shape[1])
    return torch.where(greedy[:, None], logits, perturbed).argmax(-1)


def ban_early_stops(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Set the stop tokens of rows that draw below their min_len to -inf."""
    too_early = (rows.position < rows.min_len)[:, None] & (rows.stop_ids >= 0)
    vocab_size = logits.shape[1]
    banned = torch.zeros(
        logits.shape[0], vocab_size + 1, dtype=torch.bool, device=logits.device
    ).scatter(1, torch.where(too_early, rows.stop_ids, vocab_size), True)
    return logits.masked_fill(banned[:, :vocab_size], float("-inf"))


def penalize(logits: Tensor, rows: SamplingRows, penalties: PenaltyTables) -> Tensor:
    """Apply bias, then repetition, frequency and presence penalty; neutral rows keep their bits.

    Repetition: Keskar et al., "CTRL", 2019 (divide positive logits, multiply negative ones), over
    prompt and output; frequency and presence: OpenAI's definition, over the output.
    """
    slot = rows.penalty_slot
    counts = penalties.counts[slot]
    logits = logits + penalties.bias[slot]
    repeated = penalties.in_prompt[slot] | (counts > 0)
    factor = torch.where(repeated, rows.repetition_penalty[:, None], 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    logits = logits - rows.frequency_penalty[:, None] * counts
    return logits - rows.presence_penalty[:, None] * (counts > 0)


def apply_mask(mask: Tensor, banned: Tensor, logits: Tensor) -> Tensor:
    """Set what the grammar forbids to -inf in `banned`, which is `logits` without early stops.

    A grammar that allows only stop tokens wins over min_len: such rows come from `logits`.
    """
    forbidden = ~unpack(mask, logits.shape[1])
    left = banned.masked_fill(forbidden, float("-inf"))
    stuck = left.amax(-1, keepdim=True) == float("-inf")
    return torch.where(stuck, logits.masked_fill(forbidden, float("-inf")), left)


def unpack(mask: Tensor, vocab_size: int) -> Tensor:
    """Unpack [n, words] i32 of 32 bits, lowest first, into [n, vocab_size] bool."""
    bits = (mask[:, :, None] >> torch.arange(32, device=mask.device, dtype=torch.int32)) & 1
    return bits.flatten(1)[:, :vocab_size].bool()


def logprobs(logits: Tensor, token: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the drawn and the likeliest tokens, by the unchanged logits.

    Args:
        logits: [n, vocab], of the model's dtype.
        token: [n] i64, the drawn ones.
        num_top: number of likeliest tokens.

    Returns:
        Values [n, 1 + num_top] f32 (the drawn token's first) and ids [n, 1 + num_top] i64.
    """
    all_values = logits.float().log_softmax(-1)
    own = all_values.gather(1, token[:, None])
    top, ids = all_values.topk(num_top, dim=-1)
    return torch.cat((own, top), 1), torch.cat((token[:, None], ids), 1)


def keep_likely(scaled: Tensor, rows: SamplingRows) -> Tensor:
    """Set every token outside min_p, then top_k, then top_p to -inf; the likeliest always stays.

    top_p keeps the smallest set of likeliest tokens whose probability, renormalised over what
    top_k left, reaches top_p. Rows with a filter off pass through it unchanged, bit for bit.
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
