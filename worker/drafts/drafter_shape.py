"""What drafters with weights compute. Free of torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from worker.config.checkpoint.families import FAMILIES, Features
from worker.config.checkpoint.mask import KeyMask
from worker.config.checkpoint.shape import Layer, LayerShape

ChainKind: TypeAlias = Literal["eagle3", "eagle", "mtp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterShape(LayerShape):
    """What both kinds of drafters say of themselves. Sizes are the whole drafter's."""

    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    qk_norm: bool
    output_gate: bool = False
    centred: bool = False  # norms store their weight minus 1
    target_vocab_size: int
    target_hidden_size: int
    # k: the residual sum after layer k of the target, from 0 on. The target's num_layers as k: the
    # output after the final norm.
    taps: tuple[int, ...]
    # Part -> name in the checkpoint, without ".weight" (mask_embedding, d2t and t2d: the tensor's
    # whole name). A part that is not here does not exist; without an embedding or a head of its own
    # the drafter uses the target's.
    names: Mapping[str, str]

    @property
    def features(self) -> Features:
        """What the layers are made of."""
        return Features(
            self.qkv_bias,
            self.output_bias,
            self.qk_norm,
            attention="heads" if self.latent is None else "latent",
            experts=FAMILIES[self.architecture].layers.experts if self.experts else None,
            output_gate=self.output_gate,
            centred=self.centred,
        )

    @property
    def num_features(self) -> int:
        """How many hidden states of the target one feature is made of."""
        return len(self.taps)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainShape(DrafterShape):
    """A drafter of one layer that drafts token by token.

    For tokens that the target has verified, the feature g is made of the target's hidden states at
    `taps`; for drafted ones it is what the drafter's own row before returned.
    """

    form: ChainKind
    projection_bias: bool  # of the projection from token and feature, where there is one
    norm_before_residual: bool  # EAGLE-3: the first residual is the normed feature
    norm_output: bool  # what is fed back is what the head takes: the output after the last norm
    hidden_first: bool  # of the pair that is projected: the feature stands before the token

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The one."""
        return (Layer(self.features.attention, is_sparse=self.experts is not None),)

    @property
    def in_features(self) -> int:
        """Token and feature, unless a projection has made one of them."""
        return self.hidden_size * (1 if "projection" in self.names else 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashShape(DrafterShape):
    """A drafter that proposes a block of tokens in one pass (DFlash, arXiv:2602.06036)."""

    num_layers: int
    block_size: int  # tokens of a block as it was trained, the first of which is no draft
    masks: tuple[KeyMask, ...]  # which keys the rows of a block see, by layer
    # Id of the mask token; None: the drafter has a "mask_embedding" of its own, see `names`.
    mask_token_id: int | None

    @property
    def layers(self) -> tuple[Layer, ...]:
        """In their order."""
        return tuple(Layer(self.features.attention, i) for i in range(self.num_layers))
