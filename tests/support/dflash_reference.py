"""What a DFlash drafter must propose and store: recomputed from the whole text, in plain torch.

Written from the published checkpoint forms alone. The target is run by `transformers`, in float32
and without a cache; a block attends by an explicit mask over all keys. Nothing here is shared with
the worker but the definition of the noise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, silu

from tests.support.chain_reference import behind_layers, draw, load_target, rotary_of
from worker.api import Sampling

Rows: TypeAlias = list[tuple[Tensor, Tensor]]  # of each layer, as `draft_rows` returns them
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


class DFlashReference:
    """A target and its DFlash drafter.

    Args:
        target: directory of the target, as `transformers` reads it.
        drafter: directory of the drafter, in any published form.
    """

    first_slot = 0  # of the draft region that has a row

    def __init__(self, target: Path, drafter: Path) -> None:
        config = json.loads((drafter / "config.json").read_text())
        self.config = config | (config.get("transformer_layer_config") or {})
        self.inner = config.get("dflash_config") or {}
        self.target = load_target(target)
        found: dict[str, Tensor] = {}
        for file in drafter.glob("*.safetensors"):
            found |= load_file(file)
        self.weights = {
            plain_name(name): each.float() if each.is_floating_point() else each
            for name, each in found.items()
        }
        self.num_layers = self.config["num_hidden_layers"]
        num_target = self.target.config.num_hidden_layers
        self.taps = tapped_layers(config, num_target, self.num_layers)
        self.head_dim = self.config["head_dim"]
        self.group = self.config["num_attention_heads"] // self.config["num_key_value_heads"]
        self.block_size = config.get("block_size") or self.inner["block_size"]
        own = self.weights.get("embed_tokens")
        self.embedding = self.target.get_input_embeddings().weight if own is None else own
        own = self.weights.get("lm_head")
        self.head = self.target.get_output_embeddings().weight if own is None else own
        self.ids = torch.arange(len(self.head)) + self.weights.get("d2t", 0)
        self.mask = self.weights.get("mask_embedding")
        if self.mask is None:
            token = config.get("mask_token_id", self.inner.get("mask_token_id"))
            self.mask = self.embedding[token]
        self._rotary = rotary_of(self.config, self.head_dim)
        self._texts: dict[tuple[int, ...], tuple[Tensor, Rows]] = {}
        self._drawn: dict[tuple, list[tuple[int, float]]] = {}

    def norm(self, name: str, x: Tensor) -> Tensor:
        """RMSNorm over the last dimension."""
        mean = x.pow(2).mean(-1, keepdim=True)
        return x * (mean + self.config.get("rms_norm_eps", 1e-6)).rsqrt() * self.weights[name]

    def features(self, tokens: Sequence[int]) -> Tensor:
        """[n, hidden] of each token of the text."""
        return self._of(tokens)[0][: len(tokens)]

    def heads(self, layer: int, name: str, x: Tensor, positions: Tensor) -> Tensor:
        """[n, heads, head_dim] of "q", "k" or "v" of a layer; q and k are normed and rotated."""
        at = f"layers.{layer}.self_attn.{name}"
        bias = self.weights.get(f"{at}_proj.bias")
        out = linear(x, self.weights[f"{at}_proj"], bias).unflatten(-1, (-1, self.head_dim))
        if name == "v":
            return out
        if f"{at}_norm" in self.weights:
            out = self.norm(f"{at}_norm", out)
        cos, sin = (each[0][:, None] for each in self._rotary(out, positions[None]))
        one, two = out.chunk(2, -1)
        return out * cos + torch.cat((-two, one), -1) * sin

    def draft_rows(self, tokens: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Of each layer, keys and values of slots 0 .. n - 1, [n, num_kv_heads, head_dim]."""
        rows, num = self._of(tokens)[1], len(tokens)
        return [(keys[:num], values[:num]) for keys, values in rows]

    def _of(self, tokens: Sequence[int]) -> tuple[Tensor, Rows]:
        """Features and draft rows of a text that begins so; one forward for each that is new."""
        known = tuple(tokens)
        for text, found in self._texts.items():
            if text[: len(known)] == known:
                return found
        self._texts[known] = self._read(known)
        return self._texts[known]

    @torch.no_grad()
    def _read(self, tokens: Sequence[int]) -> tuple[Tensor, Rows]:
        states, _ = behind_layers(self.target, torch.tensor(tokens))
        joined = torch.cat([states[layer] for layer in self.taps], -1)
        features = self.norm("hidden_norm", linear(joined, self.weights["fc"]))
        at = torch.arange(len(tokens))
        return features, [
            (self.heads(layer, "k", features, at), self.heads(layer, "v", features, at))
            for layer in range(self.num_layers)
        ]

    def tails(self, tokens: Sequence[int], page_size: int) -> dict[int, Tensor]:
        """None: a block needs nothing but keys and values."""
        return {}

    def drafts(
        self, tokens: Sequence[int], length: int, width: int, sampling: Sampling
    ) -> list[int]:
        """Drafts of a block of `width` tokens that begins with tokens[length], as target ids."""
        return [draft for draft, _ in self.drawn(tokens, length, width, sampling)]

    def drawn(
        self,
        tokens: Sequence[int],
        length: int,
        width: int,
        sampling: Sampling,
        block: int = 0,
    ) -> list[tuple[int, float]]:
        """See `drafts`: each with its margin, see `draw`; of a block of `block`, else `width`."""
        assert 0 < length < len(tokens)
        block = block or width
        key = tuple(tokens[: length + 1]), block, sampling.temperature, sampling.seed
        if key not in self._drawn:
            self._drawn[key] = self._propose(tokens, length, block, sampling)
        return self._drawn[key][: width - 1]

    def block(
        self,
        tokens: Sequence[int],
        length: int,
        block: int,
        seen: list[tuple[Tensor, Tensor]] | None = None,
    ) -> Tensor:
        """[block, hidden]: hidden states of a block behind its last norm.

        seen: gets for each layer what its o_proj takes, and the residual that is added to.
        """
        layers = self.draft_rows(tokens)
        hidden = self.mask.repeat(block, 1)
        hidden[0] = self.embedding[tokens[length]]
        at = torch.arange(length, length + block)
        for layer, (keys, values) in enumerate(layers):
            keys, values = keys[:length], values[:length]
            name = f"layers.{layer}"
            normed = self.norm(f"{name}.input_layernorm", hidden)
            q, k, v = (self.heads(layer, each, normed, at) for each in "qkv")
            attended = self.attend(q, torch.cat((keys, k)), torch.cat((values, v)), layer, at)
            if seen is not None:
                seen.append((attended, hidden))
            hidden = hidden + linear(
                attended, self.weights[f"{name}.self_attn.o_proj"],
                self.weights.get(f"{name}.self_attn.o_proj.bias"),
            )  # fmt: skip
            normed = self.norm(f"{name}.post_attention_layernorm", hidden)
            hidden = hidden + linear(self.gated(layer, normed), self.down(layer))
        return self.norm("norm", hidden)

    def gated(self, layer: int, normed: Tensor) -> Tensor:
        """The input of a layer's down projection."""
        at = f"layers.{layer}.mlp"
        gate, up = (linear(normed, self.weights[f"{at}.{each}_proj"]) for each in ("gate", "up"))
        return silu(gate) * up

    def down(self, layer: int) -> Tensor:
        return self.weights[f"layers.{layer}.mlp.down_proj"]

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, layer: int, at: Tensor) -> Tensor:
        """q: [n, heads, d] of rows at positions `at`; keys, values: [m, kv heads, d]."""
        keys, values = (each.repeat_interleave(self.group, 1) for each in (keys, values))
        key, row = torch.arange(len(keys)), at[:, None]
        causal, window = self.sees(layer)
        mask = key <= (row if causal else len(keys))
        if window is not None:
            mask = mask & (key > row - window)
        scores = torch.einsum("nhd,mhd->hnm", q, keys) * self.head_dim**-0.5
        shares = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return torch.einsum("hnm,mhd->nhd", shares, values).flatten(1)

    def sees(self, layer: int) -> tuple[bool, int | None]:
        """(causal, window) of a layer."""
        kinds = self.config.get("layer_types") or ["full_attention"] * self.num_layers
        sliding = kinds[layer] == "sliding_attention"
        causal = self.config.get("is_causal", self.inner.get("causal", sliding))
        if self.config.get("sliding_window_non_causal"):
            causal = False
        return causal, self.config["sliding_window"] if sliding else None

    @torch.no_grad()
    def _propose(
        self, tokens: Sequence[int], length: int, block: int, sampling: Sampling
    ) -> list[tuple[int, float]]:
        rows = self.block(tokens, length, block)[1:]
        at = torch.arange(length + 1, length + block)
        seed = torch.tensor([sampling.seed]).expand(len(at))
        vocab_size = self.target.config.vocab_size
        logits = linear(rows, self.head)
        drafts, margins = draw(logits, self.ids, sampling.temperature, seed, at, vocab_size)
        return list(zip(drafts.tolist(), margins.tolist(), strict=True))
