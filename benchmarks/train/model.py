"""The bundled models, their training loop and their files.

`tiny` is a Qwen3 of 2.4 million parameters, `tiny-hybrid` a Qwen3.5 of 1.4, three of four of its
layers recurrent, `tiny-moe` a Qwen3-MoE of 1.8, of which a token has two of eight experts,
`tiny-hybrid-moe` a Qwen3.5 MoE of 1.9, made of `tiny-hybrid` (see experts.py), `tiny-oss` a gpt-oss
of 2.2 with experts in MXFP4 (see harmony.py), `tiny-latent` a GLM-4.7-Flash of 2.0 (see glm.py).
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from benchmarks.train import glm, harmony
from benchmarks.train.data import IGNORED, LONG_ROW

TIMED_FROM = 12  # step, behind what is compiled
ASSETS = Path(__file__).parents[2] / "worker" / "assets"


def bundled_config(name: str) -> dict[str, Any]:
    """config.json of a bundled model: the shape that is trained."""
    return json.loads((ASSETS / name / "config.json").read_text("utf-8"))


CONFIGS: dict[str, dict[str, Any]] = {
    name: bundled_config(name) for name in ("tiny", "tiny-hybrid", "tiny-moe", "tiny-hybrid-moe")
}
DIALECTS = {"tiny-oss": harmony.DIALECT, "tiny-latent": glm.DIALECT}
CONFIGS |= {name: dialect.config for name, dialect in DIALECTS.items()}


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

    def step(
        self, number: int, loss: Tensor, module: nn.Module, optimizers: Sequence[Optimizer]
    ) -> None:
        """Learn from one loss."""
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), self.clip)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.lr(number)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def new_model(name: str, seed: int) -> Any:
    """A model of that name with fresh float32 weights; untyped, see `accuracy.load_model`."""
    from transformers import AutoConfig, AutoModelForCausalLM  # takes seconds

    settings = {key: value for key, value in CONFIGS[name].items() if not key.startswith("mtp_")}
    del settings["torch_dtype"], settings["architectures"]
    settings.pop("quantization_config", None)
    torch.manual_seed(seed)
    # One after the other: what multiplies several experts at once takes bfloat16 alone.
    how = {"experts_implementation": "eager"} if name == "tiny-oss" else {}
    made: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), **how).float()
    if name in DIALECTS:
        DIALECTS[name].prepare(made)
    return made


def train(
    model: Any, loader: DataLoader, recipe: Recipe, device: str, compiled: bool, limit_s: float
) -> None:
    """Trains in place: float32 weights, bfloat16 matrix products on a GPU; prints its progress.

    Where the time from step TIMED_FROM on would not do, fewer steps are made, and the rate falls
    with the time.
    """
    on_gpu = device.startswith("cuda")
    model.to(device).train()
    optimizer = _optimizer(model, recipe, on_gpu)
    loss_of = torch.compile(_loss, dynamic=False) if compiled else _loss
    started, num_tokens = time.monotonic(), 0
    timed_from = started
    for step, batch in enumerate(loader):
        if step <= TIMED_FROM:
            timed_from = time.monotonic()
        at = max(step, int(recipe.steps * (time.monotonic() - timed_from) / limit_s))
        if at >= recipe.steps:
            print(f"the time ends at step {step}", flush=True)
            break
        ids, labels = (part.to(device, non_blocking=True).long() for part in batch)
        with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu), parametrize.cached():
            is_far = ids.shape[1] > LONG_ROW  # of many lengths: not compiled
            loss = (_loss if is_far else loss_of)(model, ids, labels)
        recipe.step(at, loss, model, [optimizer])
        num_tokens += ids.numel()
        if step % 49 == 0 or step + 1 == recipe.steps:
            elapsed_s = time.monotonic() - started
            speed = f"{num_tokens / elapsed_s / 1e3:.0f}k tokens/s {elapsed_s:.0f} s"
            print(f"step {step} {tuple(ids.shape)} loss {loss.item():.4f} {speed}", flush=True)
    if on_gpu:
        print(f"at most {torch.cuda.max_memory_allocated() / 2**30:.0f} GiB")


def save_model(model: nn.Module, folder: Path, config: dict[str, Any]) -> int:
    """Writes bfloat16 weights and both configs; returns the number of parameters."""
    if config["model_type"] == "gpt_oss":
        count = sum(weight.numel() for weight in model.parameters())
        save(harmony.published(model), folder, config=config, generation_config=harmony.GENERATION)
        return count
    weights = apart(model.state_dict())
    del weights["lm_head.weight"]  # tied to the embedding
    generation = {name: config[name] for name in ("eos_token_id", "pad_token_id")}
    generation["do_sample"] = False
    return save(weights, folder, config=config, generation_config=generation)


def apart(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """transformers' weights, whose experts are stacked, by the names that checkpoints have."""
    named = dict[str, Tensor]()
    for name, weight in state.items():
        block, _, kind = name.partition(".experts.")
        if kind not in ("gate_up_proj", "down_proj"):
            named[name] = weight
            continue
        parts = {"down_proj": weight}
        if kind == "gate_up_proj":
            parts = dict(zip(("gate_proj", "up_proj"), weight.chunk(2, dim=1), strict=True))
        named |= {
            f"{block}.experts.{i}.{part}.weight": each
            for part, stack in parts.items()
            for i, each in enumerate(stack)
        }
    return named


def save(
    state: Mapping[str, Tensor], folder: Path, name: str = "model", **configs: dict[str, Any]
) -> int:
    """Writes bfloat16 weights and each config by its name; returns the number of parameters."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        part: weight.detach()
        .to("cpu", torch.bfloat16 if weight.is_floating_point() else weight.dtype)
        .contiguous()
        for part, weight in state.items()
    }
    file = folder / f"{name}.safetensors"
    save_file(weights, str(file), metadata={"format": "pt"})
    file.chmod(0o644)
    for kind, config in configs.items():
        (folder / f"{kind}.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    return sum(weight.numel() for weight in weights.values())


def _loss(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of the answers' tokens; ids and labels are [rows, length]."""
    # Without the entry a traced model makes a mask, and of long rows there is no room for one.
    mask = {"full_attention": None} if model.config.model_type == "qwen3" else None
    made = model.model(input_ids=ids, attention_mask=mask, use_cache=False)
    logits = model.lm_head(made.last_hidden_state).float()
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def _optimizer(model: nn.Module, recipe: Recipe, fused: bool) -> torch.optim.AdamW:
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == wide] for wide in (1, 0))
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups, lr=recipe.peak_lr, betas=recipe.betas, weight_decay=recipe.weight_decay, fused=fused
    )
