"""A chain drafter that is divided among ranks drafts as the whole one does."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.chain_checkpoints import TARGET
from tests.support.chain_rows import ChainRows
from tests.support.processes import on_ranks
from tests.unit.test_chain_forms import CPU, write_case
from worker.drafts.chain import ChainDrafter
from worker.drafts.drafter_config import read_chain_shape
from worker.model.load import load_model
from worker.model.placement import Placement
from worker.peers.base import Collective, SingleCollective

pytestmark = pytest.mark.usefixtures("one_thread")
DIVIDED = ["specforge-prefixed", "specforge-3.1", "speculators-qwen3", "eagle", "mimo"]


@torch.inference_mode()
def drafted(path: Path, collective: Collective) -> list[Tensor]:
    """g of six tokens, then of one behind them, what the head takes, and its logits."""
    placement = Placement(collective, torch.float32, CPU)
    target = load_model(Path(), TARGET, placement, noise=0)
    spec = read_chain_shape(path, TARGET)
    drafter = ChainDrafter(spec, target, 64)
    drafter.fill(path)
    rows = ChainRows(drafter)
    generator = torch.Generator().manual_seed(3)
    taps = torch.randn(7, spec.num_features * TARGET.hidden_size, generator=generator)
    ids = torch.randint(TARGET.vocab_size, (8,), generator=generator)
    g = drafter.features(taps)
    rows.store(1, ids[1:7], g[:6])
    found = rows.forward(7, ids[7:], g[6:])
    rows.pool.close()
    return [g, *found, drafter.head.logits(found[1])]


@pytest.mark.parametrize("num", [2, 4])
@pytest.mark.parametrize("case", DIVIDED)
def test_ranks_equal_one(case: str, num: int, tmp_path: Path) -> None:
    path = tmp_path / case
    write_case(path, case)
    expected = drafted(path, SingleCollective())
    for found in on_ranks(num, tmp_path, lambda group: drafted(path, group)):
        for got, wanted in zip(found, expected, strict=True):
            assert torch.allclose(got, wanted, atol=1e-4)
