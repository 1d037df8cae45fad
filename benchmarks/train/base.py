"""What drafters of the model `tiny` have in common while they are trained."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, ClassVar, TypeAlias, TypeVar

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.train.answers import Batch, Speaker, batches, set_right
from benchmarks.train.data import IGNORED
from benchmarks.train.model import Recipe, bundled_config

TARGET = bundled_config("tiny")
WARMUP_STEPS, PRINTED_EVERY = 20, 25
STARTING_CHATS = 32  # whose features say how large the first weights are
HIDDEN, EPS = TARGET["hidden_size"], TARGET["rms_norm_eps"]
INNER, ROPE_THETA = (
    bundled_config("tiny-chain")[key] for key in ("intermediate_size", "rope_theta")
)
HEADS, KV_HEADS, HEAD_DIM = (
    TARGET[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
)


class FeedForward(nn.Module):
    """The gated feed-forward part."""

    def __init__(self, inner: int = INNER) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, inner, bias=False)
        self.up_proj = nn.Linear(HIDDEN, inner, bias=False)
        self.down_proj = nn.Linear(inner, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


Norm: TypeAlias = Callable[[int], nn.Module]  # of vectors of that size
RMS_NORM: Norm = partial(nn.RMSNorm, eps=EPS)


class Attention(nn.Module):
    """Projections and norms of an attention; names and shapes are the checkpoint's.

    gated: a query head's numbers stand before its gate's.
    """

    def __init__(self, width: int, norm: Norm | None = None, *, gated: bool = False) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, (1 + gated) * HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(width, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(width, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.q_norm, self.k_norm = (norm(HEAD_DIM) if norm else nn.Identity() for _ in range(2))


class Layer(nn.Module):
    """A layer as Qwen3 has it."""

    def __init__(self, norm: Norm, attention: Attention, inner: int = INNER) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = norm(HIDDEN), norm(HIDDEN)
        self.self_attn = attention
        self.mlp = FeedForward(inner)

    def after(self, hidden: Tensor) -> Tensor:
        """What follows the attention."""
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def heads(x: Tensor, part: nn.Linear) -> Tensor:
    """[batch, heads, rows, HEAD_DIM]: a projection of x [batch, rows, width]."""
    return part(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)


class Drafter(nn.Module):
    """A drafter that borrows the target's embedding and head; its state is the checkpoint's."""

    taps: ClassVar[Sequence[int]]  # features are the target's residual after these layers
    num_drafts: ClassVar[int]  # of one window, whose first token is certain
    config: ClassVar[dict[str, Any]]  # config.json
    fading: ClassVar[float]  # of a draft's loss: it counts only if all drafts before it are right

    embedding: Tensor  # [vocab, hidden] of the target, tied to its head
    cos: Tensor  # [positions, HEAD_DIM]
    sin: Tensor

    def __init__(self, embedding: Tensor) -> None:
        super().__init__()
        self.fc = nn.Linear(len(self.taps) * HIDDEN, HIDDEN, bias=False)
        self.norm = nn.RMSNorm(HIDDEN, EPS)
        self.remember(embedding, HEAD_DIM)

    def remember(self, embedding: Tensor, rotary_dim: int) -> None:
        """Keep the target's embedding, and angles for so many numbers of a head."""
        self.register_buffer("embedding", embedding.detach().clone(), persistent=False)
        half = torch.arange(0, rotary_dim, 2) / rotary_dim
        positions = torch.arange(TARGET["max_position_embeddings"] + self.num_drafts + 1)
        angles = torch.outer(positions, ROPE_THETA**-half).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def start(self, final_norm: Tensor, features: Tensor, generator: torch.Generator) -> None:
        """Draws weights; `fc` begins as the feature of the last tap, at a size of about one.

        The norm begins as the target's last one; features [num, taps · hidden] are of some text.
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
    seed: int = 0
    device: str = "cpu"


def train_drafter(
    kind: type[AnyDrafter], speaker: Speaker, tokenizer: Tokenizer, lesson: Lesson
) -> tuple[AnyDrafter, list[float]]:
    """A trained drafter and the loss of every step; prints its progress."""
    rng, started = random.Random(lesson.seed), time.monotonic()
    drafter = kind(speaker.model.model.embed_tokens.weight)
    some = torch.cat([item.features for item in speaker.said(tokenizer, rng, STARTING_CHATS)])
    generator = torch.Generator().manual_seed(lesson.seed)
    drafter.start(speaker.model.model.norm.weight.cpu(), some, generator)
    drafter.to(lesson.device)
    optimizers, losses = _optimizers(drafter), []
    recipe = Recipe(lesson.steps, lesson.peak_lr, warmup_steps=WARMUP_STEPS)
    weights = kind.fading ** torch.arange(kind.num_drafts, device=lesson.device)

    def text() -> Iterator[Batch]:
        while True:
            said = speaker.said(tokenizer, rng, lesson.round)
            for _ in range(lesson.passes):
                for alike in batches(said, lesson.batch, rng):
                    yield set_right(alike, kind.num_drafts, lesson.device)

    for batch in islice(text(), lesson.steps):
        parts = draft_losses(drafter, batch, len(losses))
        recipe.step(len(losses), (parts * weights[: len(parts)]).sum(), drafter, optimizers)
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
