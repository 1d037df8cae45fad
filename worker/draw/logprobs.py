"""Log-probabilities of the drawn and the likeliest tokens, without [rows, vocab] in f32.

One pass finds the largest logits and the sums of blocks of the vocabulary. Then one program a row
takes the likeliest block leader again and again, and reads that block once more for its next
leader. So only blocks with a reported token are read again. Prompt tokens are scored here.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from worker.api import TokenLogprob
from worker.ops.best_pairs import VocabPart
from worker.ops.op import op

SCORED_ROWS = 256  # of prompts, whose logits are there at a time: 78 MB of 152k tokens in bf16


def logprobs_ref(logits: Tensor, token: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """Values [n, 1 + num_top] f32 and ids i64: of the drawn token, then of the likeliest ones.

    logits: [n, vocab], unchanged; token: [n] i64. Of equally likely tokens lower ids come first.
    """
    x = logits.float() + 0.0  # no -0
    bits = x.view(torch.int32).long()
    order = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    ranked = (order << 32) + (0x7FFFFFFF - torch.arange(x.shape[1], device=x.device))
    top = 0x7FFFFFFF - (ranked.topk(num_top, dim=-1).values & 0xFFFFFFFF)
    ids = torch.cat((token[:, None], top), 1)
    return x.gather(1, ids) - x.logsumexp(-1, keepdim=True), ids


logprobs = op(logprobs_ref)


class Scores(NamedTuple):
    """Logprobs of `n` tokens on their way to the host."""

    values: Tensor  # [n, 1 + num_logprobs] f32: of the token, then of the likeliest
    ids: Tensor  # [n, 1 + num_logprobs] i64

    def to_host(self) -> Scores:
        """Enqueue copies to pinned memory on the current stream."""
        return Scores(pinned_copy(self.values), pinned_copy(self.ids))

    def read(self) -> list[TokenLogprob]:
        """Call it only once the device has finished."""
        return [
            TokenLogprob(numbers[0], tuple(zip(tokens[1:], numbers[1:], strict=True)))
            for numbers, tokens in zip(self.values.tolist(), self.ids.tolist(), strict=True)
        ]


class Head(Protocol):
    """What makes logits of hidden states."""

    # Of the ids whose logits this rank computes before any gather; None: of all ids.
    part: VocabPart | None

    def logits(self, hidden: Tensor, *, whole: bool = True) -> Tensor:
        """hidden: [n, hidden_size] -> [n, vocab_size]; not whole: [n, ids of `part`]."""
        ...


def pinned_copy(tensor: Tensor) -> Tensor:
    """A copy of a tensor of any shape in pinned memory; enqueued on the current stream."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def score(head: Head, hidden: Tensor, at: Tensor, token: Tensor, num_logprobs: int) -> Scores:
    """Logprobs of tokens [n] i64, token i behind hidden[at[i]]; device work only.

    hidden: [num_tokens, hidden]; at: [n] i64. A few rows at a time: the logits of a whole chunk
    would be gigabytes.
    """
    blocks = zip(at.split(SCORED_ROWS), token.split(SCORED_ROWS), strict=True)
    found = [logprobs(head.logits(hidden[i], whole=True), t, num_logprobs) for i, t in blocks]
    values, ids = zip(*found, strict=True)
    return Scores(torch.cat(values), torch.cat(ids))
