"""Logprobs on their way to the host: of draws, and of prompt tokens, which are scored here."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from worker.api import TokenLogprob
from worker.draw.logprobs import logprobs
from worker.ops.best_pairs import VocabPart

SCORED_ROWS = 256  # of prompts, whose logits are there at a time: 78 MB of 152k tokens in bf16


class Scores(NamedTuple):
    """Logprobs of `n` tokens that were not drawn, on their way to the host."""

    values: Tensor  # [n, 1 + num_logprobs] f32: of the token, then of the likeliest
    ids: Tensor  # [n, 1 + num_logprobs] i64

    def to_host(self) -> Scores:
        """Enqueue copies to pinned memory on the current stream."""
        return Scores(pinned_copy(self.values), pinned_copy(self.ids))

    def read(self) -> list[TokenLogprob]:
        """Call it only once the device has finished."""
        return read_logprobs(self.values, self.ids)


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


def read_logprobs(values: Tensor, ids: Tensor) -> list[TokenLogprob]:
    """What stands in both: of the token, then of the likeliest; [n, 1 + num_logprobs]."""
    return [
        TokenLogprob(numbers[0], tuple(zip(tokens[1:], numbers[1:], strict=True)))
        for numbers, tokens in zip(values.tolist(), ids.tolist(), strict=True)
    ]


def score(head: Head, hidden: Tensor, at: Tensor, token: Tensor, num_logprobs: int) -> Scores:
    """Logprobs of tokens [n] i64, token i behind hidden[at[i]]; device work only.

    hidden: [num_tokens, hidden]; at: [n] i64. A few rows at a time: the logits of a whole chunk
    would be gigabytes.
    """
    blocks = zip(at.split(SCORED_ROWS), token.split(SCORED_ROWS), strict=True)
    found = [logprobs(head.logits(hidden[i], whole=True), t, num_logprobs) for i, t in blocks]
    values, ids = zip(*found, strict=True)
    return Scores(torch.cat(values), torch.cat(ids))
