"""The architectures that can be served, one row each: how they differ. Free of torch."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple


class NormNames(NamedTuple):
    """A layer's norms in the checkpoint; "": there is none."""

    attention_in: str = "input_layernorm"
    attention_out: str = ""
    feed_forward_in: str = "post_attention_layernorm"
    feed_forward_out: str = ""


class ExpertNames(NamedTuple):
    """A layer's experts in the checkpoint, and what its config.json does not say of them."""

    block: str  # what stands in the place of `mlp`
    gate: str
    up: str
    down: str
    shared: str = ""  # the expert that every token has; "": there is none
    shared_gate: str = ""  # whose sigmoid it is multiplied by; "": it is not
    scoring: str = "softmax"  # of the router; see ExpertShape
    bias: str = ""  # a tensor: of the router's choice; "": there is none
    router: str = "gate"
    # The router's logits and all products have biases, and in one tensor of all experts rows of
    # gates and ups take turns; see weights.stacks.
    paired: bool = False
    plus: float = 0.0  # is added to up; see ExpertShape


@dataclass(frozen=True, slots=True)
class Features:
    """What a model's layers are made of, beyond their sizes.

    The modules of worker/model read them, and name their tensors (`shards`).
    """

    qkv_bias: bool = False
    output_bias: bool = False  # of the attention's output projection
    qk_norm: bool = False  # RMSNorm of each head's q and k, before rope
    attention: Literal["heads", "latent"] = "heads"  # the kind of its layers with keys
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
    layer_norm: Literal["", "plain", "biased"] = ""  # LayerNorms stand where others have RMSNorm
    head_norm: bool = False  # LayerNorm of each head of q and k, each with weights of its own
    parallel: bool = False  # the feed-forward takes what attention takes, and their sum is added
    activation: Literal["silu", "gelu_pytorch_tanh", "relu2"] = "silu"
    gated: bool = True  # the feed-forward is down(act(gate(x)) · up(x)); else down(act(up(x)))
    root_scale: bool = False  # embedded tokens times √hidden_size, rounded to their dtype
    sinks: bool = False  # a logit of each head that takes weight, but has no value: `sinks`
    f32_norms: bool = False  # norms multiply by their weight in f32


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture."""

    models: str  # of it, for people
    layers: Features = Features()
    # Feature -> the flag of config.json that decides on it.
    flags: Mapping[str, str] = field(default_factory=dict[str, str])
    # Which part of a head is rotated where config.json is silent; None: always the whole.
    rotary: float | None = None
    # Layers without rope: those that `no_rope_layers` names, or all without a window.
    still: Literal["", "listed", "global"] = ""
    # Whose fields say what is multiplied.
    scales: Literal["", "granite", "gemma2", "gemma3", "cohere"] = ""
    # Layers with a window of `sliding_window` tokens where `layer_types` is absent: "flag": as
    # `use_sliding_window` and `max_window_layers` say, n: all but each nth.
    windows: Literal["", "flag", "all"] | int = ""
    local_theta: str = ""  # the field of rope's base in layers with a window; "": as in all others
    eps: str = "rms_norm_eps"
    nested: bool = False  # the text model of several: config.json has it in `text_config`
    prefix: str = "model"  # of the layers' tensors

    def features(self, true: Collection[str]) -> Features:
        """Those of a model of which these flags are true."""
        return replace(self.layers, **{name: flag in true for name, flag in self.flags.items()})

    def within(self, prefix: str) -> "Family":
        """The same as the text model of several."""
        return replace(self, nested=True, prefix=prefix)


QKV = {"qkv_bias": "attention_bias"}
BIASES = QKV | {"output_bias": "attention_bias"}
ALL_BIASES = BIASES | {"mlp_bias": "mlp_bias"}
QK_NORM = Features(qk_norm=True)
HYBRID = replace(QK_NORM, output_gate=True, centred=True, delta="flat")
GLM = Features(interleaved=True, fused_gate_up=True)
SANDWICH = NormNames(
    attention_out="post_self_attn_layernorm", feed_forward_out="post_mlp_layernorm"
)
MLP_EXPERTS = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")
SHARED_EXPERT = MLP_EXPERTS._replace(shared="shared_expert", shared_gate="shared_expert_gate")
DEEPSEEK = MLP_EXPERTS._replace(shared="shared_experts")
BIASED = DEEPSEEK._replace(scoring="sigmoid", bias="gate.e_score_correction_bias")
LATENT = Features(attention="latent", experts=BIASED)
MIXTRAL = ExpertNames("block_sparse_moe", "w1", "w3", "w2")
OUTER = NormNames("", "post_attention_layernorm", "", "post_feedforward_layernorm")
QWEN_3_5 = Family("Qwen3.5 (dense, text)", HYBRID, BIASES, rotary=0.25)
QWEN_3_5_MOE = Family(
    "Qwen3.5 MoE (text)", replace(HYBRID, experts=SHARED_EXPERT), BIASES, rotary=0.25
)  # fmt: skip
COMMAND_R: dict[str, Any] = {"scales": "cohere", "eps": "layer_norm_eps"}
COHERE = Features(
    interleaved=True, layer_norm="plain", parallel=True,
    norms=NormNames(feed_forward_in=""),
)  # fmt: skip
GEMMA = Features(
    centred=True, activation="gelu_pytorch_tanh", root_scale=True,
    norms=NormNames(
        attention_out="post_attention_layernorm", feed_forward_in="pre_feedforward_layernorm",
        feed_forward_out="post_feedforward_layernorm",
    ),
)  # fmt: skip
GEMMA_3 = Family(
    "Gemma 3 (text)", replace(GEMMA, qk_norm=True), BIASES,
    scales="gemma3", windows=6, local_theta="rope_local_base_freq",
)  # fmt: skip
OSS = MLP_EXPERTS._replace(router="router", bias="router.bias", paired=True, plus=1.0)

# By `architectures[0]` of config.json.
FAMILIES: Mapping[str, Family] = {
    "Cohere2ForCausalLM": Family(
        "Command-R7B and A", COHERE, BIASES, still="global", windows=4, **COMMAND_R
    ),
    "CohereForCausalLM": Family(
        "Command-R", COHERE, BIASES | {"head_norm": "use_qk_norm"}, **COMMAND_R
    ),
    "DeepseekV2ForCausalLM": Family("DeepSeek-V2", replace(LATENT, experts=DEEPSEEK)),
    "DeepseekV3ForCausalLM": Family("DeepSeek-V3, R1 and Kimi-K2", LATENT),
    "Exaone4ForCausalLM": Family(
        "EXAONE 4", Features(qk_norm=True, norms=OUTER), still="global", windows=4
    ),
    "Gemma2ForCausalLM": Family("Gemma 2", GEMMA, BIASES, scales="gemma2", windows=2),
    "Gemma3ForCausalLM": GEMMA_3,
    "Gemma3ForConditionalGeneration": GEMMA_3.within("language_model.model"),
    "Glm4ForCausalLM": Family("GLM-4-0414", replace(GLM, norms=SANDWICH), QKV, rotary=0.5),
    "Glm4MoeLiteForCausalLM": Family("GLM-4.7-Flash", LATENT),
    "GlmForCausalLM": Family("GLM-4-chat-hf", GLM, QKV, rotary=0.5),
    "GptOssForCausalLM": Family(
        "gpt-oss", Features(sinks=True, f32_norms=True, experts=OSS), BIASES, windows=2
    ),
    "GraniteForCausalLM": Family("Granite 3", flags=ALL_BIASES, scales="granite"),
    # `qk_norm` is a field of derived checkpoints.
    "LlamaForCausalLM": Family("Llama 2 and 3", flags=ALL_BIASES | {"qk_norm": "qk_norm"}),
    # Qwen2's layers, and one that drafts.
    "MiMoForCausalLM": Family("MiMo-7B", Features(qkv_bias=True), windows="flag"),
    "MinistralForCausalLM": Family("Ministral", windows="all"),
    "MistralForCausalLM": Family("Mistral", windows="all"),
    "MixtralForCausalLM": Family("Mixtral", Features(experts=MIXTRAL), windows="all"),
    "NemotronForCausalLM": Family(
        "Nemotron (dense)",
        Features(layer_norm="biased", centred=True, activation="relu2", gated=False),
        ALL_BIASES,
        rotary=0.5,
        eps="norm_eps",
    ),
    "Olmo2ForCausalLM": Family("OLMo 2", Features(wide_qk_norm=True, norms=OUTER), BIASES),
    "Olmo3ForCausalLM": Family(
        "OLMo 3",
        Features(wide_qk_norm=True, norms=OUTER),
        BIASES,
        windows=4,
        local_theta="rope_theta",
    ),
    "Phi3ForCausalLM": Family(
        "Phi-3 and Phi-4", Features(fused_qkv=True, fused_gate_up=True), rotary=1.0, windows="all"
    ),
    # config.json does not say that there is a bias.
    "Qwen2ForCausalLM": Family("Qwen2.5", Features(qkv_bias=True), windows="flag"),
    "Qwen3ForCausalLM": Family("Qwen3", QK_NORM, BIASES, windows="flag"),
    "Qwen3MoeForCausalLM": Family("Qwen3 MoE", replace(QK_NORM, experts=MLP_EXPERTS), BIASES),
    "Qwen3NextForCausalLM": Family(
        "Qwen3-Next",
        replace(HYBRID, delta="by_key_head", experts=SHARED_EXPERT),
        BIASES,
        rotary=0.25,
    ),
    "Qwen3_5MoeForCausalLM": QWEN_3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": QWEN_3_5_MOE.within("model.language_model"),
    "Qwen3_5ForCausalLM": QWEN_3_5,
    "Qwen3_5ForConditionalGeneration": QWEN_3_5.within("model.language_model"),
    "SeedOssForCausalLM": Family(
        "Seed-OSS", Features(), ALL_BIASES | {"output_bias": "attention_out_bias"}
    ),
    "SmolLM3ForCausalLM": Family("SmolLM3", flags=ALL_BIASES, still="listed"),
}


def served() -> str:
    """The models that can be served, for people."""
    *names, last = sorted({family.models for family in FAMILIES.values()}, key=str.lower)
    return f"{', '.join(names)} or {last}"
