"""A chain drafter that is divided among two ranks drafts as the whole one does."""

from pathlib import Path

import torch
from torch import Tensor

from tests.support.chain_checkpoints import TARGET
from tests.support.chain_rows import ChainRows
from tests.support.processes import run_ranks
from tests.unit.test_chain_forms import CPU, write_case
from worker.drafts.chain import ChainDrafter
from worker.drafts.drafter_config import read_chain_shape
from worker.model.layers import Placement
from worker.model.loader import load_model
from worker.peers.base import Collective, SingleCollective
from worker.peers.gloo import GlooCollective

DIVIDED = ["specforge-prefixed", "specforge-3.1", "speculators-qwen3", "eagle", "mimo"]


@torch.inference_mode()
def drafted(path: Path, collective: Collective) -> list[Tensor]:
    """g of six tokens, then of one behind them, what the head takes, and its logits."""
    placement = Placement(collective, torch.float32, CPU)
    target = load_model(Path(), TARGET, placement, load_format="dummy")
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


def run_rank(rank: int, root: Path) -> None:
    torch.set_num_threads(1)
    for case in DIVIDED:
        group = GlooCollective(rank, 2, CPU, f"file://{root}/{case}-rendezvous")
        torch.save(drafted(root / case, group), root / f"{case}-{rank}.pt")
        group.close()


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    for case in DIVIDED:
        write_case(tmp_path / case, case)
    run_ranks(run_rank, tmp_path, num_ranks=2)
    for case in DIVIDED:
        expected = drafted(tmp_path / case, SingleCollective())
        for rank in (0, 1):
            found = torch.load(tmp_path / f"{case}-{rank}.pt")
            for got, wanted in zip(found, expected, strict=True):
                assert torch.allclose(got, wanted, atol=1e-4), case
