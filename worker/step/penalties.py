"""PenaltyTables: what penalties and logit biases need of the rows that have some."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from worker.forward.draws import Changes, Masks
from worker.plan import RowStart


class PenaltyTables:
    """Tables over the vocabulary for penalties and logit bias, by penalty slot.

    Slot 0 is neutral: rows without penalties use it, and add to counts that are never read.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        shape = num_slots + 1, vocab_size
        self.in_prompt = torch.zeros(shape, dtype=torch.bool, device=device)
        self.counts = torch.zeros(shape, dtype=torch.int32, device=device)  # of output tokens
        self.bias = torch.zeros(shape, dtype=torch.float32, device=device)
        self.biased = torch.zeros(num_slots + 1, dtype=torch.bool, device=device)

    def changes(self, masks: Masks | None = None, drafts: Tensor | None = None) -> Changes:
        """The record that draws read: these tables, with `masks` and `drafts` (see `Changes`)."""
        return Changes(self.counts, self.in_prompt, self.bias, self.biased, masks, drafts)

    def fill(self, start: RowStart, upload: Callable[[Sequence[Any], torch.dtype], Tensor]) -> None:
        """Fill the slot of a request that starts, from its prompt and output."""
        slot, biases = start.penalty_slot, start.sampling.logit_bias
        for table in (self.in_prompt, self.counts, self.bias):
            table[slot].zero_()
        self.biased[slot].fill_(bool(biases))
        if start.prompt:
            self.in_prompt[slot].index_fill_(0, upload(start.prompt, torch.int64), True)
        if drawn := Counter(start.output):
            ids = upload(list(drawn), torch.int64)
            self.counts[slot].index_copy_(0, ids, upload(list(drawn.values()), torch.int32))
        if biases:
            ids, values = zip(*biases, strict=True)
            self.bias[slot].index_copy_(0, upload(ids, torch.int64), upload(values, torch.float32))
