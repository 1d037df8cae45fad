"""What a field that config.json leaves out means: its class's default, by architecture.

Facts of transformers 5.24 (models/*/configuration_*.py), which tests compare; MiMo's class extends
Qwen2's. No default has what says which model it is: hidden_size, intermediate_size of dense ones,
num_hidden_layers. Nor has eos_token_id, but for Gemma's: the class's would be an id of another
vocabulary than the tokenizer's. Free of torch.
"""

from collections.abc import Mapping
from typing import Any

from worker.config.checkpoint.fields import Fields

NUM_EXPERTS = "num_experts", "num_local_experts", "n_routed_experts"  # names of one field

_COLUMNS = (
    "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "max_position_embeddings", "rms_norm_eps", "rope_theta", "tie_word_embeddings",
)  # fmt: skip
# None: it follows from other fields.
_ROWS: Mapping[str, tuple[int | float | bool | None, ...]] = {
    "Cohere": (64, None, None, 256_000, 8_192, None, 5e5, True),
    "Cohere2": (64, None, None, 256_000, 8_192, None, 1e4, True),
    "DeepseekV2": (32, None, 64, 102_400, 2_048, 1e-6, 1e4, False),
    "DeepseekV3": (128, 128, 64, 129_280, 4_096, 1e-6, 1e4, False),
    "Exaone4": (32, 32, None, 102_400, 2_048, 1e-5, 1e4, False),
    "Gemma2": (8, 4, 256, 256_000, 8_192, 1e-6, 1e4, True),
    "Gemma3": (8, 4, 256, 262_208, 131_072, 1e-6, 1e6, True),
    "Glm": (32, 2, 128, 151_552, 131_072, 1.5625e-7, 1e4, False),
    "Glm4MoeLite": (20, 20, 64, 154_880, 202_752, 1e-5, 1e4, False),
    "GptOss": (64, 8, 64, 201_088, 131_072, 1e-5, 1.5e5, False),
    "Granite": (32, None, None, 32_000, 2_048, 1e-6, 1e4, False),
    "Llama": (32, None, None, 32_000, 2_048, 1e-6, 1e4, False),
    "Mistral": (32, 8, None, 32_000, 131_072, 1e-6, 1e4, False),
    "Mixtral": (32, 8, None, 32_000, 131_072, 1e-5, 1e6, False),
    "Nemotron": (48, None, None, 256_000, 4_096, None, 1e4, False),
    "Olmo2": (32, None, None, 50_304, 2_048, 1e-5, 1e4, False),
    "Olmo3": (32, None, None, 50_304, 2_048, 1e-5, 5e5, False),
    "Phi3": (32, None, None, 32_064, 4_096, 1e-5, 1e4, False),
    "Qwen2": (32, 32, None, 151_936, 32_768, 1e-6, 1e4, False),
    "Qwen3": (32, 32, 128, 151_936, 32_768, 1e-6, 1e4, False),
    "Qwen3Moe": (32, 4, None, 151_936, 32_768, 1e-6, 1e4, False),
    "Qwen3Next": (16, 2, 256, 151_936, 32_768, 1e-6, 1e4, False),
    "Qwen3_5": (16, 4, 256, 248_320, 32_768, 1e-6, 1e4, False),
    "Qwen3_5Moe": (16, 2, 256, 248_320, 32_768, 1e-6, 1e4, False),
    "SeedOss": (80, 8, 128, 155_136, 524_288, 1e-6, 1e4, False),
    "SmolLM3": (16, 4, None, 128_256, 32_768, 1e-6, 2e6, True),
}
_SAME = {"Glm4": "Glm", "MiMo": "Qwen2", "Ministral": "Mistral"}
_COHERE = {"layer_norm_eps": 1e-5, "logit_scale": 0.0625}
_GEMMA = {"sliding_window": 4_096, "query_pre_attn_scalar": 256, "eos_token_id": 1}
_HYBRID_MOE = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
_LATENT = {
    "q_lora_rank": 1_536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "norm_topk_prob": False,
}  # fmt: skip
_OTHERS: Mapping[str, Mapping[str, Any]] = {
    "Cohere": _COHERE,
    "Cohere2": _COHERE | {"sliding_window": 4_096},
    "DeepseekV2": _LATENT
    | {
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1_407,
        "topk_method": "greedy",
    },
    "DeepseekV3": _LATENT
    | {
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2_048,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    "Exaone4": {"sliding_window": 4_096},
    "Gemma2": _GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "Gemma3": _GEMMA,
    "Glm": {"attention_bias": True},
    "Glm4MoeLite": _LATENT
    | {
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1_536,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
    },
    "GptOss": {
        "attention_bias": True,
        "sliding_window": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "torch_dtype": "bfloat16",  # of its published files, which do not say so
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4_096,
        },
    },
    "Mistral": {"sliding_window": 4_096},
    "Mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "Nemotron": {"norm_eps": 1e-5},
    "Olmo3": {"sliding_window": 4_096},
    "Phi3": {"original_max_position_embeddings": 4_096},
    "Qwen2": {"sliding_window": 4_096},
    "Qwen3": {"sliding_window": 4_096},
    "Qwen3Moe": {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "sliding_window": 4_096,
    },
    "Qwen3Next": _HYBRID_MOE | {"num_experts": 512, "num_experts_per_tok": 10},
    # No layer is dense.
    "Qwen3_5Moe": _HYBRID_MOE
    | {"num_experts": 256, "num_experts_per_tok": 8, "intermediate_size": 512},
    "SeedOss": {"attention_bias": True},
}


def with_class_defaults(fields: Fields, architecture: str) -> Fields:
    """With what is absent, of an architecture that is served."""
    name = architecture.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")
    name = _SAME.get(name, name)
    held: dict[str, Any] = dict(zip(_COLUMNS, _ROWS[name], strict=True))
    held |= _OTHERS.get(name, {})
    said = {*NUM_EXPERTS} if fields.get(*NUM_EXPERTS) is not None else set[str]()
    said |= {"rope_parameters"} if fields.get("rope_scaling") is not None else set()
    defaults = {x: value for x, value in held.items() if value is not None and x not in said}
    return fields.with_defaults(defaults)
