"""The weight-streaming product on one GPU: exactness, repeatability, overlapping launches."""

import pytest
import torch

from tests.support import products
from tests.support.products import error, weights
from worker.ops.norms import swiglu
from worker.ops.product import gated_product
from worker.ops.product import product as linear
from worker.ops.skinny_triton import choose

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.gpu(1)
BOUNDS = {torch.bfloat16: 4e-3, torch.float16: 5e-4}
NARROW, SPLIT, WIDE, ODD = (6144, 4096), (4096, 12288), (24576, 4096), (300, 1000)


def noise(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return products.noise(*shape, dtype=dtype, device="cuda")


def product(x: torch.Tensor, w: torch.Tensor, pdl: bool = False) -> torch.Tensor:
    tile = choose(len(x), *w.shape)
    return products.computed(x, w, tile, poison=float("nan"), pdl=pdl)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("m", [1, 8, 17, 64])
@pytest.mark.parametrize(("n", "k"), [NARROW, SPLIT, ODD, (129, 65), (1024, 4096), (70000, 512)])
def test_any_shape_matches_float64(m, n, k, dtype):
    x, w = noise(m, k, dtype=dtype), weights(n, k, dtype)
    assert error(product(x, w), x, w) < BOUNDS[dtype]
    assert torch.equal(product(x, w, pdl=True), product(x, w))


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("m", [1, 8, 32, 64, 65])
@pytest.mark.parametrize(("n", "k"), [WIDE, ODD, (6144, 1024), (17000, 1000)])
def test_a_gated_product_is_the_activation_of_the_whole_one(n, k, m, dtype):
    x, w = noise(m, k, dtype=dtype), weights(n, k, dtype)
    wanted = swiglu(linear(x, w))
    assert torch.equal(gated_product(x, w), wanted)
    found = torch.empty_like(wanted)
    graph = products.captured(lambda: found.copy_(gated_product(x, w)))
    found.zero_()
    graph.replay()
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(("n", "k"), [NARROW, SPLIT, WIDE, (151936, 4096), (17000, 1000), ODD])
def test_a_row_is_the_same_alone_and_in_any_batch(n, k):
    x, w = noise(64, k), weights(n, k)
    whole = product(x, w)
    for m in (1, 2, 8, 16, 17, 32, 33, 63):
        assert torch.equal(product(x[:m], w), whole[:m]), m
    x[1:] = float("nan")
    assert torch.equal(product(x, w)[0], whole[0])


@pytest.mark.parametrize("m", [1, 32])
def test_replays_are_equal_whatever_else_the_gpu_does(m):
    products.check_replays(noise(m, SPLIT[1]), weights(*SPLIT), choose(m, *SPLIT), 200)


@pytest.mark.parametrize("m", [1, 32, 64])
def test_overlapping_launches_read_what_the_kernel_before_wrote(m):
    shapes = [NARROW, (4096, 4096), WIDE, SPLIT] * 4
    products.check_chain(m, shapes, [choose(m, n, k) for n, k in shapes])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_hot_call_allocates_nothing_and_waits_for_nothing():
    products.check_hot_call(8, choose(8, 4096, 4096))
