"""The chain drafter of the model `tiny`: one layer in the published EAGLE-3 form, and its training.

Slot t of the drafter holds the pair (token t, g of token t − 1), where g is `fc` of the target's
features; its row says token t + 1. A draft behind the first takes the drafter's own output as g.
Training does the same ("training-time test"): a row of step k sees the rows of the target's
features up to its anchor, and behind them its own rows of the steps before.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.train.answers import Batch, Speaker, batches, set_right
from benchmarks.train.data import IGNORED
from benchmarks.train.model import CONFIG as TARGET
from benchmarks.train.model import Recipe

TAPS = (1, 2, 4)  # features are the target's residual after these layers
WIDTH = 5  # of a verify window: one certain token and the drafts
NUM_DRAFTS = WIDTH - 1
STEP_WEIGHT = 0.8  # of a draft's loss, relative to that of the draft before it
WARMUP_STEPS, PRINTED_EVERY = 20, 25
STARTING_CHATS = 32  # whose features say how large the first weights are
SAME_AS_TARGET = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "rope_theta",
    "max_position_embeddings",
    "attention_bias",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "torch_dtype",
)
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    **{key: TARGET[key] for key in SAME_AS_TARGET},
    "num_hidden_layers": 1,
    "tie_word_embeddings": False,
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": list(TAPS),
        "use_aux_hidden_state": True,
    },
}
HIDDEN, INNER = TARGET["hidden_size"], TARGET["intermediate_size"]
HEADS, KV_HEADS, HEAD_DIM = (
    TARGET[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
)


class SelfAttention(nn.Module):
    """The projections; their names and shapes are the checkpoint's."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(2 * HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(2 * HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(2 * HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)


class FeedForward(nn.Module):
    """The gated feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """The drafter's only layer; its attention takes the token beside the feature."""

    def __init__(self) -> None:
        super().__init__()
        eps = TARGET["rms_norm_eps"]
        self.input_layernorm = nn.RMSNorm(HIDDEN, eps)
        self.hidden_norm = nn.RMSNorm(HIDDEN, eps)
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, eps)
        self.self_attn = SelfAttention()
        self.mlp = FeedForward()


@dataclass(frozen=True, slots=True)
class Rows:
    """What the rows of one draft step leave for those of later steps."""

    keys: Tensor  # [batch, KV_HEADS, rows, HEAD_DIM]
    values: Tensor  # [batch, KV_HEADS, rows, HEAD_DIM]


class ChainDrafter(nn.Module):
    """An EAGLE-3 drafter that borrows the target's embedding and head.

    Args:
        embedding: [vocab, hidden] of the target, tied to its head.
    """

    embedding: Tensor
    cos: Tensor  # [slots, HEAD_DIM]
    sin: Tensor

    def __init__(self, embedding: Tensor) -> None:
        super().__init__()
        self.fc = nn.Linear(len(TAPS) * HIDDEN, HIDDEN, bias=False)
        self.midlayer = Layer()
        self.norm = nn.RMSNorm(HIDDEN, TARGET["rms_norm_eps"])
        self.register_buffer("embedding", embedding.detach().clone(), persistent=False)
        half = torch.arange(0, HEAD_DIM, 2) / HEAD_DIM
        slots = torch.arange(TARGET["max_position_embeddings"] + WIDTH)
        angles = torch.outer(slots, TARGET["rope_theta"] ** -half).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def start(self, final_norm: Tensor, features: Tensor, generator: torch.Generator) -> None:
        """Draws weights; g begins as the feature of the last tap, at a size of about one.

        Args:
            final_norm: weight of the target's last norm, with which this one begins.
            features: [num, taps · hidden] of some text, for the size of the last tap.
            generator: of the random part.
        """
        for weight in self.parameters():
            if weight.ndim > 1:
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5 / 2, generator=generator)
        size = features[:, -HIDDEN:].square().mean().sqrt()
        with torch.no_grad():
            self.fc.weight.div_(4 * size)
            self.fc.weight[:, -HIDDEN:] += torch.eye(HIDDEN) / size
            self.norm.weight.copy_(final_norm)

    def forward(self, batch: Batch, own: bool = False) -> Iterator[Tensor]:
        """Logits [batch, anchors, vocab] of drafts 1 … NUM_DRAFTS of all anchors at once.

        Args:
            batch: chats, the features of their tokens and their anchors.
            own: feed the drafter's own tokens back, as served, rather than the text's.
        """
        context = self.fc(batch.features)
        num_rows, num_anchors = context.shape[1], batch.num_anchors
        anchored = slice(num_rows - num_anchors, num_rows)
        mixed = self._mix(batch.tokens(0, num_rows), context)
        seen = [self._rows(mixed, batch.slots)]
        hidden, mixed = context[:, anchored], mixed[:, anchored]
        for step in range(NUM_DRAFTS):
            slots = batch.slots[:, anchored] + step
            if step > 0:
                seen.append(self._rows(mixed, slots))
            hidden = self._layer(mixed, hidden, slots, seen, batch.mask)
            logits = functional.linear(self.norm(hidden), self.embedding)
            yield logits
            tokens = logits.argmax(-1) if own else batch.tokens(step + 1, num_anchors)
            mixed = self._mix(tokens, hidden)

    def _mix(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        layer = self.midlayer
        embedded = functional.embedding(tokens, self.embedding)
        return torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(hidden)), -1)

    def _rows(self, mixed: Tensor, slots: Tensor) -> Rows:
        attention = self.midlayer.self_attn
        keys, values = (
            part(mixed).unflatten(-1, (KV_HEADS, HEAD_DIM)).transpose(1, 2)
            for part in (attention.k_proj, attention.v_proj)
        )
        return Rows(self._turn(keys, slots), values)

    def _layer(
        self, mixed: Tensor, hidden: Tensor, slots: Tensor, seen: list[Rows], mask: Tensor
    ) -> Tensor:
        layer, num_anchors = self.midlayer, mixed.shape[1]
        queries = layer.self_attn.q_proj(mixed).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)
        queries = self._turn(queries, slots).unflatten(1, (KV_HEADS, -1)) * HEAD_DIM**-0.5
        context, *own = seen
        grouped = queries.flatten(2, 3)  # the query heads of one kv head, one behind the other
        scores = (grouped @ context.keys.transpose(2, 3)).view(*queries.shape[:4], -1) + mask
        parts = [scores, *((queries * rows.keys[:, :, None]).sum(-1, keepdim=True) for rows in own)]
        weights = torch.cat(parts, -1).softmax(-1)
        num_rows = scores.shape[-1]
        found = (weights[..., :num_rows].flatten(2, 3) @ context.values).view_as(queries)
        for place, rows in enumerate(own):
            found = found + weights[..., num_rows + place, None] * rows.values[:, :, None]
        found = found.flatten(1, 2).transpose(1, 2).reshape(-1, num_anchors, HEADS * HEAD_DIM)
        hidden = hidden + layer.self_attn.o_proj(found)
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def _turn(self, x: Tensor, slots: Tensor) -> Tensor:
        """Rotary embedding; x is [batch, heads, rows, HEAD_DIM]."""
        cos, sin = self.cos[slots][:, None], self.sin[slots][:, None]
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin


@dataclass(frozen=True, slots=True)
class Lesson:
    """How long and how fast to learn."""

    steps: int
    batch: int = 16  # chats of a step
    peak_lr: float = 1e-2
    round: int = 1024  # chats that the target reads at once and whose features stay in memory
    passes: int = 2  # over the chats of a round


def train_drafter(
    speaker: Speaker, tokenizer: Tokenizer, lesson: Lesson, seed: int, device: str
) -> tuple[ChainDrafter, list[float]]:
    """A trained drafter and the loss of every step; prints its progress."""
    rng, started = random.Random(seed), time.monotonic()
    drafter = ChainDrafter(speaker.model.model.embed_tokens.weight)
    some = torch.cat([item.features for item in speaker.said(tokenizer, rng, STARTING_CHATS)])
    generator = torch.Generator().manual_seed(seed)
    drafter.start(speaker.model.model.norm.weight.cpu(), some, generator)
    drafter.to(device)
    optimizers, losses = _optimizers(drafter), []
    recipe = Recipe(lesson.steps, lesson.peak_lr, warmup_steps=WARMUP_STEPS)
    weights = STEP_WEIGHT ** torch.arange(NUM_DRAFTS, device=device)
    for batch in islice(_text(speaker, tokenizer, lesson, rng, device), lesson.steps):
        for group in (group for each in optimizers for group in each.param_groups):
            group["lr"] = recipe.lr(len(losses))
        parts = draft_losses(drafter, batch)
        (parts * weights).sum().backward()
        nn.utils.clip_grad_norm_(drafter.parameters(), recipe.clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(parts.mean().item())
        if len(losses) % PRINTED_EVERY == 0:
            by_draft = " ".join(f"{part:.3f}" for part in parts.tolist())
            elapsed_s = time.monotonic() - started
            print(f"step {len(losses)} loss by draft {by_draft} {elapsed_s:.0f} s", flush=True)
    return drafter, losses


def draft_losses(drafter: ChainDrafter, batch: Batch) -> Tensor:
    """[drafts]: mean cross entropy of each draft against what the target says."""
    return torch.stack(
        [
            functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
            for logits, labels in zip(drafter(batch), batch.labels, strict=True)
        ]
    )


def save_drafter(drafter: ChainDrafter, folder: Path) -> int:
    """Writes bfloat16 weights and the config; returns the number of parameters."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: weight.detach().to("cpu", torch.bfloat16).contiguous()
        for name, weight in drafter.state_dict().items()
    }
    file = folder / "model.safetensors"
    save_file(weights, str(file), metadata={"format": "pt"})
    file.chmod(0o644)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", "utf-8")
    return sum(weight.numel() for weight in weights.values())


def load_drafter(folder: Path, embedding: Tensor) -> ChainDrafter:
    """The saved drafter, its weights in float32."""
    drafter = ChainDrafter(embedding)
    saved = load_file(str(folder / "model.safetensors"))
    drafter.load_state_dict({name: weight.float() for name, weight in saved.items()})
    return drafter.to(embedding.device)


def _text(
    speaker: Speaker, tokenizer: Tokenizer, lesson: Lesson, rng: random.Random, device: str
) -> Iterator[Batch]:
    """Batches without end."""
    while True:
        said = speaker.said(tokenizer, rng, lesson.round)
        for _ in range(lesson.passes):
            for alike in batches(said, lesson.batch, rng):
                yield set_right(alike, NUM_DRAFTS, device)


def _optimizers(drafter: ChainDrafter) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the norms.

    With Muon at 1e-2 the first draft's loss is 0.49 after 100 steps, with AdamW at 5e-3 it is 1.35.
    """
    matrices = [weight for weight in drafter.parameters() if weight.ndim > 1]
    vectors = [weight for weight in drafter.parameters() if weight.ndim == 1]
    return [
        torch.optim.Muon(matrices, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(vectors, weight_decay=0.0),
    ]
