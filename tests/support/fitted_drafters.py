"""Synthetic chain drafters in their published forms, and a fit that makes them right now and then.

A random drafter is never right, so its traces show nothing. Here all tensors are random but three:
o_proj, then down_proj, and a head of its own, where there is one, are solved for by least squares
on texts of the target: so that a row's output is near the next feature, and its head's favourite
the next token. That takes a second, and most first drafts of those very texts are right.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import embedding, one_hot, silu

from tests.support.chain_reference import MTP_PREFIX, ChainReference, short_name

FORMS = ("eagle3", "eagle", "mtp")
NAMES = {
    "eagle3": "LlamaForCausalLMEagle3",
    "eagle": "LlamaForCausalLMEagle",
    "mtp": "MiMoForCausalLM",
}
HEADS, KV_HEADS, HEAD_DIM, SIZE = 6, 3, 32, 320  # another geometry than the target's
RIDGE, SHARP = 1e-3, 20


def write(
    directory: Path,
    target: Path,
    form: str,
    *,
    own_head: bool = True,
    own_embedding: bool = False,
    d2t: Tensor | None = None,
    fc_norm: bool = False,
    seed: int = 0,
    **config: Any,
) -> None:
    """Write a drafter with every weight random.

    Args:
        directory: is made.
        target: directory of the target.
        form: one of FORMS.
        own_head, own_embedding: EAGLE-3 only.
        d2t: of a reduced draft vocabulary.
        fc_norm: EAGLE-3: a norm of each tapped feature.
        seed: of the weights.
        config: entries that differ in config.json.
    """
    made = json.loads((target / "config.json").read_text())
    hidden, vocab = made["hidden_size"], made["vocab_size"]
    values: dict[str, Any] = {
        "architectures": [NAMES[form]], "model_type": "mimo" if form == "mtp" else "llama",
        "hidden_size": hidden, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM, "intermediate_size": SIZE, "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5, "rope_theta": 20000.0, "vocab_size": vocab, "hidden_act": "silu",
        "max_position_embeddings": 64, "tie_word_embeddings": False, "torch_dtype": "float32",
    }  # fmt: skip
    random = torch.Generator().manual_seed(seed)
    wide, num_q, num_kv = hidden, HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    if form == "eagle3":
        wide = 2 * hidden
    shapes = {
        "self_attn.q_proj": (num_q, wide), "self_attn.k_proj": (num_kv, wide),
        "self_attn.v_proj": (num_kv, wide), "self_attn.o_proj": (hidden, num_q),
        "mlp.gate_proj": (SIZE, hidden), "mlp.up_proj": (SIZE, hidden),
        "mlp.down_proj": (hidden, SIZE), "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    layer = {"eagle3": "midlayer.", "eagle": "layers.0.", "mtp": MTP_PREFIX}[form]
    if form == "mtp":
        norms = "input_layernorm", "token_layernorm", "hidden_layernorm", "final_layernorm"
        shapes |= dict.fromkeys(norms, (hidden,)) | {"input_proj": (hidden, 2 * hidden)}
        layers = {"num_hidden_layers": made["num_hidden_layers"]}  # the target's own file
        values |= layers | {"num_nextn_predict_layers": 1, "attention_bias": True}
    elif form == "eagle3":
        shapes |= dict.fromkeys(("input_layernorm", "hidden_norm"), (hidden,))
    tensors = {f"{layer}{name}.weight": noise(shape, random) for name, shape in shapes.items()}
    if form == "mtp":
        for name in ("q", "k", "v"):
            weight = tensors[f"{layer}self_attn.{name}_proj.weight"]
            bias = torch.randn(len(weight), generator=random) * 0.3
            tensors[f"{layer}self_attn.{name}_proj.bias"] = bias
    elif form == "eagle":
        tensors |= {
            "fc.weight": noise((hidden, 2 * hidden), random),
            "fc.bias": torch.randn(hidden, generator=random) * 0.3,
        }
    else:
        tensors |= _of_eagle3(hidden, vocab, own_head, own_embedding, d2t, fc_norm, random)
        ids = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True}
        values |= {"draft_vocab_size": None if d2t is None else len(d2t), "eagle_config": ids}
    values |= config
    if values.get("norm_before_fc"):
        tensors["input_norm.weight"] = noise((3 * hidden,), random)
    directory.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in values.items() if value != "absent"}
    (directory / "config.json").write_text(json.dumps(kept))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _of_eagle3(
    hidden: int,
    vocab: int,
    own_head: bool,
    own_embedding: bool,
    d2t: Tensor | None,
    fc_norm: bool,
    random: torch.Generator,
) -> dict[str, Tensor]:
    found = {
        "fc.weight": noise((hidden, 3 * hidden), random),
        "norm.weight": noise((hidden,), random),
    }
    if own_head:
        found["lm_head.weight"] = noise((vocab if d2t is None else len(d2t), hidden), random)
    if own_embedding:
        found["embed_tokens.weight"] = noise((vocab, hidden), random)
    if d2t is not None:
        found["d2t"] = d2t
        found["t2d"] = torch.zeros(vocab, dtype=torch.bool)
        found["t2d"][torch.arange(len(d2t)) + d2t] = True
    if fc_norm:
        found |= {f"fc_norm.{i}.weight": noise((hidden,), random) for i in range(3)}
    return found


def noise(shape: Sequence[int], random: torch.Generator) -> Tensor:
    """A weight: rows that keep the size of their input, or of a norm, near one."""
    found = torch.randn(*shape, generator=random)
    return found * shape[1] ** -0.5 if len(shape) > 1 else 1 + 0.2 * found


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
    layer, file = reference.layer, directory / "model.safetensors"
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
    gated = silu(layer.project("gate_proj", normed)) * layer.project("up_proj", normed)
    weights["down_proj"] = solve(gated, goal - hidden)
    if layer.kind == "mtp":  # what is fed back is normed, as the feature of the target is
        weights["final_layernorm"] *= goal.pow(2).mean().sqrt()
    if "lm_head" in weights:
        wanted = one_hot(token, reference.vocab_size)[:, reference.ids].float()
        weights["lm_head"] = solve(layer.outputs(attended, residual)[0], SHARP * wanted - 1)
    tensors = {name: weights.get(short_name(name), each) for name, each in load_file(file).items()}
    tensors = {name: each.contiguous() for name, each in tensors.items()}
    save_file(tensors, file, metadata={"format": "pt"})


def solve(x: Tensor, y: Tensor) -> Tensor:
    """The weight of the linear layer from rows x to rows y, by ridge regression."""
    square = x.T @ x
    ridge = RIDGE * square.diagonal().mean() * torch.eye(len(square))
    return torch.linalg.solve(square + ridge, x.T @ y).T
