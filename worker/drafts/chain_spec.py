"""What a chain drafter computes, and what its published forms write alike. Free of torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from worker.drafts.chain_fields import FIXED, ROPE
from worker.model.families import Features
from worker.model.fields import Fields
from worker.model.files import tensor_names
from worker.model.shape import (
    LayerShape,
    ModelSpec,
    read_dtype,
    read_heads,
    read_rope,
    refuse_what_we_cannot_compute,
)
from worker.ops.scaling import RopeScaling

Form = Literal["eagle3", "eagle", "mtp"]


@dataclass(frozen=True, slots=True)
class ChainSpec(LayerShape):
    """A drafter of one layer that drafts token by token. Sizes are the whole drafter's.

    Row t is made of token t and the feature g of token t - 1. For tokens that the target has
    verified, g comes of the target's hidden states at `taps`; for drafted ones it is what the
    drafter's own row before returned.
    """

    architecture: str
    form: Form
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
    projection_bias: bool  # of the projection from token and feature, where there is one
    vocab_size: int  # of the head
    target_vocab_size: int
    target_hidden_size: int
    # "After layer k" of the target, from 0 on: the residual sum. Its number of layers means the
    # output after the final norm.
    taps: tuple[int, ...]
    norm_before_residual: bool  # EAGLE-3: the first residual is the normed feature
    norm_output: bool  # what is fed back is what the head takes: the output after the last norm
    hidden_first: bool  # of the pair that is projected: the feature stands before the token
    # Part -> name in the checkpoint, without ".weight". A part that is not here does not exist;
    # without an embedding or a head of its own the drafter uses the target's.
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

    @property
    def fc_norm(self) -> bool:
        """Is each hidden state normed before they are fused?"""
        return "fc_norm" in self.names

    @property
    def norm_before_fc(self) -> bool:
        """Are all hidden states normed together before they are fused?"""
        return "input_norm" in self.names


class Names:
    """Where parts stand in a directory's weight files, which dummies have none of."""

    def __init__(self, path: Path) -> None:
        self._tensors = tensor_names(path)

    def place(self, *options: str) -> str:
        """The option that tensors are called by, maybe behind "model."; else the first."""
        for option in options:
            for name in (option, f"model.{option}"):
                if any(each == name or each.startswith(f"{name}.") for each in self._tensors):
                    return name
        return options[0]

    def optional(self, part: str, *options: str, needed: bool) -> dict[str, str]:
        """{part: where it stands}, or {} if the files lack it and it is not needed."""
        place = self.place(*options)
        held = any(each in (place, f"{place}.weight") for each in self._tensors)
        return {part: place} if held or needed else {}


def layer_names(layer: str) -> dict[str, str]:
    """Names of the parts that every form's layer has, behind the layer's own name."""
    return {
        "attention": f"{layer}.self_attn",
        "post_norm": f"{layer}.post_attention_layernorm",
        "feed_forward": f"{layer}.mlp",
    }


def check_pairing(
    fields: Fields, target: ModelSpec, hidden: Fields, hidden_field: str = "hidden_size"
) -> None:
    """Refuse a drafter of another target. `hidden` holds the target's size in `hidden_field`."""
    for where, field, wanted in (
        (fields, "vocab_size", target.vocab_size),
        (hidden, hidden_field, target.hidden_size),
    ):
        if (found := where.integer(field)) != wanted:
            raise where.error(
                field, f"{found}, but the target's is {wanted}: the drafter is another target's"
            )


def check_taps(where: Fields, field: str, taps: Sequence[int], num_layers: int) -> None:
    """Refuse outputs of layers that a target of `num_layers` lacks, or in another order."""
    if any(each < 0 or each >= num_layers for each in taps):
        raise where.unsupported(
            field, f"outputs of the layers {list(taps)}; the target's are 0 to {num_layers - 1}"
        )
    if list(taps) != sorted(set(taps)):
        raise where.unsupported(field, f"must be ascending, each layer once, not {list(taps)}")


def check_tied(fields: Fields, target: ModelSpec, names: Collection[str]) -> None:
    """Refuse a head tied to the drafter's embedding unless both are the target's, and tied there.

    names: the parts that the drafter has.
    """
    own = {"head", "embedding"} & set(names)
    if fields.flag("tie_word_embeddings") and (own or not target.tie_word_embeddings):
        raise fields.unsupported(
            "tie_word_embeddings",
            "a head that is the drafter's embedding; leave the field false, and of lm_head and "
            "embed_tokens what the drafter has of its own",
        )


def read_vocab_size(fields: Fields, target: ModelSpec) -> int:
    """The head's number of ids: `draft_vocab_size`, by default the target's."""
    vocab_size = fields.integer("draft_vocab_size", default=target.vocab_size)
    if vocab_size > target.vocab_size:
        raise fields.error(
            "draft_vocab_size", f"{vocab_size} exceeds the target's vocabulary, {target.vocab_size}"
        )
    return vocab_size


def read_geometry(
    fields: Fields,
    *,
    num_layers: int | None = 1,
    windows: bool = False,
    fixed: Mapping[str, Any] = FIXED,
) -> dict[str, Any]:
    """The fields of a drafter's spec that all forms write alike.

    Args:
        num_layers: the only number that is supported; None: any.
        windows: sliding windows are for the caller to read; else they are refused.
        fixed: the only values of others.
    """
    refuse_what_we_cannot_compute(fields, windows=windows)
    fields.fixed(fixed)
    if (number := fields.integer("num_hidden_layers")) != num_layers and num_layers is not None:
        raise fields.unsupported("num_hidden_layers", f"{number}; supported: {num_layers}")
    slides = fields.get("sliding_window") is not None
    if slides and not windows and fields.get("use_sliding_window") is not False:
        raise fields.unsupported("sliding_window", "sliding-window attention")
    for name in ("rope_scaling", "rope_parameters"):
        fields.inner(name).only(ROPE)
    if fields.inner("rope_scaling").values and fields.inner("rope_parameters").values:
        raise fields.error("rope_scaling", "excludes rope_parameters, but there are both")
    theta = fields.inner("rope_parameters").get("rope_theta")
    if theta is not None and fields.get("rope_theta") not in (None, theta):
        raise fields.error("rope_theta", f"differs from rope_parameters.rope_theta, {theta}")
    num_heads, num_kv_heads, head_dim = read_heads(fields)
    rope_theta, rope_scaling = read_rope(fields)
    return {
        "hidden_size": fields.integer("hidden_size"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": fields.integer("intermediate_size"),
        "rms_norm_eps": fields.number("rms_norm_eps", default=1e-6),
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "dtype": read_dtype(fields),
    }
