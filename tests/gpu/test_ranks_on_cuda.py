"""Logits of a model divided among GPUs are those of the whole one on the CPU, in float32."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.equivalence import test_models as models
from tests.gpu.test_all_reduce_on_cuda import join
from tests.support.expert_families import EXPERTS
from tests.support.latents import save_latent
from tests.support.processes import run_ranks
from worker.config.checkpoint.experts import Division
from worker.config.checkpoint.shape import read_model_shape
from worker.model.decoder import Decoder
from worker.model.load import load_model
from worker.model.placement import Placement

CASES: list[tuple[str, Division]] = [
    ("qwen3", "auto"), ("llama-mqa", "auto"), ("qwen3.5", "auto"), ("v3", "auto"),
    *((case, way) for case in ("qwen3-moe", "qwen3.5-moe") for way in ("tensor", "expert")),
]  # fmt: skip
BOUND = 1e-3  # of the largest logit


def logits(model: Decoder, device: torch.device) -> Tensor:
    """Of two prompts in pieces, and of three steps behind them."""
    engine = models.Engine(model, device)
    engine.columns = [each.to(device) for each in engine.columns]
    with torch.device(device):
        steps = list(engine.prefill(5))
        steps += [
            engine.step([len(p) + n for p in models.PROMPTS], [[7 + n]] * 2) for n in range(3)
        ]
    engine.pool.close()
    return torch.cat([rows for step in steps for rows in step]).cpu()


def divided(rank: int, size: int, place: str, experts: Division, wanted: Tensor) -> None:
    path, group = Path(place), join(rank, size, f"file://{place}/rendezvous")
    placement = Placement(group, torch.float32, group.device, experts)
    found = logits(load_model(path, read_model_shape(path), placement), group.device)
    assert (found - wanted).abs().max() < BOUND * wanted.abs().max()
    group.check()
    group.close()


@pytest.mark.parametrize("size", [pytest.param(num, marks=pytest.mark.gpu(num)) for num in (2, 4)])
@pytest.mark.parametrize(("case", "experts"), CASES)
def test_ranks_equal_the_whole(case: str, experts: Division, size: int, tmp_path: Path) -> None:
    if case == "v3":
        save_latent(tmp_path, case, kv_lora_rank=128, qk_nope_head_dim=32)
    else:
        models.save_random(tmp_path, *(models.CASES | EXPERTS)[case])
    wanted = logits(models.load(tmp_path), models.CPU)
    run_ranks(divided, size, str(tmp_path), experts, wanted, num_ranks=size)
