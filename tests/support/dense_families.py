"""Small models of dense families, one for each feature: by case, whose and what differs."""

from typing import Any

# Original lengths that the texts here exceed, and ramps that end within a head.
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 0.5, "beta_slow": 0.05,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN_SCALED = YARN | {"mscale": 0.9, "mscale_all_dim": 0.4, "truncate": False}
YARN_FACTOR = YARN | {"attention_factor": 1.3}
# Up to the positions that the model has, which is all that is served, nothing is stretched.
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.2, 1.5, 1.6, 2.0],
    "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 16.0], "partial_rotary_factor": 0.75,
}  # fmt: skip
NO_PAD: dict[str, Any] = {"pad_token_id": None}  # the default is no id of a small vocabulary
LONG = NO_PAD | {"rope_parameters": LONGROPE}
# Longer than a page and shorter than the texts, which are of up to 45 tokens.
WINDOW: dict[str, Any] = {"sliding_window": 7}
MIXED = WINDOW | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
GEMMA: dict[str, Any] = NO_PAD | MIXED | {"head_dim": 32, "query_pre_attn_scalar": 7}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
YARN_FULL = {
    "full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
LOCAL = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 20000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
WINDOWED: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral-window": ("Mistral", WINDOW),
    "ministral-mixed": ("Ministral", MIXED | {"head_dim": 16}),
    "phi3-window": ("Phi3", NO_PAD | WINDOW),
    "qwen2-window": ("Qwen2", WINDOW | {"use_sliding_window": True, "max_window_layers": 1}),
    "qwen3-window": ("Qwen3", MIXED | {"use_sliding_window": True, "head_dim": 16}),
    "gemma2": ("Gemma2", GEMMA | CAPS),
    "gemma3": ("Gemma3", GEMMA | CAPS | {"rope_parameters": LOCAL}),
    "gemma3-images": ("Gemma3", GEMMA | {"tie_word_embeddings": True}),
    "olmo3": ("Olmo3", MIXED | {"rope_parameters": YARN_FULL}),
    "exaone4": ("Exaone4", MIXED),
    "exaone4-full": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "command-r7b": ("Cohere2", NO_PAD | MIXED | {"logit_scale": 0.3}),
}
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-mlp-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "dynamic-rope": ("Llama", {"rope_parameters": DYNAMIC_ROPE, "max_position_embeddings": 44}),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen3-yarn-mscale": ("Qwen3", {"head_dim": 32, "rope_parameters": YARN_SCALED}),
    "llama-yarn-factor": ("Llama", {"rope_parameters": YARN_FACTOR}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "ministral": ("Ministral", {"sliding_window": 256, "head_dim": 16}),
    "phi3": ("Phi3", NO_PAD | {"num_key_value_heads": 4, "sliding_window": 256}),
    # Three quarters of a head.
    "phi4-mini": ("Phi3", LONG | {"original_max_position_embeddings": 16}),
    "phi4-mini-short": ("Phi3", LONG | {"original_max_position_embeddings": 128}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 3.0,
            "attention_multiplier": 0.4, "mlp_bias": True, "tie_word_embeddings": True,
        },
    ),
    "olmo2": ("Olmo2", {"attention_bias": True}),
    "olmo2-mqa": ("Olmo2", {"num_key_value_heads": 1}),
    "smollm3": ("SmolLM3", NO_PAD | {"no_rope_layers": [1, 0, 1]}),
    "seed-oss": ("SeedOss", {"head_dim": 32, "attention_out_bias": True, "mlp_bias": True}),
    "glm4": ("Glm4", NO_PAD | {"head_dim": 16}),
    "glm4-mha": ("Glm4", NO_PAD | {"head_dim": 32, "num_key_value_heads": 4}),
    "glm": ("Glm", NO_PAD | {"head_dim": 16}),
    **WINDOWED,
    "nemotron": ("Nemotron", {"head_dim": 32, "attention_bias": True, "mlp_bias": True}),
    "command-r": ("Cohere", {"logit_scale": 0.3}),
    "command-r-norms": ("Cohere", {"logit_scale": 0.3, "use_qk_norm": True}),
}  # fmt: skip
# Those whose new features are divided among ranks.
RANKED = (
    *("llama-mlp-bias", "phi3", "phi4-mini", "granite", "olmo2", "olmo2-mqa", "smollm3"),
    *("seed-oss", "glm4", "gemma2", "gemma3", "olmo3", "command-r-norms", "nemotron"),
)
SHORT = {"phi4-mini-short": 128}  # case -> the length to be served, where it is not the model's
