"""The model `tiny`: a Qwen3 of 2.9 million parameters, its training loop and its files."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from benchmarks.train.data import IGNORED

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

EOS_ID, PAD_ID = 2, 0  # <|im_end|>, <|endoftext|>
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 1024,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "use_cache": True,
    "use_sliding_window": False,
    "bos_token_id": None,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """How long and how fast to learn."""

    steps: int
    peak_lr: float = 2e-3
    warmup_steps: int = 200
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.98)
    clip: float = 1.0

    def lr(self, step: int) -> float:
        """Linear warmup, then a cosine down to a hundredth of the peak."""
        warmup = min(self.warmup_steps, max(1, self.steps // 10))
        if step < warmup:
            return self.peak_lr * (step + 1) / warmup
        progress = (step - warmup) / max(1, self.steps - warmup)
        return self.peak_lr * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def new_model(seed: int) -> Qwen3ForCausalLM:
    """The model with fresh float32 weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM  # takes seconds

    torch.manual_seed(seed)
    settings = {key: value for key, value in CONFIG.items() if key != "torch_dtype"}
    return Qwen3ForCausalLM(Qwen3Config(**settings)).float()


def train(
    model: Qwen3ForCausalLM, loader: DataLoader, recipe: Recipe, device: str, compiled: bool
) -> None:
    """Trains in place: float32 weights, bfloat16 matrix products on a GPU; prints its progress."""
    on_gpu = device.startswith("cuda")
    nn.Module.to(model, device).train()  # transformers' types of its `to` are wrong
    optimizer = _optimizer(model, recipe, on_gpu)
    loss_of = torch.compile(_loss, dynamic=False) if compiled else _loss
    started, num_tokens = time.monotonic(), 0
    for step, (ids, labels) in enumerate(loader):
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr(step)
        ids = ids.to(device, non_blocking=True).long()
        labels = labels.to(device, non_blocking=True).long()
        with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu):
            loss = loss_of(model, ids, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        num_tokens += ids.numel()
        if step % 50 == 0 or step + 1 == recipe.steps:
            elapsed_s = time.monotonic() - started
            print(
                f"step {step} loss {loss.item():.4f} "
                f"{num_tokens / elapsed_s / 1e3:.0f}k tokens/s {elapsed_s:.0f} s",
                flush=True,
            )


def save_model(model: Qwen3ForCausalLM, folder: Path) -> int:
    """Writes bfloat16 weights and both configs; returns the number of parameters."""
    weights = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    file = folder / "model.safetensors"
    save_file(weights, str(file), metadata={"format": "pt"})
    file.chmod(0o644)
    generation = {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID, "do_sample": False}
    for name, value in (("config.json", CONFIG), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", "utf-8")
    return sum(tensor.numel() for tensor in weights.values())


def _loss(model: Qwen3ForCausalLM, ids: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of the answers' tokens; ids and labels are [rows, length]."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    logits = model.lm_head(hidden).float()
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def _optimizer(model: nn.Module, recipe: Recipe, fused: bool) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.peak_lr, betas=recipe.betas, fused=fused)
