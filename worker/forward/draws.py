"""What draws read: sampling parameters, masks of grammars, and what changes logits."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(slots=True, frozen=True)
class DrawParams:
    """Sampling parameters; index i belongs to logits[i]. One number a row, except stop_ids."""

    position: Tensor  # [n] i64; index in prompt + output of the token to be drawn
    seed: Tensor  # [n] i64
    temperature: Tensor  # [n] f32; 0 = greedy
    top_k: Tensor  # [n] i64; 0 = off
    top_p: Tensor  # [n] f32; 1 = off
    min_p: Tensor  # [n] f32; 0 = off
    min_len: Tensor  # [n] i64
    stop_ids: Tensor  # [n, num_stops] i64; -1 = unused; not drawn at positions below min_len
    presence_penalty: Tensor  # [n] f32
    frequency_penalty: Tensor  # [n] f32
    repetition_penalty: Tensor  # [n] f32
    penalty_slot: Tensor  # [n] i64; line of the tables of `Changes`, 0 = neutral


class Masks(NamedTuple):
    """Which tokens the grammars of some rows allow."""

    words: Tensor  # [1 + number of masks, ceil(vocab / 32)] i32; bit v % 32 of word v // 32 set iff
    # token v is allowed; line 0 is no mask
    line: Tensor  # [n] i64; the row's line of `words`, 0 = all is allowed

    @classmethod
    def none(cls, num_rows: int, vocab_size: int) -> "Masks":
        """On the host: all is allowed in all rows."""
        words = torch.full((1, -(-vocab_size // 32)), -1, dtype=torch.int32)
        return cls(words, torch.zeros(num_rows, dtype=torch.int64))


@dataclass(slots=True, frozen=True)
class Changes:
    """What changes the logits of some rows before their draw."""

    counts: Tensor  # [1 + slots, vocab] i32; how often a token was drawn; line 0 is never read
    in_prompt: Tensor  # [1 + slots, vocab] bool
    bias: Tensor  # [1 + slots, vocab] f32
    biased: Tensor  # [1 + slots] bool; whether the slot has a bias
    masks: "Masks | None" = None
    # [n / width, width - 1] i64: the drafts of the windows, -1 = none; None: the width is 1.
    drafts: Tensor | None = None

    @property
    def width(self) -> int:
        """Rows of logits of one request."""
        return 1 if self.drafts is None else self.drafts.shape[1] + 1
