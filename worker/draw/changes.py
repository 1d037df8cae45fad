"""What changes the logits of some rows before their draw: penalties, masks, filters."""

import torch
from torch import Tensor

from worker.forward.draws import Changes, DrawParams, Masks


def penalize(logits: Tensor, rows: DrawParams, changes: Changes) -> Tensor:
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
    """How often a token is among the drafts before a row of a window.

    drafts: [m, width - 1] i64, -1 = none. Returns [m * width, vocab_size] i64: row j of a window
    counts its first j drafts.
    """
    once = torch.nn.functional.one_hot(drafts + 1, vocab_size + 1)[..., 1:]
    none = once.new_zeros(len(drafts), 1, vocab_size)
    return torch.cat((none, once), 1).cumsum(1).flatten(0, 1)


def apply_masks(masks: Masks, banned: Tensor, logits: Tensor) -> Tensor:
    """Set tokens that grammars forbid to -inf in `banned`, which is `logits` without early stops.

    banned, logits: [n, vocab] f32; returns the same. masks: of n rows.
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


def keep_likely(scaled: Tensor, rows: DrawParams) -> Tensor:
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
