"""What is counted of experts, as metrics have it."""

import pytest
import torch

from worker.config.checkpoint.experts import ExpertShape, Held
from worker.observe.fresh import Fresh
from worker.ops.experts.route import Load, load_of, new_load, route_ref


def test_readings_are_of_all_layers_and_steps_of_this_rank() -> None:
    shape, held, cpu = ExpertShape(4, 1, 8, renormalizes=True), Held(1, 3), torch.device("cpu")
    loads = [new_load(held, cpu) for _ in range(2)]
    gate = torch.eye(4)
    slots = torch.tensor([64, 64, 64, 64, 0])  # the last token is padding
    for load, experts in zip(loads, ([0, 1, 1, 2, 3], [1, 1, 1, 1, 1]), strict=True):
        for _ in range(3):
            route_ref(10 * gate[experts], gate, slots, 64, shape, held, load)
    # The first layer met experts 1 and 2, of which 1 had 2 of 3 tokens; 0 is another rank's.
    read = load_of(loads)
    assert read[:2] == (6, 9)
    assert read.busiest_share == pytest.approx((2 / 3 + 1) / 2)


def test_readings_of_nothing() -> None:
    loads = [new_load(Held(0, 2), torch.device("cpu"))]
    load = Fresh(lambda: load_of(loads))
    assert load.get() == Load(0, 0, 0.0)
    loads[0] += 5
    assert load.get() == Load(0, 0, 0.0)  # of the same scrape
