"""A head's copy in eight bits, for drafts alone: each draft reads half of the bytes.

A draft is accepted iff the target draws the same token, so answers stay the same whatever proposed
it (see base.py). How many drafts are accepted may fall, where the best two tokens are that close.
"""

from torch import Tensor, nn

from worker.config.checkpoint.quantization import SCALE_BLOCK, Quantization
from worker.model.layers import VocabParallelEmbedding
from worker.model.placement import Placement
from worker.weights.base import Parts
from worker.weights.eight_bits import EightBitMatrix, EightBits
from worker.weights.scaled_files import SCALES
from worker.weights.shard import VALUES, all_of

AT_ONCE = 64 * SCALE_BLOCK  # rows that are f32 at a time, while the copy is made


class EightBitHead(nn.Module):
    """Of this rank's rows of a head that is filled; scales are of blocks of these rows."""

    def __init__(self, head: VocabParallelEmbedding, placement: Placement) -> None:
        super().__init__()
        self._head, self._kept = head, EightBits(Quantization("e4m3", SCALE_BLOCK))
        rows, columns = map(all_of, head.weight.shape)
        self.matrix = EightBitMatrix(self._kept, Parts({"": rows}, columns), placement.empty)
        self._fill(head.weight)

    def _fill(self, whole: Tensor) -> None:
        grain = len(whole) // len(self.matrix.scales)
        for start in range(0, len(whole), AT_ONCE):
            part = whole[start : start + AT_ONCE]
            scales = self.matrix.scales[start // grain :][: len(part) // grain]
            drawn = self._kept.drawn(part.float(), {SCALES: tuple(scales.shape)})
            self.matrix.values[start:][: len(part)] = drawn[VALUES]
            scales.copy_(drawn[SCALES])

    def logits(self, hidden: Tensor, *, whole: bool = True) -> Tensor:
        """As those of the head."""
        return self._head.finished(self.matrix.product(hidden), whole=whole)

    @property
    def nbytes(self) -> int:
        """Of the copy on this rank's device."""
        return sum(each.nbytes for each in self.matrix.parameters())
