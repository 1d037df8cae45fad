"""The model `tiny-moe`: a Qwen3-MoE of 1.8 million parameters; a token has two of eight experts."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 1024,
    "hidden_size": 192,
    "intermediate_size": 384,
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
}


def new_model(seed: int) -> Any:
    """The model with fresh float32 weights; untyped, see `accuracy.load_model`."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM  # takes seconds

    torch.manual_seed(seed)
    named = {name: value for name, value in CONFIG.items() if name != "torch_dtype"}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**named)).float()


def apart(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """transformers' weights, whose experts are stacked, by the names that checkpoints have."""
    named = dict[str, Tensor]()
    for name, weight in state.items():
        block, is_stack, kind = name.partition(".experts.")
        if not is_stack:
            named[name] = weight
            continue
        parts = {"down_proj": weight}
        if kind == "gate_up_proj":
            parts = dict(zip(("gate_proj", "up_proj"), weight.chunk(2, dim=1), strict=True))
        named |= {
            f"{block}.experts.{i}.{part}.weight": each
            for part, stack in parts.items()
            for i, each in enumerate(stack)
        }
    return named
