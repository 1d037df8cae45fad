"""Synthetic DFlash drafters, and a fit that makes them right now and then.

As fitted_drafters.py: all tensors are random but the last layer's o_proj and down_proj, and a head
of its own, which are solved for by least squares on texts of the target.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, one_hot

from tests.support.chain_reference import Rows, behind_layers
from tests.support.dflash_checkpoints import ABSENT, write_dflash
from tests.support.dflash_reference import DFlashReference, plain_name
from tests.support.fitted_drafters import LAYER, SHARP, solve
from worker.config.checkpoint.shape import read_model_shape

FORMS = ("dflash", "dflash mixed")
BLOCK_SIZE, LAYERS = 8, 2
FITTED = 5  # tokens of the blocks that are fitted


def write(directory: Path, target: Path, form: str, d2t: Tensor | None = None) -> None:
    """Write a drafter with every weight random, of another geometry than the target's.

    "dflash" has full attention, the target's head and a row of its embedding for masks; "dflash
    mixed" a causal layer with a sliding window, a mask embedding, and a head for the ids of `d2t`.
    """
    options: dict[str, Any] = {"mask_token_id": 0}
    if form == "dflash mixed":
        own = ("mask_embedding",)
        options = {"sliding": (0,), "window": 24, "own": own, "mask_token_id": ABSENT}
    tensors = write_dflash(
        directory, read_model_shape(target), seed=3, num_layers=LAYERS, block_size=BLOCK_SIZE,
        taps=(0, 1, 2), layer=LAYER | {"intermediate_size": 640},
        draft_vocab_size=None if d2t is None else len(d2t), **options,
    )  # fmt: skip
    if d2t is not None:
        tensors["d2t"] = d2t
        save_file(tensors, directory / "model.safetensors")


@torch.no_grad()
def fit(directory: Path, target: Path, texts: Sequence[Sequence[int]], num_last: int) -> None:
    """Solve for the last o_proj, down_proj and the head, on blocks in the last tokens of `texts`.

    num_last: tokens of each text before which a block may begin.
    """
    reference, file = DFlashReference(target, directory), directory / "model.safetensors"
    net, at = reference.net, f"layers.{LAYERS - 1}"
    weights = net.weights
    attended, hidden, goals, following = [], [], [], []
    for tokens in texts:
        _, states = behind_layers(reference.target, torch.tensor(tokens))
        for length in range(len(tokens) - num_last, len(tokens) - FITTED, 2):
            seen: Rows = []
            reference.block(tokens, length, FITTED, seen)
            attended.append(seen[-1][0][1:])
            hidden.append(seen[-1][1][1:])
            goals.append(states[length : length + FITTED - 1])
            following.append(torch.tensor(tokens[length + 1 : length + FITTED]))
    x, residual, goal = torch.cat(attended), torch.cat(hidden), torch.cat(goals)
    weights[f"{at}.self_attn.o_proj"] = solve(x, goal - residual)
    residual = residual + linear(x, weights[f"{at}.self_attn.o_proj"])
    gated = net.gated(net.norm(f"{at}.post_attention_layernorm", residual), f"{at}.mlp.")
    weights[f"{at}.mlp.down_proj"] = solve(gated, goal - residual)
    if "lm_head" in weights:
        normed = net.norm("norm", residual + net.project(f"{at}.mlp.down_proj", gated))
        wanted = one_hot(torch.cat(following), reference.target.config.vocab_size)
        weights["lm_head"] = solve(normed, SHARP * wanted[:, reference.ids].float() - 1)
    else:
        weights["norm"] = torch.ones_like(weights["norm"])  # the goal is normed already
    tensors = {name: weights[plain_name(name)].contiguous() for name in load_file(file)}
    save_file(tensors, file)
