"""Token embedding and output head, the vocabulary divided among ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worker.comm.base import Collective
from worker.kernels.gemm.product import product
from worker.layers.linear import empty_parameter
from worker.layers.shard import Shard


class VocabParallelEmbedding(nn.Module):
    """Each rank holds ceil(vocab_size / ranks) rows; the last rank's surplus rows are zero."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        collective: Collective,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self._collective = collective
        rows = -(-vocab_size // collective.size)
        self.start = min(collective.rank * rows, vocab_size)
        self.stop = min(self.start + rows, vocab_size)
        self.weight = empty_parameter(rows, hidden_size, dtype=dtype, device=device)
        self.weight.zero_()

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids: [num_tokens] i64 -> [num_tokens, hidden_size], equal on all ranks."""
        if self._collective.size == 1:
            return F.embedding(input_ids, self.weight)
        elsewhere = (input_ids < self.start) | (input_ids >= self.stop)
        rows = (input_ids - self.start).masked_fill(elsewhere, 0)
        part = F.embedding(rows, self.weight).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return self._collective.all_reduce(part)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [n, hidden_size] -> [n, vocab_size]: products with every token's row."""
        part = product(hidden, self.weight)
        whole = self._collective.all_gather(part, dim=-1)
        return whole[:, : self.vocab_size]

    def shards(self, prefix: str) -> dict[str, Shard]:
        """Checkpoint name -> Shard, for every tensor that this layer holds."""
        hidden_size = self.weight.shape[1]
        return {
            f"{prefix}.weight": Shard(
                self.weight[: self.stop - self.start],
                (self.vocab_size, hidden_size),
                (slice(self.start, self.stop), slice(0, hidden_size)),
            )
        }
