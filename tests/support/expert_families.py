"""Small models with experts: by case, whose and what differs."""

from typing import Any

# Three layers of four are gated delta nets. Their norm divides by the size of what may be small: a
# larger eps keeps it from enlarging the last bits of both sides.
DELTA = {
    "rms_norm_eps": 1e-4, "num_hidden_layers": 4, "linear_num_key_heads": 4,
    "linear_num_value_heads": 8, "linear_key_head_dim": 16, "linear_value_head_dim": 32,
}  # fmt: skip
SPARSE = {
    "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "norm_topk_prob": True, "output_router_logits": False,
}  # fmt: skip
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-moe": ("Qwen3Moe", SPARSE),
    "qwen3-moe-mixed": ("Qwen3Moe", {**SPARSE, "mlp_only_layers": [1], "num_hidden_layers": 4}),
    "qwen3-moe-step": (
        "Qwen3Moe",
        {**SPARSE, "decoder_sparse_step": 2, "num_experts": 5, "norm_topk_prob": False},
    ),
    "mixtral": ("Mixtral", {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3.5-moe": ("Qwen3_5Moe", {**DELTA, **SPARSE, "shared_expert_intermediate_size": 64}),
    # Whose shared expert lies in one stack with all others.
    "qwen3.5-moe-joined": (
        "Qwen3_5Moe", {**DELTA, **SPARSE, "shared_expert_intermediate_size": 32},
    ),
    "qwen3-next-moe": (
        "Qwen3Next",
        {
            **DELTA, **SPARSE, "mlp_only_layers": [2],
            "shared_expert_intermediate_size": 48,
        },
    ),
}  # fmt: skip
