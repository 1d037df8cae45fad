"""Small models with latent attention: by case, whose and what differs."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.equivalence import test_models as models

# Whose original length is short, so that pairs are stretched within texts of tests.
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "beta_fast": 1.0, "beta_slow": 0.05,
    "original_max_position_embeddings": 32, "mscale": 0.707, "mscale_all_dim": 0.707,
}  # fmt: skip
# Values of another size than keys, fewer layers of experts than layers.
SIZES: dict[str, Any] = {
    "num_key_value_heads": 4, "num_hidden_layers": 3, "first_k_dense_replace": 1,
    "kv_lora_rank": 48, "q_lora_rank": 40, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16,
    "v_head_dim": 32, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3,
    "moe_intermediate_size": 32, "rope_parameters": YARN,
}  # fmt: skip
GROUPED = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
LATENT: dict[str, tuple[str, dict[str, Any]]] = {
    "v2-lite": ("DeepseekV2", {**SIZES, "q_lora_rank": None, "topk_method": "greedy"}),
    "v2": ("DeepseekV2", {**SIZES, **GROUPED, "topk_method": "group_limited_greedy"}),
    "v3": ("DeepseekV3", {**SIZES, **GROUPED, "norm_topk_prob": True, "n_shared_experts": 1}),
    "kimi-k2": (
        "DeepseekV3",
        {
            **SIZES, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "moonlight": (
        "DeepseekV3",
        {
            **SIZES, "n_group": 1, "topk_group": 1, "q_lora_rank": None, "norm_topk_prob": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        },
    ),
    "glm-flash": (
        "Glm4MoeLite",
        {
            **SIZES, "rms_norm_eps": 1e-5, "routed_scaling_factor": 1.8, "n_shared_experts": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
}  # fmt: skip


def save_latent(path: Path, case: str, **changes: Any) -> Any:
    """A model of transformers with every weight random, biases of choices too, saved to `path`."""
    family, sizes = LATENT[case]
    model: Any = models.save_random(path, family, sizes | changes)
    generator = torch.Generator().manual_seed(2)
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.copy_(0.3 * torch.randn(bias.shape, generator=generator))
    model.save_pretrained(path)
    return model


def add_mtp(path: Path, model: Any) -> torch.nn.Module:
    """Put a layer that drafts into a saved model's files, and what the target's own is a copy of.

    Returns that of transformers, with experts whatever other layers have.
    """
    from transformers.modeling_layers import MtpLayer

    number, norm = len(model.model.layers), type(model.model.norm)
    layer = MtpLayer(model.config, type(model.model.layers[0]), norm, number - 1).float().eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in (*layer.parameters(), *layer.buffers()):
            weight.copy_(0.2 * torch.randn(weight.shape, generator=generator))
    at = f"model.layers.{number}."
    names = {"mtp_block.": "", "post_norm.": "shared_head.norm."}
    own = {"embed_tokens.weight": torch.zeros(2, 3), "shared_head.head.weight": torch.zeros(2, 3)}
    for name, weight in layer.state_dict().items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        own[name] = weight.clone()
    file = path / "model.safetensors"
    save_file(load_file(file) | {at + name: weight for name, weight in own.items()}, file)
    models.edit(path, num_nextn_predict_layers=1)
    return layer
