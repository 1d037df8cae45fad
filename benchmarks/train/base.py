"""What drafters of the model `tiny` have in common while they are trained."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.train.answers import Batch, Speaker, batches, set_right
from benchmarks.train.data import IGNORED
from benchmarks.train.model import CONFIG as TARGET
from benchmarks.train.model import Recipe

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
SHAPE = {key: TARGET[key] for key in SAME_AS_TARGET}
HIDDEN, INNER, EPS = TARGET["hidden_size"], TARGET["intermediate_size"], TARGET["rms_norm_eps"]
HEADS, KV_HEADS, HEAD_DIM = (
    TARGET[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
)


class FeedForward(nn.Module):
    """The gated feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Drafter(nn.Module):
    """A drafter that borrows the target's embedding and head; its state is the checkpoint's.

    Args:
        embedding: [vocab, hidden] of the target, tied to its head.
    """

    taps: ClassVar[tuple[int, ...]]  # features are the target's residual after these layers
    num_drafts: ClassVar[int]  # of one window, whose first token is certain
    config: ClassVar[dict[str, Any]]  # config.json
    # Of each draft's loss, relative to that of the draft before it: a draft counts only if all
    # before it are right.
    fading: ClassVar[float]

    embedding: Tensor
    cos: Tensor  # [positions, HEAD_DIM]
    sin: Tensor

    def __init__(self, embedding: Tensor) -> None:
        super().__init__()
        self.fc = nn.Linear(len(self.taps) * HIDDEN, HIDDEN, bias=False)
        self.norm = nn.RMSNorm(HIDDEN, EPS)
        self.register_buffer("embedding", embedding.detach().clone(), persistent=False)
        half = torch.arange(0, HEAD_DIM, 2) / HEAD_DIM
        positions = torch.arange(TARGET["max_position_embeddings"] + self.num_drafts + 1)
        angles = torch.outer(positions, TARGET["rope_theta"] ** -half).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def start(self, final_norm: Tensor, features: Tensor, generator: torch.Generator) -> None:
        """Draws weights; `fc` begins as the feature of the last tap, at a size of about one.

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

    def learn(self, batch: Batch, number: int) -> Iterator[Tensor]:
        """Logits [batch, anchors, vocab] of draft 1, 2, … of all anchors, in step `number`."""
        raise NotImplementedError

    def drafts(self, batch: Batch) -> Tensor:
        """[num_drafts, batch, anchors] i64: what is drafted behind each anchor, as served."""
        raise NotImplementedError

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotary embedding of x [batch, heads, rows, HEAD_DIM] at positions [batch, rows]."""
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin


AnyDrafter = TypeVar("AnyDrafter", bound=Drafter)


@dataclass(frozen=True, slots=True)
class Lesson:
    """How long and how fast to learn."""

    steps: int
    batch: int = 16  # chats of a step
    peak_lr: float = 1e-2
    round: int = 1024  # chats that the target reads at once and whose features stay in memory
    passes: int = 2  # over the chats of a round


def train_drafter(
    kind: type[AnyDrafter],
    speaker: Speaker,
    tokenizer: Tokenizer,
    lesson: Lesson,
    seed: int,
    device: str,
) -> tuple[AnyDrafter, list[float]]:
    """A trained drafter and the loss of every step; prints its progress."""
    rng, started = random.Random(seed), time.monotonic()
    drafter = kind(speaker.model.model.embed_tokens.weight)
    some = torch.cat([item.features for item in speaker.said(tokenizer, rng, STARTING_CHATS)])
    generator = torch.Generator().manual_seed(seed)
    drafter.start(speaker.model.model.norm.weight.cpu(), some, generator)
    drafter.to(device)
    optimizers, losses = _optimizers(drafter), []
    recipe = Recipe(lesson.steps, lesson.peak_lr, warmup_steps=WARMUP_STEPS)
    weights = kind.fading ** torch.arange(kind.num_drafts, device=device)
    text = _text(speaker, tokenizer, lesson, rng, kind.num_drafts, device)
    for batch in islice(text, lesson.steps):
        for group in (group for each in optimizers for group in each.param_groups):
            group["lr"] = recipe.lr(len(losses))
        parts = draft_losses(drafter, batch, len(losses))
        (parts * weights[: len(parts)]).sum().backward()
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


def draft_losses(drafter: Drafter, batch: Batch, number: int) -> Tensor:
    """[drafts]: mean cross entropy of each draft against what the target says."""
    return torch.stack(
        [
            functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
            for logits, labels in zip(drafter.learn(batch, number), batch.labels, strict=False)
        ]
    )


def save_drafter(drafter: Drafter, folder: Path) -> int:
    """Writes bfloat16 weights and the config; returns the number of parameters."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: weight.detach().to("cpu", torch.bfloat16).contiguous()
        for name, weight in drafter.state_dict().items()
    }
    file = folder / "model.safetensors"
    save_file(weights, str(file), metadata={"format": "pt"})
    file.chmod(0o644)
    (folder / "config.json").write_text(json.dumps(drafter.config, indent=2) + "\n", "utf-8")
    return sum(weight.numel() for weight in weights.values())


def load_drafter(kind: type[AnyDrafter], folder: Path, embedding: Tensor) -> AnyDrafter:
    """The saved drafter, its weights in float32."""
    drafter = kind(embedding)
    saved = load_file(str(folder / "model.safetensors"))
    drafter.load_state_dict({name: weight.float() for name, weight in saved.items()})
    return drafter.to(embedding.device)


def _text(
    speaker: Speaker,
    tokenizer: Tokenizer,
    lesson: Lesson,
    rng: random.Random,
    num_drafts: int,
    device: str,
) -> Iterator[Batch]:
    """Batches without end."""
    while True:
        said = speaker.said(tokenizer, rng, lesson.round)
        for _ in range(lesson.passes):
            for alike in batches(said, lesson.batch, rng):
                yield set_right(alike, num_drafts, device)


def _optimizers(drafter: Drafter) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the norms.

    With Muon at 1e-2 the first draft's loss is 0.49 after 100 steps, with AdamW at 5e-3 it is 1.35.
    """
    matrices = [weight for weight in drafter.parameters() if weight.ndim > 1]
    vectors = [weight for weight in drafter.parameters() if weight.ndim == 1]
    return [
        torch.optim.Muon(matrices, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(vectors, weight_decay=0.0),
    ]
