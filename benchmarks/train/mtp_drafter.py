"""The MTP layer of `tiny-hybrid`: gated attention and feed-forward, and its training.

Slot t holds the pair (token t, the target's output after its final norm for token t − 1); its row
says token t + 1. A draft behind the first takes the layer's own output, after `norm`. Training does
the same, as the chain drafter's.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.train.base import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, FeedForward
from benchmarks.train.chain_drafter import ChainDrafter, Rows, attended
from benchmarks.train.model import bundled_config

CONFIG = bundled_config("tiny-hybrid")
EPS, ROTARY_DIM = CONFIG["rms_norm_eps"], HEAD_DIM // 4


class CentredNorm(nn.Module):
    """RMS norm whose weight is stored minus 1."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * (1 + self.weight)


class GatedAttention(nn.Module):
    """Projections and norms; names and shapes are the checkpoint's."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, 2 * HEADS * HEAD_DIM, bias=False)  # [q | gate] a head
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.q_norm, self.k_norm = CentredNorm(HEAD_DIM), CentredNorm(HEAD_DIM)


class Layer(nn.Module):
    """A layer with attention, as the target's."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (
            CentredNorm(HIDDEN),
            CentredNorm(HIDDEN),
        )
        self.self_attn = GatedAttention()
        self.mlp = FeedForward(CONFIG["intermediate_size"])


class MtpDrafter(ChainDrafter):
    """The layer and what makes its input; its state is the checkpoint's below `mtp.`."""

    config, taps, num_drafts, fading = CONFIG, (), 4, 0.8  # no tap: the target's output

    def __init__(self, embedding: Tensor) -> None:
        nn.Module.__init__(self)
        self.fc = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = (
            CentredNorm(HIDDEN),
            CentredNorm(HIDDEN),
        )
        self.layers: Any = nn.ModuleList([Layer()])
        self.norm = CentredNorm(HIDDEN)
        self.remember(embedding, ROTARY_DIM)

    def start(self, final_norm: Tensor, features: Tensor, generator: torch.Generator) -> None:
        """Draws weights; `fc` begins as the hidden state, the last norm as the target's."""
        for weight in self.parameters():
            if weight.ndim > 1:
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5 / 2, generator=generator)
        with torch.no_grad():
            self.fc.weight[:, HIDDEN:] += torch.eye(HIDDEN)
            self.norm.weight.copy_(final_norm)

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        turned = super().turn(x[..., :ROTARY_DIM], positions)
        return torch.cat((turned, x[..., ROTARY_DIM:]), -1)

    def before(self, features: Tensor) -> Tensor:
        return features

    def mix(self, tokens: Tensor, fed: Tensor) -> Tensor:
        embedded = self.pre_fc_norm_embedding(functional.embedding(tokens, self.embedding))
        return self.fc(torch.cat((embedded, self.pre_fc_norm_hidden(fed)), -1))

    def rows(self, mixed: Tensor, slots: Tensor) -> Rows:
        layer, attention = self.layers[0], self.layers[0].self_attn
        normed = layer.input_layernorm(mixed)
        keys, values = (
            part(normed).unflatten(-1, (KV_HEADS, HEAD_DIM))
            for part in (attention.k_proj, attention.v_proj)
        )
        keys = self.turn(attention.k_norm(keys).transpose(1, 2), slots)
        return Rows(keys, values.transpose(1, 2))

    def layer(
        self, mixed: Tensor, fed: Tensor, slots: Tensor, seen: list[Rows], mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        layer, attention = self.layers[0], self.layers[0].self_attn
        queries = attention.q_proj(layer.input_layernorm(mixed))
        queries, gate = queries.unflatten(-1, (HEADS, 2, HEAD_DIM)).unbind(-2)
        queries = self.turn(attention.q_norm(queries).transpose(1, 2), slots)
        out = attended(queries, seen, mask) * torch.sigmoid(gate.flatten(2))
        hidden = mixed + attention.o_proj(out)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        output = self.norm(hidden)
        return output, output
