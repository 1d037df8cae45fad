"""Chosen routes of dummy experts: as spread as their name says, whatever the router's weights."""

import torch

from benchmarks.routes import ROWS, ChosenRoutes
from worker.config.checkpoint.experts import ExpertShape, Held
from worker.ops.experts.route import new_load

SHAPE, HELD = ExpertShape(32, 4, 64, renormalizes=True), Held(0, 32)
CPU = torch.device("cpu")


def shares(kind: str, layers: int = 1) -> list[torch.Tensor]:
    """How many of the tokens have each expert, most first, by layer."""
    torch.manual_seed(0)
    chosen, found = ChosenRoutes(kind), []
    gates = [torch.randn(32, 256) / 16 for _ in range(layers)]
    for gate in gates:
        load = new_load(HELD, CPU)
        ids = chosen(torch.zeros(ROWS, 256), gate, None, 0, SHAPE, HELD, load).ids
        assert all(len(set(row)) == 4 for row in ids.tolist())
        found.append(ids.flatten().bincount(minlength=32) / ROWS)
    return found


def test_uniform_and_zipf_are_what_they_are_called() -> None:
    (uniform,), (zipf, other) = shares("uniform"), shares("zipf", 2)
    assert 0.1 < uniform.min() < uniform.max() < 0.15  # of 4 / 32
    assert zipf.max() > 0.6
    assert zipf.min() < 0.05
    assert zipf.argsort().tolist() != other.argsort().tolist()
