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

from worker.kernels.philox import gumbel_ref
from worker.plan import Tail
from worker.state import StepState


@dataclass(slots=True, frozen=True)
class SamplingRows:
    """Parameters of the rows whose logits are given; index i belongs to logits[i]."""

    position: Tensor  # [n] i64; index in prompt + output of the token to be drawn
    seed: Tensor  # [n] i64
    temperature: Tensor  # [n] f32; 0 = greedy
    top_k: Tensor  # [n] i64; 0 = off
    top_p: Tensor  # [n] f32
    min_p: Tensor  # [n] f32
    min_len: Tensor  # [n] i64
    stop_ids: Tensor  # [n, MAX_STOP_IDS] i64; -1 = unused place

    @classmethod
    def gather(cls, state: StepState, rows: Tensor, position: Tensor) -> SamplingRows:
        """The parameters of `rows` [n] i64, to draw at `position` [n] i64."""
        return cls(
            position, state.seed[rows], state.temperature[rows], state.top_k[rows],
            state.top_p[rows], state.min_p[rows], state.min_len[rows], state.stop_ids[rows],
        )  # fmt: skip


def sample(logits: Tensor, rows: SamplingRows, tail: Tail) -> Tensor:
    """Draw one token a row.

    Args:
        logits: [n, vocab] f32.
        rows: parameters of the n rows.
        tail: "greedy" when all rows are greedy, "random" when no row filters, else "filtered".

    Returns:
        [n] i64. A row's token is the same under every tail that serves it.
    """
    logits = adjust(logits, rows)
    if tail == "greedy":
        return logits.argmax(-1)
    greedy = rows.temperature == 0
    scaled = logits / torch.where(greedy, 1.0, rows.temperature)[:, None]
    if tail == "filtered":
        scaled = keep_likely(scaled, rows)
    perturbed = scaled + gumbel_ref(rows.seed, rows.position, logits.shape[1])
    return torch.where(greedy[:, None], logits, perturbed).argmax(-1)


def adjust(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Changes of the logits that precede temperature: no stop token below min_len."""
    too_early = (rows.position < rows.min_len)[:, None] & (rows.stop_ids >= 0)
    vocab_size = logits.shape[1]
    banned = torch.zeros(
        logits.shape[0], vocab_size + 1, dtype=torch.bool, device=logits.device
    ).scatter(1, torch.where(too_early, rows.stop_ids, vocab_size), True)
    return logits.masked_fill(banned[:, :vocab_size], float("-inf"))


def keep_likely(scaled: Tensor, rows: SamplingRows) -> Tensor:
    """-inf for every token outside min_p, then top_k, then top_p; the likeliest always stays.

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
