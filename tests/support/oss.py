"""gpt-oss with random weights: as transformers saves it, and as it is published, in MXFP4."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.equivalence import test_models as models
from tests.support.four_bits import mxfp4

YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 0.5, "beta_slow": 0.05,
    "original_max_position_embeddings": 16, "truncate": False,
}  # fmt: skip
# Windows are shorter than texts; many gates and ups are clamped.
OSS: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 64, "intermediate_size": 64, "head_dim": 32, "num_hidden_layers": 4,
    "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 7, "swiglu_limit": 2.0,
    "rope_parameters": YARN, "pad_token_id": 0,
}  # fmt: skip
DECLARED = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip


def save_oss(path: Path, **changes: Any) -> torch.nn.Module:
    """Of transformers, saved in 32 bits."""
    return models.save_random(path, "GptOss", OSS | changes)


def publish_oss(path: Path, reference: torch.nn.Module | None = None) -> None:
    """Rewrite a saved model as published; the reference gets what that is worth."""
    models.edit(path, quantization_config=DECLARED)
    held = load_file(path / "model.safetensors")
    kept = {} if reference is None else dict(reference.named_parameters())
    for name in [x for x in held if x.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        stack = held.pop(name).transpose(1, 2)  # rows first
        made, value = mxfp4(stack.flatten(0, 1).contiguous(), 32)
        groups = stack.shape[2] // 32
        held[f"{name}_blocks"] = made["weight_packed"].view(*stack.shape[:2], groups, 16)
        held[f"{name}_scales"] = made["weight_scale"].view(*stack.shape[:2], groups)
        if kept:
            kept[name].data.copy_(value.view(stack.shape).transpose(1, 2))
    scales = {name: held.pop(name) for name in [*held] if name.endswith("_scales")}
    save_file(scales, path / "other.safetensors")  # they may lie anywhere
    save_file(held, path / "model.safetensors")


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """By transformers' own integration, f32 [number, columns, rows]."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    return convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
