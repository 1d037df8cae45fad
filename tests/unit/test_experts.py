"""Kernels of experts against their definitions, under Triton's interpreter; compiled for sm_90."""

import re

import pytest
import torch
from torch import Tensor

from tests.support.interpreted import INTERPRETED, WHY, compiling
from tests.support.pairwise import in_whole
from worker.experts import product_triton, route_triton
from worker.experts.product import expert_products_ref
from worker.experts.product_triton import choose, expert_products_triton
from worker.experts.route import Routes, new_load, route_ref
from worker.experts.route_triton import route_triton as route
from worker.experts.shape import ExpertShape, Held

pytest.importorskip("triton", reason=WHY)
# The interpreter cuts f32 to bf16 where a GPU rounds.
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 0.03}
SINK = 16
CPU = torch.device("cpu")


def noise(*sizes: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    drawn = torch.randn(sizes, generator=torch.Generator().manual_seed(seed))
    return (drawn * sizes[-1] ** -0.5).to(dtype)


@pytest.mark.filterwarnings("ignore:invalid value")  # of numpy, in the interpreter
def test_a_nan_wins_after_all_numbers_and_ties_go_to_the_lower_index() -> None:
    shape, size = ExpertShape(5, 3, 8, renormalizes=True), 4
    gate = torch.zeros(5, size)
    gate[3, 0] = 1.0
    x = torch.stack([torch.ones(size), torch.full((size,), float("nan"))])
    for each in [route_ref, *([route] if INTERPRETED else [])]:
        routes = each(x, gate, None, 0, shape, Held(0, 5), new_load(Held(0, 5), CPU))
        assert routes.ids.tolist() == [[3, 0, 1], [0, 1, 2]]
        assert routes.weights[1].isnan().all()
        assert routes.weights[0].sum() == pytest.approx(1)


@pytest.mark.parametrize("num_tokens", [1, 5, 64, 128, 300, 8192])
def test_no_routing_needs_more_items_than_there_are(num_tokens: int) -> None:
    for num_experts, top_k in ((8, 2), (128, 8), (512, 10)):
        tiles = {choose(num_tokens, top_k, num_experts, gated=gated) for gated in (True, False)}
        assert len({tile.tokens for tile in tiles}) == 1
        for tile in tiles:
            ring = (tile.tokens + tile.rows) * tile.block_k * 2 * tile.num_stages
            assert ring <= 227 * 1024


if not INTERPRETED:

    @pytest.mark.parametrize(
        ("num_tokens", "num_experts"), [(1, 128), *in_whole((64, 128), (300, 512), (4096, 128))]
    )
    def test_they_compile_for_hopper_without_one(num_tokens: int, num_experts: int) -> None:
        shape, held = ExpertShape(num_experts, 8, 64, renormalizes=True), Held(0, num_experts)
        x, gate = noise(num_tokens, 256).bfloat16(), noise(num_experts, 256).bfloat16()
        only = ["_router_kernel", "_route_kernel", *["_arrange_kernel"] * (num_tokens > 4)]
        with compiling(route_triton, *only) as ptx:
            slots = torch.zeros(num_tokens, dtype=torch.int64)
            routes = route(x, gate, slots, SINK, shape, held, new_load(held, CPU))
        assert "wgmma.mma_async.sync.aligned.m64n" in ptx["_router_kernel"]
        up, down = noise(num_experts, 128, 256).bfloat16(), noise(num_experts, 256, 64).bfloat16()
        with compiling(product_triton) as ptx:
            expert_products_triton(x, routes, up, down, held)
        columns = choose(num_tokens, 8, num_experts, gated=True).tokens
        assert re.search(rf"wgmma\S+m64n{columns}k16\.f32\.bf16\.bf16", ptx["_grouped_kernel"])
        for text in ptx.values():
            assert not re.search(r"\b(st|ld)\.local\b", text)  # nothing spills

else:

    @pytest.mark.product(
        num_tokens=(1, 2, 5, 17, 70),
        experts=((8, 2, (0, 8)), (6, 3, (2, 3)), (16, 4, (4, 8))),
        sizes=((64, 32), (72, 48), (300, 32)),
        dtype=tuple(BOUNDS),
        renormalizes=(True, False),
    )
    def test_they_are_their_definitions(num_tokens, experts, sizes, dtype, renormalizes) -> None:
        num_experts, top_k, first_and_count = experts
        (size, width), held = sizes, Held(*first_and_count)
        shape = ExpertShape(num_experts, top_k, width, renormalizes)
        x, gate = 8 * noise(num_tokens, size, dtype=dtype), noise(num_experts, size, dtype=dtype)
        slots = torch.arange(num_tokens) + SINK
        made = list[Routes]()
        slots[num_tokens // 2 : num_tokens // 2 + num_tokens // 4] = 3  # padding
        loads = [new_load(held, CPU) for _ in range(2)]
        for load, each in zip(loads, (route_ref, route), strict=True):
            for _ in range(2):
                routes = each(x, gate, slots, SINK, shape, held, load)
            made.append(routes)
        wanted, got = made
        assert torch.equal(*loads)
        assert loads[0][1, -1] == 2
        assert loads[0][0].sum() == 2 * got.starts[-1]
        assert torch.equal(got.ids, wanted.ids)
        torch.testing.assert_close(got.weights, wanted.weights, atol=1e-6, rtol=1e-5)
        assert torch.equal(got.starts, wanted.starts)
        last = int(got.starts[-1])
        assert torch.equal(got.order[:last], wanted.order[:last])
        up = noise(held.count, 2 * width, size, dtype=dtype, seed=1)
        down = noise(held.count, size, width, dtype=dtype, seed=2)
        padded = torch.where((slots < SINK)[:, None], float("nan"), x.float()).to(dtype)
        sums = expert_products_triton(padded, got, up, down, held)
        exact = expert_products_ref(x, wanted, up, down, held)
        assert (sums - exact).abs().max() <= BOUNDS[dtype] * exact.abs().max().clamp_min(1e-3)
        assert not sums[slots < SINK].any()
