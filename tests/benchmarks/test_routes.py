"""Chosen routes of dummy experts: as spread as their name says, whatever the router's weights."""

import pytest
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


@pytest.mark.parametrize("first", [0, 64])
def test_a_table_is_round_robin_by_token(first: int) -> None:
    gate = torch.randn(32, 256, generator=torch.Generator().manual_seed(1)) / 16
    slots = torch.arange(8) * 64 + first
    x = torch.zeros(8, 256)
    routes = ChosenRoutes("table")(x, gate, slots, 0, SHAPE, HELD, new_load(HELD, CPU))
    wanted = [[(4 * token + place) % 32 for place in range(4)] for token in range(8)]
    assert routes.ids.tolist() == wanted
