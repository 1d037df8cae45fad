"""The fields of chain drafters' config.json, as the projects that train them write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# No draft depends on these: how it was trained and stored, how long it was trained for, where a
# text ends.
IRRELEVANT = frozenset(
    {
        "_attn_implementation_autoset",
        "_name_or_path",
        "attention_dropout",
        "auto_map",
        "base_model_ep_plan",
        "bos_token_id",
        "embed_requires_grad",
        "enable_sp_ulysses",
        "eos_token_id",
        "has_no_defaults_at_init",
        "initializer_range",
        "max_position_embeddings",
        "max_window_layers",  # where windows begin if layer_types does not say so: refused
        "name_or_path",
        "pad_token_id",
        "pretraining_tp",  # how products are cut, not what they are
        "speculators_version",
        "transformers_version",
        "use_cache",
    }
)
SHAPE = frozenset(
    {
        "architectures",
        "attention_bias",
        "bias",
        "dtype",
        "head_dim",
        "hidden_act",
        "hidden_size",
        "intermediate_size",
        "is_causal",
        "layer_types",
        "logit_scale",
        "mlp_bias",
        "model_type",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "parallel_drafting",
        "partial_rotary_factor",
        "qk_norm",
        "qkv_bias",
        "quantization_config",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "sliding_window",
        "tie_word_embeddings",
        "torch_dtype",
        "use_sliding_window",
        "vocab_size",
    }
)
ROPE = frozenset(
    {
        "factor",
        "high_freq_factor",
        "low_freq_factor",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "rope_theta",
        "rope_type",
        "type",
    }
)
EAGLE3 = frozenset(
    {
        "draft_vocab_size",
        "eagle_aux_hidden_state_layer_ids",
        "eagle_config",
        "fc_norm",
        "norm_before_fc",
        "norm_before_residual",
        "norm_output",
        "num_aux_hidden_states",
        "target_hidden_size",
    }
)
# speculators nests SHAPE in transformer_layer_config. Its head is never the embedding, whatever
# tie_word_embeddings says, which is the target's.
SPECULATORS = frozenset(
    {
        "architectures",
        "dtype",
        "model_type",
        "speculators_config",
        "speculators_model_type",
        "tie_word_embeddings",
        "torch_dtype",
        "transformer_layer_config",
    }
)
MTP = frozenset({"num_nextn_predict_layers"})

# The only value of each that we compute. `bias` is of fc in one project, of attention in another.
FIXED: Mapping[str, Any] = {
    "bias": False,
    "is_causal": True,
    "logit_scale": 1.0,
    "parallel_drafting": False,
    "qkv_bias": False,
}
FIXED_EAGLE_CONFIG: Mapping[str, Any] = {
    "eh_proj_before_attn": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}
EAGLE_CONFIG = frozenset(FIXED_EAGLE_CONFIG) | {
    "eagle_aux_hidden_state_layer_ids",
    "norm_before_fc",
    "return_hidden_post_norm",
    "use_aux_hidden_state",
}

# Architectures whose drafters are known and need a part that is missing here.
REFUSED: Mapping[str, str] = {
    "DFlashDraftModel": "drafting by blocks: set spec.drafter to dflash",
    "DeepseekV3ForCausalLM": "latent attention (MLA) and experts",
    "Glm4MoeForCausalLM": "experts",
    "PEagleDraftModel": "drafting in parallel",
    "Qwen3NextForCausalLM": "zero-centred norms, gated attention and experts",
    "Qwen3_5ForConditionalGeneration": "zero-centred norms and gated attention",
    "Qwen3_5MoeForConditionalGeneration": "zero-centred norms, gated attention and experts",
}
