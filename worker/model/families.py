"""The architectures that can be served, one row each: how they differ. Free of torch."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple


class NormNames(NamedTuple):
    """A layer's norms in the checkpoint; "": there is none."""

    attention_in: str = "input_layernorm"
    attention_out: str = ""
    feed_forward_in: str = "post_attention_layernorm"
    feed_forward_out: str = ""


class ExpertNames(NamedTuple):
    """A layer's experts in the checkpoint."""

    block: str  # what stands in the place of `mlp`
    gate: str
    up: str
    down: str


@dataclass(frozen=True, slots=True)
class Features:
    """What a model's layers are made of, beyond their sizes."""

    qkv_bias: bool = False
    output_bias: bool = False  # of the attention's output projection
    qk_norm: bool = False  # RMSNorm of each head's q and k, before rope
    attention: Literal["heads"] = "heads"
    experts: ExpertNames | None = None  # None: every feed-forward is dense
    output_gate: bool = False  # attention's output times the sigmoid of a projection
    centred: bool = False  # norms store their weight minus 1
    # Where gated delta nets stand beside attention: how their input projections are stored, each of
    # its own or interleaved by key head.
    delta: Literal["", "flat", "by_key_head"] = ""
    mlp_bias: bool = False  # of all projections of the feed-forward
    wide_qk_norm: bool = False  # RMSNorm of q whole, of all heads, and of k
    interleaved: bool = False  # rope turns pairs (2i, 2i + 1), not (i, i + rotary_dim/2)
    fused_qkv: bool = False  # q, k and v are one tensor of the checkpoint, qkv_proj
    fused_gate_up: bool = False  # gate_up_proj
    norms: NormNames = NormNames()  # noqa: RUF009 - immutable


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture."""

    models: str  # of it, for people
    layers: Features = Features()
    # Feature -> the flag of config.json that decides on it.
    flags: Mapping[str, str] = field(default_factory=dict[str, str])
    unless_said: tuple[str, ...] = ()  # flags that are true where config.json has none
    # Which part of a head is rotated where config.json is silent; None: always the whole.
    rotary: float | None = None
    has_still_layers: bool = False  # `no_rope_layers`
    scales: bool = False  # `embedding_multiplier` and the like
    # `sliding_window` alone makes one, if absent of so many tokens (0: none); None: it needs
    # `use_sliding_window`, or none is ever made.
    window: int | None = None
    # The text model of several: config.json has it in `text_config`, the checkpoint below `prefix`.
    nested: bool = False

    @property
    def prefix(self) -> str:
        """Of the layers' tensors."""
        return "model.language_model" if self.nested else "model"

    def features(self, true: Collection[str]) -> Features:
        """Those of a model of which these flags are true."""
        return replace(self.layers, **{name: flag in true for name, flag in self.flags.items()})


QKV = {"qkv_bias": "attention_bias"}
BIASES = QKV | {"output_bias": "attention_bias"}
ALL_BIASES = BIASES | {"mlp_bias": "mlp_bias"}
QK_NORM = Features(qk_norm=True)
HYBRID = replace(QK_NORM, output_gate=True, centred=True, delta="flat")
GLM = Features(interleaved=True, fused_gate_up=True)
GLM_BIAS = QKV, ("attention_bias",)
SANDWICH = NormNames(
    attention_out="post_self_attn_layernorm", feed_forward_out="post_mlp_layernorm"
)
MLP_EXPERTS = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")
MIXTRAL = ExpertNames("block_sparse_moe", "w1", "w3", "w2")
OUTER = NormNames("", "post_attention_layernorm", "", "post_feedforward_layernorm")
QWEN_3_5 = "Qwen3.5 (dense, text)"

# By `architectures[0]` of config.json.
FAMILIES: Mapping[str, Family] = {
    "Glm4ForCausalLM": Family("GLM-4-0414", replace(GLM, norms=SANDWICH), *GLM_BIAS, rotary=0.5),
    "GlmForCausalLM": Family("GLM-4-chat-hf", GLM, *GLM_BIAS, rotary=0.5),
    "GraniteForCausalLM": Family("Granite 3", flags=ALL_BIASES, scales=True),
    # `qk_norm` is a field of derived checkpoints.
    "LlamaForCausalLM": Family("Llama 2 and 3", flags=ALL_BIASES | {"qk_norm": "qk_norm"}),
    "MiMoForCausalLM": Family("MiMo-7B", Features(qkv_bias=True)),  # Qwen2's, and one that drafts
    "MinistralForCausalLM": Family("Ministral", window=4096),
    "MistralForCausalLM": Family("Mistral", window=4096),
    "MixtralForCausalLM": Family("Mixtral", Features(experts=MIXTRAL), window=0),
    "Olmo2ForCausalLM": Family("OLMo 2", Features(wide_qk_norm=True, norms=OUTER), BIASES),
    "Phi3ForCausalLM": Family(
        "Phi-3 and Phi-4", Features(fused_qkv=True, fused_gate_up=True), rotary=1.0, window=0
    ),
    "Qwen2ForCausalLM": Family("Qwen2.5", Features(qkv_bias=True)),  # config.json does not say so
    "Qwen3ForCausalLM": Family("Qwen3", QK_NORM, BIASES),
    "Qwen3MoeForCausalLM": Family("Qwen3 MoE", replace(QK_NORM, experts=MLP_EXPERTS), BIASES),
    "Qwen3NextForCausalLM": Family(
        "Qwen3-Next",
        replace(HYBRID, delta="by_key_head", experts=MLP_EXPERTS),
        BIASES,
        rotary=0.25,
    ),
    "Qwen3_5ForCausalLM": Family(QWEN_3_5, HYBRID, BIASES, rotary=0.25),
    "Qwen3_5ForConditionalGeneration": Family(QWEN_3_5, HYBRID, BIASES, rotary=0.25, nested=True),
    "SeedOssForCausalLM": Family(
        "Seed-OSS", Features(), ALL_BIASES | {"output_bias": "attention_out_bias"}, GLM_BIAS[1]
    ),
    "SmolLM3ForCausalLM": Family("SmolLM3", flags=ALL_BIASES, has_still_layers=True),
}


def served() -> str:
    """The models that can be served, for people."""
    *names, last = sorted({family.models for family in FAMILIES.values()}, key=str.lower)
    return f"{', '.join(names)} or {last}"
