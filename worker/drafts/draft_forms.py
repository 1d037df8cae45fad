"""The published forms of drafters, as a table that `draft_file` reads files by. Free of torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from worker.drafts.drafter_shape import ChainKind

BEHIND = "{behind}"  # in a name: the number of the layer behind the target's
ANOTHER = "take another drafter, or set spec.drafter to ngram, which needs no weights"
OF_TARGET = "take a drafter that was made for this model, or set spec.drafter to ngram"
# Field -> the values that we compute; None: any, or the reader decides.
Rules: TypeAlias = Mapping[str, tuple[Any, ...] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How one project writes drafters."""

    drafter: str  # "chain" or "dflash"
    kind: ChainKind | None = None  # of chain drafters
    objects: Mapping[str, Rules]  # by the object's name; "" is the file itself
    layer: str = ""  # the object with the transformer's fields
    needed: Mapping[str, str]  # field -> how readers differ without
    ties_head: bool = False  # tie_word_embeddings is the drafter's, not its target's
    # Our flag -> the field that says so, or what it always is.
    flags: Mapping[str, str | bool]
    # Part (see DrafterShape.names) -> its name, maybe behind "model.", or its names, with a "|"
    # between them. One that begins with "." is behind the name of the part "layer".
    parts: Mapping[str, str]
    own: Mapping[str, str]  # parts that only some files have

    def of_target(self, num_layers: int) -> "Form":
        """The same, with the names that it has in files of a target of so many layers."""
        named = {part: x.replace(BEHIND, str(num_layers)) for part, x in self.parts.items()}
        return replace(self, parts=named)

    @property
    def is_latent(self) -> bool:
        """Whether its target has latent attention, and its layer too."""
        return self.kind == "mtp" and "kv_lora_rank" in self.objects[""]

    @property
    def is_hybrid(self) -> bool:
        """Whether its target has gated delta nets."""
        return "centred" in self.flags


def _any(names: str) -> dict[str, tuple[Any, ...] | None]:
    return dict.fromkeys(names.split())


# What `silent_fields` names may stand in any object. `max_window_layers` counts only where
# layer_types is absent. `bias` is of fc in one project, of attention in another.
_LAYER = _any("""
    architectures attention_bias dtype head_dim hidden_act hidden_size intermediate_size layer_types
    max_window_layers mlp_bias model_type num_attention_heads num_hidden_layers num_key_value_heads
    partial_rotary_factor qk_norm quantization_config rms_norm_eps rope_parameters rope_scaling
    rope_theta sliding_window tie_word_embeddings torch_dtype use_sliding_window vocab_size
""") | {
    "add_cross_attention": (False,), "additional_fc": (False,), "bias": (False,),
    "is_encoder_decoder": (False,), "logit_scale": (1.0,), "parallel_drafting": (False,),
    "pruned_heads": ({},), "qkv_bias": (False,), "tie_encoder_decoder": (False,),
    "use_bidirectional_attention": (False,), "use_mrope": (False,),
}  # fmt: skip
_CHAIN_LAYER = _LAYER | {"is_causal": (True,)}
# Of targets with gated delta nets, whose files have a layer that drafts: it has attention, and
# experts where they have. `output_gate_type` is of the nets.
_HYBRID_LAYER = _CHAIN_LAYER | _any("""
    decoder_sparse_step full_attention_interval linear_conv_kernel_dim linear_key_head_dim
    linear_num_key_heads linear_num_value_heads linear_value_head_dim mlp_only_layers
    moe_intermediate_size mtp_num_hidden_layers norm_topk_prob num_experts num_experts_per_tok
    num_local_experts num_nextn_predict_layers output_gate_type shared_expert_intermediate_size
""") | {
    "attn_output_gate": (True,), "mamba_ssm_dtype": ("float32",),
    "mtp_use_dedicated_embeddings": (False,),
}  # fmt: skip
# Of targets with latent attention, whose files have one more layer, which drafts.
_LATENT_LAYER = _CHAIN_LAYER | _any("""
    first_k_dense_replace kv_lora_rank mlp_layer_types moe_intermediate_size moe_layer_freq n_group
    n_routed_experts n_shared_experts norm_topk_prob num_experts_per_tok num_nextn_predict_layers
    q_lora_rank qk_head_dim qk_nope_head_dim qk_rope_head_dim rope_interleave routed_scaling_factor
    scoring_func topk_group topk_method v_head_dim
""")
_SEES = _any("""
    architectures dtype model_type quantization_config text_config tie_word_embeddings torch_dtype
    vision_config
""")
ROPE = _any("""
    factor high_freq_factor low_freq_factor original_max_position_embeddings partial_rotary_factor
    rope_theta rope_type type
""")
HYBRID_ROPE = ROPE | _any("mrope_interleaved mrope_section")  # of text its three rows are one
LATENT_ROPE = ROPE | _any("attention_factor beta_fast beta_slow mscale mscale_all_dim truncate")
_EAGLE3 = _any("""
    draft_vocab_size eagle_aux_hidden_state_layer_ids fc_norm norm_before_fc norm_before_residual
    norm_output num_aux_hidden_states reuse_target_lm_head target_hidden_size
""")
# Without a `parallel_draft_step` of its own there are no `parallel_draft_heads`.
_EAGLE_CONFIG = _any("""
    eagle_aux_hidden_state_layer_ids norm_before_fc parallel_draft_heads_num_layers
    return_hidden_post_norm use_aux_hidden_state
""") | {
    "eh_proj_before_attn": (False,), "next_layer_regular": (True,), "parallel_draft_step": (1,),
    "use_input_layernorm_in_first_layer": (True,), "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
}  # fmt: skip
_SPECULATORS = _any("""
    architectures dtype max_window_layers model_type speculators_config speculators_model_type
    tie_word_embeddings torch_dtype transformer_layer_config
""")
_DFLASH = {
    "add_swa_attention_sink_bias": (False,), "attention_sink_bias": (False,),
    "attention_value_scale": (1.0,), "pure_draft_prefix_len": (1,), "sample_from_anchor": (False,),
    "shift_label": (False,), "use_aux_hidden_state": (True,),
}  # fmt: skip
# The layers have norms of q and k, whatever `model_type` is.
_DFLASH_LAYER = _LAYER | _DFLASH | {"qk_norm": (True,)}
_DFLASH_CONFIG = _DFLASH | _any("""
    block_size causal mask_token mask_token_id num_target_layers swa_window_size target_layer_ids
    use_swa
""")

_PARTS = {
    "attention": ".self_attn", "post_norm": ".post_attention_layernorm", "feed_forward": ".mlp",
}  # fmt: skip
_EAGLE3_PARTS = _PARTS | {
    "token_norm": ".input_layernorm", "hidden_norm": ".hidden_norm", "final_norm": "norm",
    "fc": "fc", "fc_norm": "fc_norm", "input_norm": "input_norm",
}  # fmt: skip
_DFLASH_PARTS = {
    "layers": "layers", "fc": "fc|encoder.fc", "final_norm": "norm",
    "hidden_norm": "hidden_norm|encoder.output_norm_enc",
}  # fmt: skip
_OWN = {"embedding": "embed_tokens", "head": "lm_head", "d2t": "d2t", "t2d": "t2d"}
_DFLASH_OWN = _OWN | {"mask_embedding": "mask_embedding.weight|mask_embedding"}
_BIASES = {"qkv_bias": "attention_bias", "output_bias": "attention_bias"}
_CHAIN = _BIASES | {
    "qk_norm": "qk_norm", "projection_bias": False, "norm_before_residual": False,
    "norm_output": False, "hidden_first": False,
}  # fmt: skip
_EAGLE3_FLAGS = _CHAIN | {
    "norm_before_residual": "norm_before_residual", "norm_output": "norm_output",
}  # fmt: skip
_DFLASH_NEEDED = {
    "rope_theta": "vLLM takes it as 1000000 then, others as 10000",
    "head_dim": "taken as 128 by some then, as hidden_size / num_attention_heads by others",
}

# A layer for the token after next in the target's own files, as Qwen3-Next and Qwen3.5 have it,
# with experts and without.
_HYBRID_MTP: dict[str, Any] = {
    "drafter": "chain", "kind": "mtp", "needed": {}, "own": {},
    "flags": _CHAIN | {
        "qk_norm": True, "norm_output": True, "hidden_first": False, "output_gate": True,
        "centred": True,
    },
    "parts": _PARTS | {
        "layer": "mtp.layers.0", "token_norm": "mtp.pre_fc_norm_embedding",
        "hidden_norm": "mtp.pre_fc_norm_hidden", "projection": "mtp.fc",
        "layer_norm": ".input_layernorm", "final_norm": "mtp.norm",
    },
}  # fmt: skip
_NESTED = "transformer_layer_config"
# The field that names a form -> its value -> the form.
FORMS: Mapping[str, Mapping[str, Form]] = {"architectures": {
    # The authors of EAGLE-3, SpecForge, ModelOpt.
    "LlamaForCausalLMEagle3": Form(
        drafter="chain", kind="eagle3", needed={}, ties_head=True, flags=_EAGLE3_FLAGS,
        objects={
            # The layer is Llama's by `architectures`; the others are types of targets.
            "": _CHAIN_LAYER | _EAGLE3 | {
                "model_type": ("llama", "phi3", "kimi_k2"), "eagle_config": None,
            },
            "eagle_config": _EAGLE_CONFIG,
        },
        parts={"layer": "midlayer|layers.0"} | _EAGLE3_PARTS, own=_OWN,
    ),
    # EAGLE-1 and EAGLE-2: one projection of token and feature, no first norm and no last.
    "LlamaForCausalLMEagle": Form(
        drafter="chain", kind="eagle", needed={}, flags=_CHAIN | {"projection_bias": "bias"},
        objects={"": _CHAIN_LAYER | {"bias": None, "model_type": ("llama",)}},
        parts={"layer": "layers.0", "projection": "fc"} | _PARTS,
        own={"embedding": "embed_tokens"},
    ),
    # MiMo's layer for the token after next, in the target's own files: a layer as Qwen2's.
    "MiMoForCausalLM": Form(
        drafter="chain", kind="mtp", needed={},
        objects={"": _CHAIN_LAYER | {"num_nextn_predict_layers": None}},
        flags=_CHAIN | {
            "qkv_bias": True, "output_bias": False, "qk_norm": False, "norm_output": True,
            "hidden_first": True,
        },
        parts=_PARTS | {
            "layer": "model.mtp_layers.0", "token_norm": ".token_layernorm",
            "hidden_norm": ".hidden_layernorm", "layer_norm": ".input_layernorm",
            "projection": ".input_proj", "final_norm": ".final_layernorm",
        },
        own={},
    ),
    **dict.fromkeys(
        ("DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"),
        Form(
            drafter="chain", kind="mtp", needed={}, objects={"": _LATENT_LAYER}, own={},
            flags=_CHAIN | {
                "qkv_bias": False, "output_bias": False, "qk_norm": False, "norm_output": True,
            },
            parts=_PARTS | {
                "layer": f"model.layers.{BEHIND}", "token_norm": ".enorm", "hidden_norm": ".hnorm",
                "projection": ".eh_proj", "layer_norm": ".input_layernorm",
                "final_norm": ".shared_head.norm",
            },
        ),
    ),
    **dict.fromkeys(
        ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
        Form(objects={"": _HYBRID_LAYER}, **_HYBRID_MTP),
    ),
    **dict.fromkeys(
        ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
        Form(objects={"": _SEES, "text_config": _HYBRID_LAYER}, layer="text_config", **_HYBRID_MTP),
    ),
    # The authors of DFlash, SpecForge, ModelOpt.
    "DFlashDraftModel": Form(
        drafter="dflash", needed=_DFLASH_NEEDED, ties_head=True, flags=_BIASES | {"qk_norm": True},
        objects={
            "": _DFLASH_LAYER | {"model_type": ("qwen3",)} | _any("""
                block_size dflash_config draft_vocab_size is_causal mask_token_id num_target_layers
                target_hidden_size
            """),
            "dflash_config": _DFLASH_CONFIG,
        },
        parts=_DFLASH_PARTS, own=_DFLASH_OWN,
    ),
}, "speculators_model_type": {
    "eagle3": Form(
        drafter="chain", kind="eagle3", layer=_NESTED, flags=_EAGLE3_FLAGS,
        objects={
            "": _SPECULATORS | _EAGLE3,
            _NESTED: _CHAIN_LAYER | {"model_type": ("llama", "qwen3")},
        },
        needed={"norm_before_residual": "vLLM takes it as true then, speculators as false"},
        parts={"layer": "layers.0|midlayer"} | _EAGLE3_PARTS, own=_OWN,
    ),
    "dflash": Form(
        drafter="dflash", layer=_NESTED, needed=_DFLASH_NEEDED, flags=_BIASES | {"qk_norm": True},
        objects={
            "": _SPECULATORS | _DFLASH | _any("""
                aux_hidden_state_layer_ids block_size draft_vocab_size mask_token_id max_anchors
                num_hidden_layers sliding_window_non_causal target_hidden_size
            """),
            # Beside `sliding_window_non_causal`, nobody says whether `is_causal` counts.
            _NESTED: _DFLASH_LAYER | {"model_type": ("llama", "qwen3")},
        },
        parts=_DFLASH_PARTS, own=_DFLASH_OWN,
    ),
}}  # fmt: skip
DRAFTS = {"chain": "token by token", "dflash": "by blocks"}

# Known drafters that need a part which we lack: a regular expression, searched in their name and in
# names of fields -> the part.
MISSING: Mapping[str, str] = {
    "confidence": "a confidence head (DSpark)",
    "conv_": "grouped convolutions (DFlash 2)",
    "deepseek": "latent attention (MLA) and experts",
    "dflare": "a fusion of hidden states in every layer (DFlare)",
    "dflash2": "a selector and grouped convolutions (DFlash 2)",
    "domino|gru": "a GRU behind the block (Domino)",
    "dspark|markov": "a Markov head (DSpark)",
    "glm4moe|qwen3moe|moe_": "experts outside the target's own files",
    "gptoss": "gpt-oss's own layers outside the target's files",
    "mask_hidden": "a hidden state that stands for what is not known (P-EAGLE)",
    "peagle": "drafting in parallel, from a hidden state for what is not known (P-EAGLE)",
    "projector_type": "a projector of its own (Domino, DSpark, DFlash 2)",
    "qwen3_5|qwen3next": "gated attention outside the target's own files",
    "selector": "a selector among candidates (DFlash 2)",
}
