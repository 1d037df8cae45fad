"""Token embedding and output head, the vocabulary divided among ranks."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worker.model.shard import Part, Shard, all_of, stacked
from worker.model.weights import Placement
from worker.ops.best_pairs import ALIGNMENT, VocabPart
from worker.ops.product import product
from worker.peers.base import Collective


class VocabParallelEmbedding(nn.Module):
    """Each rank holds as many rows, whole ALIGNMENTs of them; surplus rows of the last are zero.

    A small vocabulary may leave ranks without any.
    """

    def __init__(self, vocab_size: int, hidden_size: int, placement: Placement) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self._collective = collective = placement.collective
        rows = -(-vocab_size // collective.size)
        if collective.size > 1:
            rows = -(-rows // ALIGNMENT) * ALIGNMENT
        self.start = min(collective.rank * rows, vocab_size)
        self.stop = min(self.start + rows, vocab_size)
        self.weight = placement.empty(rows, hidden_size)
        self.weight.zero_()
        # Of which ids logits are, as long as they are not gathered; None: of all.
        self.part: VocabPart | None = None
        if collective.size > 1:
            self.part = VocabPart(collective.rank * rows, vocab_size, partial(_gather, collective))

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids: [num_tokens] i64 -> [num_tokens, hidden_size], equal on all ranks.

        Of several ranks it lies in a Collective.buffer.
        """
        if self._collective.size == 1:
            return F.embedding(input_ids, self.weight)
        elsewhere = (input_ids < self.start) | (input_ids >= self.stop)
        rows = (input_ids - self.start).masked_fill(elsewhere, 0)
        shape = len(input_ids), self.weight.shape[1]
        part = self._collective.buffer(shape, self.weight.dtype)
        torch.index_select(self.weight, 0, rows, out=part)
        return self._collective.all_reduce(part.masked_fill_(elsewhere.unsqueeze(-1), 0.0))

    def logits(self, hidden: Tensor, *, whole: bool = True) -> Tensor:
        """hidden: [n, hidden_size] -> [n, vocab_size]: products with every token's row.

        whole: gathered from all ranks; else [n, ids of `part`].
        """
        part = product(hidden, self.weight)
        if not whole:
            return part[:, : self.stop - self.start]
        return self._collective.all_gather(part, dim=-1)[:, : self.vocab_size]

    def shards(self, prefix: str) -> dict[str, Shard]:
        """Checkpoint name -> Shard, for every tensor that this layer holds."""
        rows = Part(self.vocab_size, slice(self.start, self.stop))
        return stacked(self.weight, {f"{prefix}.weight": rows}, all_of(self.weight.shape[1]))


def _gather(collective: Collective, pairs: Tensor) -> Tensor:
    return collective.all_gather(pairs, dim=0).view(collective.size, -1)
