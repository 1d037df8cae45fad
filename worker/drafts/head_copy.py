"""A head's copy in eight bits, for drafts alone: a draft reads half of the bytes.

A draft is accepted iff the target draws the same token, so answers stay the same whatever proposed
it (see base.py). How many drafts are accepted may fall, where the best two tokens are that close.
"""

from worker.config.checkpoint.quantization import SCALE_BLOCK, Quantization
from worker.model.layers import VocabParallelEmbedding
from worker.model.placement import Placement
from worker.weights.base import Parts
from worker.weights.eight_bits import EightBitMatrix, EightBits
from worker.weights.scaled_files import SCALES
from worker.weights.shard import VALUES, all_of

AT_ONCE = 64 * SCALE_BLOCK  # rows that are f32 at a time, while the copy is made


def head_copy(head: VocabParallelEmbedding, placement: Placement) -> EightBitMatrix:
    """Of this rank's rows of a head that is filled; scales are of blocks of these rows."""
    whole, kept = head.weight, EightBits(Quantization("e4m3", SCALE_BLOCK))
    rows, columns = map(all_of, whole.shape)
    made = EightBitMatrix(kept, Parts({"": rows}, columns), placement.empty)
    grain = len(whole) // len(made.scales)
    for start in range(0, len(whole), AT_ONCE):
        part = whole[start : start + AT_ONCE]
        scales = made.scales[start // grain :][: len(part) // grain]
        drawn = kept.drawn(part.float(), {SCALES: tuple(scales.shape)})
        made.values[start:][: len(part)] = drawn[VALUES]
        scales.copy_(drawn[SCALES])
    made.settle()
    return made
