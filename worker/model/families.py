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


@dataclass(frozen=True, slots=True)
class Family:
    """Features of an architecture; None: as a flag of config.json says."""

    qkv_bias: bool | None = False  # attention_bias
    output_bias: bool | None = False  # attention_bias
    qk_norm: bool | None = False  # qk_norm

    def features(self, *, attention_bias: bool, qk_norm: bool) -> Features:
        """Those of a model with these flags."""
        return Features(
            attention_bias if self.qkv_bias is None else self.qkv_bias,
            attention_bias if self.output_bias is None else self.output_bias,
            qk_norm if self.qk_norm is None else self.qk_norm,
        )


# By `architectures[0]` of config.json.
FAMILIES: Mapping[str, Family] = {
    # Llama 2, 3.x and the models of that name; `qk_norm` is a field of derived checkpoints.
    "LlamaForCausalLM": Family(qkv_bias=None, output_bias=None, qk_norm=None),
    "MiMoForCausalLM": Family(qkv_bias=True),  # Qwen2's, and a layer that drafts
    "Qwen2ForCausalLM": Family(qkv_bias=True),  # config.json does not say so
    "Qwen3ForCausalLM": Family(qkv_bias=None, output_bias=None, qk_norm=True),
}
