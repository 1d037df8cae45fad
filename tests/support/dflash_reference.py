"""What a DFlash drafter must propose and store: recomputed from the whole text, in plain torch.

Written from the published checkpoint forms alone. The target is run by `transformers`, in float32
and without a cache; a block attends by an explicit mask over all keys. Nothing here is shared with
the worker but the definition of the noise.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.chain_reference import Drawn, Reference, Rows, Weights
from worker.api import Sampling

ALIASES = {"encoder.fc": "fc", "encoder.output_norm_enc": "hidden_norm"}


def plain_name(name: str) -> str:
    """A tensor's name without what differs between the forms."""
    name = name.removesuffix(".weight").removeprefix("model.")
    return ALIASES.get(name, name)


def tapped_layers(config: Mapping[str, Any], num_layers: int, num_own: int) -> list[int]:
    """Layers of the target behind which the residual is tapped, counted from 0."""
    inputs = config.get("aux_hidden_state_layer_ids")  # speculators
    if inputs is not None:
        return [layer - 1 for layer in inputs]
    found = (config.get("dflash_config") or {}).get("target_layer_ids")
    if found is not None:
        return list(found)
    if num_own == 1:
        return [num_layers // 2]
    step = (num_layers - 3 - 1) / (num_own - 1)
    return [round(1 + step * number) for number in range(num_own)]


class DFlashReference(Reference):
    """A target and its DFlash drafter in any published form, by directories."""

    def __init__(self, target: Path, drafter: Path) -> None:
        self.net = net = Weights(drafter, plain_name)
        super().__init__(target, net)
        self.config, self.inner = net.config, net.config.get("dflash_config") or {}
        self.num_layers = self.config["num_hidden_layers"]
        num_target = self.target.config.num_hidden_layers
        self.taps = tapped_layers(self.config, num_target, self.num_layers)
        self.mask = net.weights.get("mask_embedding")
        if self.mask is None:
            token = self.config.get("mask_token_id", self.inner.get("mask_token_id"))
            self.mask = self.embedding[token]

    def block(
        self, tokens: Sequence[int], length: int, block: int, seen: Rows | None = None
    ) -> Tensor:
        """[block, hidden]: hidden states of a block behind its last norm.

        seen: gets for each layer what its o_proj takes, and the residual that is added to.
        """
        net, hidden = self.net, self.mask.repeat(block, 1)
        hidden[0] = self.embedding[tokens[length]]
        at = torch.arange(length, length + block)
        for layer, (keys, values) in enumerate(self.draft_rows(tokens)):
            name = f"layers.{layer}"
            normed = net.norm(f"{name}.input_layernorm", hidden)
            q, k, v = (net.heads(f"{name}.self_attn.{each}", normed, at) for each in "qkv")
            keys, values = torch.cat((keys[:length], k)), torch.cat((values[:length], v))
            attended = net.attend(q, keys, values, self.sees(layer, at, len(keys)))
            if seen is not None:
                seen.append((attended, hidden))
            hidden = hidden + net.project(f"{name}.self_attn.o_proj", attended)
            normed = net.norm(f"{name}.post_attention_layernorm", hidden)
            gated = net.gated(normed, f"{name}.mlp.")
            hidden = hidden + net.project(f"{name}.mlp.down_proj", gated)
        return net.norm("norm", hidden)

    def sees(self, layer: int, at: Tensor, num_keys: int) -> Tensor:
        """[n, num_keys]: which keys the rows at positions `at` of a layer attend to."""
        kinds = self.config.get("layer_types") or ["full_attention"] * self.num_layers
        sliding = kinds[layer] == "sliding_attention"
        causal = self.config.get("is_causal", self.inner.get("causal", sliding))
        if self.config.get("sliding_window_non_causal"):
            causal = False
        key, row = torch.arange(num_keys), at[:, None]
        mask = key <= (row if causal else num_keys)
        return mask & (key > row - self.config["sliding_window"]) if sliding else mask

    def _read(self, ids: Tensor, behind: list[Tensor], last: Tensor) -> tuple[Tensor, Rows]:
        joined = torch.cat([behind[layer] for layer in self.taps], -1)
        features = self.net.norm("hidden_norm", self.net.project("fc", joined))
        at, heads = torch.arange(len(ids)), self.net.heads
        names = [f"layers.{i}.self_attn" for i in range(self.num_layers)]
        return features, [
            (heads(f"{each}.k", features, at), heads(f"{each}.v", features, at)) for each in names
        ]

    @torch.no_grad()
    def _propose(self, tokens: Sequence[int], length: int, block: int, sampling: Sampling) -> Drawn:
        at = torch.arange(length + 1, length + block)
        return self._draw(self.block(tokens, length, block)[1:], at, sampling)
