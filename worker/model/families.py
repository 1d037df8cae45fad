"""The architectures that can be served, one row each: how they differ. Free of torch."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

DeltaLayout: TypeAlias = Literal["", "flat", "by_key_head"]


class NormNames(NamedTuple):
    """A layer's norms in the checkpoint; "": there is none."""

    attention_in: str = "input_layernorm"
    attention_out: str = ""
    feed_forward_in: str = "post_attention_layernorm"
    feed_forward_out: str = ""


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
    delta: DeltaLayout = ""
    mlp_bias: bool = False  # of all projections of the feed-forward
    wide_qk_norm: bool = False  # RMSNorm of q whole, of all heads, and of k
    interleaved: bool = False  # rope turns pairs (2i, 2i + 1), not (i, i + rotary_dim/2)
    fused_qkv: bool = False  # q, k and v are one tensor of the checkpoint, qkv_proj
    fused_gate_up: bool = False  # gate_up_proj
    norms: NormNames = NormNames()  # noqa: RUF009 - immutable


@dataclass(frozen=True, slots=True)
class Family:
    """Features of an architecture; a text: as this flag of config.json says."""

    models: str  # of it, for people
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    qk_norm: bool | str = False
    mlp_bias: bool | str = False
    wide_qk_norm: bool = False
    delta: DeltaLayout = ""
    fused_qkv: bool = False
    fused_gate_up: bool = False
    norms: NormNames = NormNames()  # noqa: RUF009 - immutable
    # Which part of a head is rotated where config.json is silent; None: always the whole.
    rotary: float | None = None
    interleaved: bool = False
    has_still_layers: bool = False  # `no_rope_layers`
    scales: bool = False  # `embedding_multiplier` and the like
    # `sliding_window` alone makes one, if absent of so many tokens (0: none); None: it needs
    # `use_sliding_window`, or none is ever made.
    window: int | None = None
    unless_said: tuple[str, ...] = ()  # flags that are true where config.json has none
    # The text model of several: config.json has it in `text_config`, the checkpoint below `prefix`.
    nested: bool = False

    @property
    def prefix(self) -> str:
        """Of the layers' tensors."""
        return "model.language_model" if self.nested else "model"

    @property
    def flags(self) -> tuple[str, ...]:
        """Fields of config.json that decide on features."""
        asked = self.qkv_bias, self.output_bias, self.qk_norm, self.mlp_bias
        return tuple(sorted({each for each in asked if isinstance(each, str)}))

    def features(self, flags: Collection[str]) -> Features:
        """Those of a model of which these flags are true."""

        def has(feature: bool | str) -> bool:
            return feature in flags if isinstance(feature, str) else feature

        return Features(
            has(self.qkv_bias),
            has(self.output_bias),
            has(self.qk_norm),
            output_gate=bool(self.delta),
            centred=bool(self.delta),
            delta=self.delta,
            mlp_bias=has(self.mlp_bias),
            wide_qk_norm=self.wide_qk_norm,
            interleaved=self.interleaved,
            fused_qkv=self.fused_qkv,
            fused_gate_up=self.fused_gate_up,
            norms=self.norms,
        )


ANY, MLP, QWEN_3_5 = "attention_bias", "mlp_bias", "Qwen3.5 (dense, text)"
HYBRID: dict[str, Any] = {"qkv_bias": ANY, "output_bias": ANY, "qk_norm": True, "rotary": 0.25}
SANDWICH = NormNames(
    attention_out="post_self_attn_layernorm", feed_forward_out="post_mlp_layernorm"
)
OUTER = NormNames("", "post_attention_layernorm", "", "post_feedforward_layernorm")

BIASES: dict[str, Any] = {"qkv_bias": ANY, "output_bias": ANY}
GLM: dict[str, Any] = {
    "qkv_bias": ANY, "unless_said": (ANY,), "fused_gate_up": True, "rotary": 0.5,
    "interleaved": True,
}  # fmt: skip
# By `architectures[0]` of config.json.
FAMILIES: Mapping[str, Family] = {
    "Glm4ForCausalLM": Family("GLM-4-0414", **GLM, norms=SANDWICH),
    "GlmForCausalLM": Family("GLM-4-chat-hf", **GLM),
    "GraniteForCausalLM": Family("Granite 3", **BIASES, mlp_bias=MLP, scales=True),
    # `qk_norm` is a field of derived checkpoints.
    "LlamaForCausalLM": Family("Llama 2 and 3", **BIASES, qk_norm="qk_norm", mlp_bias=MLP),
    "MiMoForCausalLM": Family("MiMo-7B", qkv_bias=True),  # Qwen2's, and a layer that drafts
    "MinistralForCausalLM": Family("Ministral", window=4096),
    "MistralForCausalLM": Family("Mistral", window=4096),
    "Olmo2ForCausalLM": Family("OLMo 2", **BIASES, wide_qk_norm=True, norms=OUTER),
    "Phi3ForCausalLM": Family(
        "Phi-3 and Phi-4", fused_qkv=True, fused_gate_up=True, rotary=1.0, window=0
    ),
    "Qwen2ForCausalLM": Family("Qwen2.5", qkv_bias=True),  # config.json does not say so
    "Qwen3ForCausalLM": Family("Qwen3", **BIASES, qk_norm=True),
    "Qwen3NextForCausalLM": Family("Qwen3-Next (dense)", **HYBRID, delta="by_key_head"),
    "Qwen3_5ForCausalLM": Family(QWEN_3_5, **HYBRID, delta="flat"),
    "Qwen3_5ForConditionalGeneration": Family(QWEN_3_5, **HYBRID, delta="flat", nested=True),
    "SeedOssForCausalLM": Family(
        "Seed-OSS",
        qkv_bias=ANY,
        output_bias="attention_out_bias",
        mlp_bias=MLP,
        unless_said=(ANY,),
    ),
    "SmolLM3ForCausalLM": Family("SmolLM3", **BIASES, mlp_bias=MLP, has_still_layers=True),
}


def served() -> str:
    """The models that can be served, for people."""
    *names, last = sorted({family.models for family in FAMILIES.values()}, key=str.lower)
    return f"{', '.join(names)} or {last}"
