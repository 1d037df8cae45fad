"""The model `tiny-hybrid`: a Qwen3.5 of 1.4 million parameters, three of four layers recurrent."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 1024,
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2], "mrope_interleaved": True,
    },
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "attn_output_gate": True,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def new_model(seed: int) -> Any:
    """The model with fresh float32 weights; untyped, see `accuracy.load_model`."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig  # takes seconds
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    modeling.torch_chunk_gated_delta_rule = delta_rule  # theirs inverts row by row, in Python
    torch.manual_seed(seed)
    named = {name: value for name, value in CONFIG.items() if not name.startswith("mtp_")}
    del named["torch_dtype"], named["architectures"], named["model_type"]
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**named)).float()


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor,
    initial_state: Tensor | None = None, output_final_state: bool = False, **_: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """transformers' torch_chunk_gated_delta_rule, the blocks' systems solved at once, in f32.

    query, key: [batch, length, key heads, key_dim]; value: [batch, length, heads, value_dim];
    g, beta: [batch, length, heads]. Returns outputs as `value`, and the last state if asked.
    """
    with torch.autocast(value.device.type, enabled=False):
        ratio, length = value.shape[2] // query.shape[2], value.shape[1]
        q, k = (x.float() for x in (query, key))
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        q, k = (x.repeat_interleave(ratio, 2) for x in (q * q.shape[-1] ** -0.5, k))
        q, k, v, total, b = (
            _blocks(x) for x in (q, k, value.float(), g.float()[..., None], beta.float()[..., None])
        )
        total = total.cumsum(-2)
        later = (total - total.mT).tril()
        decay = later.exp().tril()
        system = torch.eye(BLOCK, device=v.device) + (b * (k @ k.mT) * decay).tril(-1)
        both = torch.cat((b * v, b * total.exp() * k), -1)
        solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
        u, w = solved.split([v.shape[-1], k.shape[-1]], -1)
        seen, last = (q @ k.mT) * decay, total[..., -1:, :]
        q, k = q * total.exp(), k * (last - total).exp()
        state = initial_state
        if state is None:
            state = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1])
        outputs = []
        for n in range(v.shape[2]):
            new = u[:, :, n] - w[:, :, n] @ state
            outputs.append(q[:, :, n] @ state + seen[:, :, n] @ new)
            state = state * last[:, :, n].exp() + k[:, :, n].mT @ new
        out = torch.stack(outputs, 2).flatten(2, 3)[:, :, :length].transpose(1, 2)
    return out.to(value.dtype), state if output_final_state else None


def _blocks(x: Tensor) -> Tensor:
    """[batch, length, heads, size] -> [batch, heads, blocks, BLOCK, size], zeros behind the end."""
    x = x.transpose(1, 2)
    return F.pad(x, (0, 0, 0, -x.shape[2] % BLOCK)).unflatten(2, (-1, BLOCK))
