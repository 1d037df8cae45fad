"""What a DFlash drafter computes (DFlash, arXiv:2602.06036). Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from worker.model.families import Features
from worker.model.shape import LayerShape
from worker.ops.mask import KeyMask
from worker.ops.scaling import RopeScaling


@dataclass(frozen=True, slots=True)
class DFlashSpec(LayerShape):
    """A drafter that proposes a block of tokens in one pass. Sizes are the whole drafter's.

    A block is the last token that the target drew and mask tokens behind it. It attends to itself
    and, in every layer, to keys and values made of the target's hidden states at `taps`, of all
    tokens before the block.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    qk_norm: bool
    block_size: int  # tokens of a block as it was trained, the first of which is no draft
    masks: tuple[KeyMask, ...]  # which keys the rows of a block see, by layer
    # Row of the embedding that stands for what is not known; None: "mask_embedding" in `names`.
    mask_token_id: int | None
    vocab_size: int  # of the head
    target_vocab_size: int
    target_hidden_size: int
    taps: tuple[int, ...]  # "after layer k" of the target, from 0 on: the residual sum
    # Part -> name in the checkpoint, without ".weight": layers (behind it ".0" and so on), fc,
    # hidden_norm, final_norm; maybe mask_embedding, embedding, head, d2t, t2d. mask_embedding, d2t
    # and t2d are whole names of tensors. Without an embedding or a head of its own the drafter uses
    # the target's.
    names: Mapping[str, str]
    dtype: str  # of the checkpoint

    @property
    def features(self) -> Features:
        """Of its layers."""
        return Features(self.qkv_bias, self.output_bias, self.qk_norm)

    @property
    def num_features(self) -> int:
        """Hidden states of the target that one feature is made of."""
        return len(self.taps)
