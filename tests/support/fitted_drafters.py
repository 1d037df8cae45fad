"""Synthetic chain drafters in their published forms, and a fit that makes them right now and then.

A random drafter is never right, so its traces show nothing. Here all tensors are random but three:
o_proj, then down_proj, and a head of its own, where there is one, are solved for by least squares
on texts of the target: so that a row's output is near the next feature, and its head's favourite
the next token. That takes a second, and most first drafts of those very texts are right.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import embedding, one_hot

from tests.support.chain_checkpoints import write_chain
from tests.support.chain_reference import ChainReference, short_name
from worker.config.checkpoint.shape import read_model_shape

PUBLISHED = {"eagle3": "specforge", "eagle": "eagle", "mtp": "mimo"}  # see write_chain
FORMS = tuple(PUBLISHED)
HEADS, KV_HEADS, HEAD_DIM = 6, 3, 32
LAYER = {  # another geometry than the target's
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
    "intermediate_size": 320, "rope_theta": 20000.0,
}  # fmt: skip
INNER = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True}
RIDGE, SHARP = 1e-3, 20


def write(
    directory: Path,
    target: Path,
    form: str,
    *,
    own: tuple[str, ...] | None = None,
    d2t: Tensor | None = None,
    **config: Any,
) -> None:
    """Write a drafter in one of FORMS with every weight random.

    own: see write_chain; by default EAGLE-3 has a head of its own. d2t: of a reduced draft
    vocabulary of EAGLE-3. config: entries that differ in config.json.
    """
    if form == "eagle3":
        own = ("lm_head",) if own is None else own
        config = {"eagle_config": INNER} | config
    if d2t is not None:
        own, config = (*(own or ()), "t2d"), config | {"draft_vocab_size": len(d2t)}
    spec = read_model_shape(target)
    tensors = write_chain(directory, PUBLISHED[form], spec, own=own or (), layer=LAYER, **config)
    if d2t is not None:
        tensors["d2t"], tensors["t2d"] = d2t, torch.zeros(spec.vocab_size, dtype=torch.bool)
        tensors["t2d"][torch.arange(len(d2t)) + d2t] = True
        save_file(tensors, weights_of(directory))


def weights_of(directory: Path) -> Path:
    (file,) = directory.glob("*.safetensors")
    return file


def map_of(texts: Sequence[Sequence[int]], num: int, vocab_size: int) -> Tensor:
    """d2t of the `num` ids that occur most often in `texts`, ascending as published ones are."""
    often = Counter(token for text in texts for token in text).most_common(num)
    ids = sorted({token for token, _ in often})
    ids += [token for token in range(vocab_size) if token not in ids][: num - len(ids)]
    return torch.tensor(sorted(ids)) - torch.arange(num)


@torch.no_grad()
def fit(directory: Path, target: Path, texts: Sequence[Sequence[int]]) -> None:
    """Solve for o_proj, down_proj and the head of the drafter in `directory`, see above."""
    reference = ChainReference(target, directory)
    layer, file = reference.layer, weights_of(directory)
    rows, goals, following = [], [], []
    for tokens in texts:
        ids, features = torch.tensor(tokens), reference.features(tokens)
        at = torch.arange(1, len(ids) - 1)
        x, residual = layer.inputs(embedding(ids[at], reference.embedding), features[at - 1])
        q, k, v = (layer.heads(name, x, at) for name in "qkv")
        causal = torch.ones(len(at), len(at), dtype=torch.bool).tril()
        rows.append((layer.attend(q, k, v, causal), residual))
        goals.append(features[at])
        following.append(ids[at + 1])
    attended, residual = (torch.cat(each) for each in zip(*rows, strict=True))
    goal, token, weights = torch.cat(goals), torch.cat(following), layer.weights
    weights["o_proj"] = solve(attended, goal - residual)
    hidden = residual + layer.project("o_proj", attended)
    normed = layer.norm("post_attention_layernorm", hidden)
    gated = layer.gated(normed)
    weights["down_proj"] = solve(gated, goal - hidden)
    if layer.kind == "mtp":  # what is fed back is normed, as the feature of the target is
        weights["final_layernorm"] *= goal.pow(2).mean().sqrt()
    if "lm_head" in weights:
        wanted = one_hot(token, reference.vocab_size)[:, reference.ids].float()
        weights["lm_head"] = solve(layer.outputs(attended, residual)[0], SHARP * wanted - 1)
    tensors = {name: weights.get(short_name(name), each) for name, each in load_file(file).items()}
    tensors = {name: each.contiguous() for name, each in tensors.items()}
    save_file(tensors, file)


def solve(x: Tensor, y: Tensor) -> Tensor:
    """The weight of the linear layer from rows x to rows y, by ridge regression."""
    square = x.T @ x
    ridge = RIDGE * square.diagonal().mean() * torch.eye(len(square))
    return torch.linalg.solve(square + ridge, x.T @ y).T
