"""The architectures that can be served, one row each: how they differ. Free of torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Features:
    """What a model's layers are made of, beyond their sizes."""

    qkv_bias: bool = False
    output_bias: bool = False  # of the attention's output projection
    qk_norm: bool = False  # RMSNorm of each head's q and k, before rope
    attention: Literal["heads"] = "heads"
    feed_forward: Literal["dense"] = "dense"
    output_gate: bool = False  # attention's output times the sigmoid of a projection
    centred: bool = False  # norms store their weight minus 1
    # Where gated delta nets stand beside attention: how their input projections are stored, each of
    # its own or interleaved by key head.
    delta: Literal["", "flat", "by_key_head"] = ""


@dataclass(frozen=True, slots=True)
class Family:
    """Features of an architecture; None: as a flag of config.json says."""

    qkv_bias: bool | None = False  # attention_bias
    output_bias: bool | None = False  # attention_bias
    qk_norm: bool | None = False  # qk_norm
    delta: Literal["", "flat", "by_key_head"] = ""
    # The text model of several: config.json has it in `text_config`, the checkpoint below `prefix`.
    nested: bool = False

    @property
    def prefix(self) -> str:
        """Of the layers' tensors."""
        return "model.language_model" if self.nested else "model"

    def features(self, *, attention_bias: bool, qk_norm: bool) -> Features:
        """Those of a model with these flags."""
        return Features(
            attention_bias if self.qkv_bias is None else self.qkv_bias,
            attention_bias if self.output_bias is None else self.output_bias,
            qk_norm if self.qk_norm is None else self.qk_norm,
            output_gate=bool(self.delta),
            centred=bool(self.delta),
            delta=self.delta,
        )


# By `architectures[0]` of config.json.
FAMILIES: Mapping[str, Family] = {
    # Llama 2, 3.x and the models of that name; `qk_norm` is a field of derived checkpoints.
    "LlamaForCausalLM": Family(qkv_bias=None, output_bias=None, qk_norm=None),
    "MiMoForCausalLM": Family(qkv_bias=True),  # Qwen2's, and a layer that drafts
    "Qwen2ForCausalLM": Family(qkv_bias=True),  # config.json does not say so
    "Qwen3ForCausalLM": Family(qkv_bias=None, output_bias=None, qk_norm=True),
    "Qwen3NextForCausalLM": Family(
        qkv_bias=None, output_bias=None, qk_norm=True, delta="by_key_head"
    ),
    "Qwen3_5ForCausalLM": Family(qkv_bias=None, output_bias=None, qk_norm=True, delta="flat"),
    "Qwen3_5ForConditionalGeneration": Family(
        qkv_bias=None, output_bias=None, qk_norm=True, delta="flat", nested=True
    ),
}
