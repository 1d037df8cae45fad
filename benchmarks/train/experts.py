"""Layers of experts: one as a drafter is trained with it, and one made of a dense feed-forward.

A dense layer is divided ("sparse upcycling", Komatsuzaki et al., arXiv:2212.05055): part of it
becomes the shared expert, the rest is cut into `num_experts_per_tok` parts of which there are two
experts each. The router's rows of the two are opposite, so the experts of the largest scores are
one of each pair, and the layer begins as the dense one but for its small weights.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.accuracy import load_model
from benchmarks.train.base import HIDDEN, FeedForward
from benchmarks.train.model import ASSETS, CONFIGS, save

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
ROUTER_STD = 0.01  # scores of a pair begin alike, so each expert begins with an equal weight


class Experts(nn.Module):
    """Experts and a shared one, as Qwen3-Next and Qwen3.5 MoE have them and name them."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.top_k: int = config["num_experts_per_tok"]
        width, number = config["moe_intermediate_size"], config["num_experts"]
        self.gate = nn.Linear(HIDDEN, number, bias=False)
        self.experts = nn.ModuleList(FeedForward(width) for _ in range(number))
        self.shared_expert = FeedForward(config["shared_expert_intermediate_size"])
        self.shared_expert_gate = nn.Linear(HIDDEN, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        best, ids = scores.topk(self.top_k, -1)
        weights = torch.zeros_like(scores).scatter(-1, ids, best / best.sum(-1, keepdim=True))
        out = torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        for number, expert in enumerate(self.experts):
            out = out + weights[..., number, None] * expert(x)
        return out


def new_divided(name: str, dense: str, folder: Path, seed: int) -> Any:
    """The model `name`, in float32, made of the bundled `dense`; it is saved to `folder`, too."""
    weights = load_file(str(ASSETS / dense / "model.safetensors"))
    config = CONFIGS[name]
    save(divided(weights, config, seed), folder, config=config)
    return load_model(folder)[0]


def divided(dense: Mapping[str, Tensor], config: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    """The weights of a model or a layer, all feed-forwards as experts; by checkpoint names."""
    made, generator = dict[str, Tensor](), torch.Generator().manual_seed(seed)
    blocks = dict[str, dict[str, Tensor]]()
    for name, weight in dense.items():
        block, inside, part = name.partition(".mlp.")
        if inside:
            blocks.setdefault(block, {})[part.removesuffix(".weight")] = weight.float()
        else:
            made[name] = weight
    for block, parts in blocks.items():
        experts = _experts([parts[name] for name in PROJECTIONS], config, generator)
        made |= {f"{block}.mlp.{name}.weight": weight for name, weight in experts.items()}
    return made


def _experts(
    dense: list[Tensor], config: Mapping[str, Any], generator: torch.Generator
) -> dict[str, Tensor]:
    """Of gate and up [inner, hidden] and down [hidden, inner]: the block's weights by name."""
    top_k, number, width, shared = (
        config[name]
        for name in (
            "num_experts_per_tok", "num_experts", "moe_intermediate_size",
            "shared_expert_intermediate_size",
        )
    )  # fmt: skip
    assert number == 2 * top_k
    assert len(dense[0]) == shared + top_k * width
    rows = torch.randn(top_k, dense[0].shape[1], generator=generator) * ROUTER_STD
    made = {
        "gate": torch.cat((rows, -rows)),
        "shared_expert_gate": torch.zeros(1, dense[0].shape[1]),  # its sigmoid is a half
    }

    def put(block: str, start: int, size: int, factor: float) -> None:
        *first, down = dense
        parts = [weight[start : start + size] for weight in first]
        parts.append(down[:, start : start + size] * factor)
        made.update({f"{block}.{n}": part for n, part in zip(PROJECTIONS, parts, strict=True)})

    put("shared_expert", 0, shared, 2)
    for expert in range(number):
        put(f"experts.{expert}", shared + expert % top_k * width, width, top_k)
    return made
