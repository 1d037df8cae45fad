"""Synthetic DFlash drafters, and a fit that makes them right now and then.

As fitted_drafters.py: all tensors are random but the last layer's o_proj and down_proj, and a head
of its own, which are solved for by least squares on texts of the target.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, one_hot

from tests.support.chain_reference import behind_layers
from tests.support.dflash_reference import DFlashReference, plain_name
from tests.support.fitted_drafters import SHARP, noise, solve

FORMS = ("dflash", "dflash mixed")
BLOCK_SIZE, WINDOW = 8, 24
HEADS, KV_HEADS, HEAD_DIM, SIZE, LAYERS = 6, 3, 32, 640, 2  # another geometry than the target's
FITTED = 5  # tokens of the blocks that are fitted


def write(directory: Path, target: Path, form: str, d2t: Tensor | None = None) -> None:
    """Write a drafter with every weight random.

    "dflash" has full attention, the target's head and a row of its embedding for masks; "dflash
    mixed" a causal layer with a sliding window, a mask embedding, and a head for the ids of `d2t`.
    """
    made = json.loads((target / "config.json").read_text())
    hidden, mixed = made["hidden_size"], form == "dflash mixed"
    inner: dict[str, Any] = {"target_layer_ids": [0, 1, 2], "mask_token_id": 0}
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": hidden,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "intermediate_size": SIZE, "num_hidden_layers": LAYERS, "rms_norm_eps": 1e-5,
        "rope_theta": 20000.0, "vocab_size": made["vocab_size"], "hidden_act": "silu",
        "max_position_embeddings": 64, "tie_word_embeddings": False, "torch_dtype": "float32",
        "block_size": BLOCK_SIZE, "num_target_layers": made["num_hidden_layers"],
        "dflash_config": inner, "attention_bias": False,
    }  # fmt: skip
    random, num_q, num_kv = torch.Generator().manual_seed(3), HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {"fc": (hidden, 3 * hidden), "hidden_norm": (hidden,), "norm": (hidden,)}
    for layer in range(LAYERS):
        shapes |= {
            f"layers.{layer}.{name}": shape
            for name, shape in {
                "self_attn.q_proj": (num_q, hidden), "self_attn.k_proj": (num_kv, hidden),
                "self_attn.v_proj": (num_kv, hidden), "self_attn.o_proj": (hidden, num_q),
                "self_attn.q_norm": (HEAD_DIM,), "self_attn.k_norm": (HEAD_DIM,),
                "mlp.gate_proj": (SIZE, hidden), "mlp.up_proj": (SIZE, hidden),
                "mlp.down_proj": (hidden, SIZE), "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
            }.items()
        }  # fmt: skip
    tensors = {f"{name}.weight": noise(shape, random) for name, shape in shapes.items()}
    if mixed:
        config |= {
            "layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW,
            "use_sliding_window": True,
        }  # fmt: skip
        del inner["mask_token_id"]
        tensors["mask_embedding"] = noise((hidden,), random)
    if d2t is not None:
        config["draft_vocab_size"] = len(d2t)
        tensors["lm_head.weight"] = noise((len(d2t), hidden), random)
        tensors["d2t"] = d2t
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def fit(directory: Path, target: Path, texts: Sequence[Sequence[int]], num_last: int) -> None:
    """Solve for the last o_proj, down_proj and the head, on blocks in the last tokens of `texts`.

    num_last: tokens of each text before which a block may begin.
    """
    reference, file = DFlashReference(target, directory), directory / "model.safetensors"
    last, weights = LAYERS - 1, reference.weights
    attended, hidden, goals, following = [], [], [], []
    for tokens in texts:
        _, states = behind_layers(reference.target, torch.tensor(tokens))
        for length in range(len(tokens) - num_last, len(tokens) - FITTED, 2):
            seen: list[tuple[Tensor, Tensor]] = []
            reference.block(tokens, length, FITTED, seen)
            attended.append(seen[last][0][1:])
            hidden.append(seen[last][1][1:])
            goals.append(states[length : length + FITTED - 1])
            following.append(torch.tensor(tokens[length + 1 : length + FITTED]))
    x, residual, goal = torch.cat(attended), torch.cat(hidden), torch.cat(goals)
    at = f"layers.{last}"
    weights[f"{at}.self_attn.o_proj"] = solve(x, goal - residual)
    residual = residual + linear(x, weights[f"{at}.self_attn.o_proj"])
    gated = reference.gated(last, reference.norm(f"{at}.post_attention_layernorm", residual))
    weights[f"{at}.mlp.down_proj"] = solve(gated, goal - residual)
    if "lm_head" in weights:
        normed = reference.norm("norm", residual + linear(gated, reference.down(last)))
        wanted = one_hot(torch.cat(following), reference.target.config.vocab_size)
        weights["lm_head"] = solve(normed, SHARP * wanted[:, reference.ids].float() - 1)
    else:
        weights["norm"] = torch.ones_like(weights["norm"])  # the goal is normed already
    tensors = {name: weights[plain_name(name)].contiguous() for name in load_file(file)}
    save_file(tensors, file, metadata={"format": "pt"})
