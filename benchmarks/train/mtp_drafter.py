"""The MTP layer of `tiny-hybrid`, gated attention and feed-forward, and its training; and that of
`tiny-hybrid-moe`, whose feed-forward is experts.

Slot t holds the pair (token t, the target's output after its final norm for token t − 1); its row
says token t + 1. A draft behind the first takes the layer's own output, after `norm`. Training does
the same, as the chain drafter's.
"""

from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.train.base import HEAD_DIM, HEADS, HIDDEN, Attention, Layer
from benchmarks.train.chain_drafter import ChainDrafter, Rows, attended
from benchmarks.train.experts import Experts, divided
from benchmarks.train.model import ASSETS, bundled_config

CONFIG, SPARSE = (bundled_config(name) for name in ("tiny-hybrid", "tiny-hybrid-moe"))
EPS, ROTARY_DIM = CONFIG["rms_norm_eps"], HEAD_DIM // 4


class CentredNorm(nn.Module):
    """RMS norm whose weight is stored minus 1."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * (1 + self.weight)


class MtpDrafter(ChainDrafter):
    """The layer and what makes its input; its state is the checkpoint's below `mtp.`."""

    config, taps, num_drafts, fading = CONFIG, (), 4, 0.8  # no tap: the target's output

    def __init__(self, embedding: Tensor) -> None:
        nn.Module.__init__(self)
        self.fc = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.pre_fc_norm_embedding = CentredNorm(HIDDEN)
        self.pre_fc_norm_hidden = CentredNorm(HIDDEN)
        attention = Attention(HIDDEN, CentredNorm, gated=True)
        layer = Layer(CentredNorm, attention, CONFIG["intermediate_size"])
        self.layers = nn.ModuleList([layer])
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

    @property
    def only(self) -> Any:
        return self.layers[0]

    def rows(self, mixed: Tensor, slots: Tensor) -> Rows:
        return super().rows(self.only.input_layernorm(mixed), slots)

    def layer(
        self, mixed: Tensor, fed: Tensor, slots: Tensor, seen: list[Rows], mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        layer, attention = self.only, self.only.self_attn
        queries = attention.q_proj(layer.input_layernorm(mixed))
        queries, gate = queries.unflatten(-1, (HEADS, 2, HEAD_DIM)).unbind(-2)
        queries = self.turn(attention.q_norm(queries).transpose(1, 2), slots)
        out = attended(queries, seen, mask) * torch.sigmoid(gate.flatten(2))
        output = self.norm(layer.after(mixed + attention.o_proj(out)))
        return output, output


class SparseMtpDrafter(MtpDrafter):
    """The same of experts; it begins as `tiny-hybrid`'s layer, divided."""

    config = SPARSE

    def __init__(self, embedding: Tensor) -> None:
        super().__init__(embedding)
        self.only.mlp = Experts(SPARSE)

    def start(self, final_norm: Tensor, features: Tensor, generator: torch.Generator) -> None:
        dense = load_file(str(ASSETS / "tiny-hybrid" / "mtp.safetensors"))
        begun = divided(dense, SPARSE, generator.initial_seed())
        self.load_state_dict({name.removeprefix("mtp."): w.float() for name, w in begun.items()})
