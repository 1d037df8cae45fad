"""The weight-streaming product on one GPU: exactness, repeatability, overlapping launches."""

import pytest
import torch

from tests.gpu.sync import no_sync
from tests.support import products
from tests.support.products import error, weights
from worker.ops.norms import swiglu
from worker.ops.product import gated_product
from worker.ops.product import product as linear
from worker.ops.skinny_triton import choose, skinny_gemm

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
    x, w, tile = noise(m, SPLIT[1]), weights(*SPLIT), choose(m, *SPLIT)
    first = products.computed(x, w, tile)
    workspace, out = products.workspace_of([(tile, len(w))], "cuda"), torch.empty_like(first)
    graph = products.captured(lambda: skinny_gemm(x, w, out, workspace, tile, pdl=True))
    other, noisy = torch.cuda.Stream(), torch.empty(1 << 26, device="cuda")
    for i in range(200):
        with torch.cuda.stream(other):
            noisy[: 1 << (12 + i % 15)].mul_(0.5)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, first), i


@pytest.mark.parametrize("m", [1, 32, 64])
def test_overlapping_launches_read_what_the_kernel_before_wrote(m):
    """Products that share a workspace and two buffers, with torch's kernels between."""
    shapes = [NARROW, (4096, 4096), WIDE, SPLIT] * 4
    tiles = [choose(m, n, k) for n, k in shapes]
    ws = [weights(n, k, seed=i) for i, (n, k) in enumerate(shapes)]
    sizes = [(tile, n) for tile, (n, _) in zip(tiles, shapes, strict=True)]
    workspace = products.workspace_of(sizes, "cuda")
    x, widest = noise(m, shapes[0][1]), max(n for n, _ in shapes)
    buffers = [torch.empty(m, widest, device="cuda").bfloat16() for _ in range(2)]

    def chain(pdl: bool) -> torch.Tensor:
        hidden = x
        for i, (w, tile) in enumerate(zip(ws, tiles, strict=True)):
            out = buffers[i % 2][:, : len(w)]
            skinny_gemm(hidden[:, : w.shape[1]], w, out, workspace, tile, pdl=pdl)
            if i % 3 == 2:
                out.mul_(1.25)
            hidden = out
        return hidden

    expected = chain(False).clone()
    graph = products.captured(lambda: chain(True))
    last = buffers[(len(ws) - 1) % 2][:, : len(ws[-1])]
    for i in range(50):
        for buffer in buffers:
            buffer.fill_(float("nan"))
        graph.replay()
        assert torch.equal(last, expected), i
    assert not workspace.arrivals.any()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_hot_call_allocates_nothing_and_waits_for_nothing():
    x, w, tile = noise(8, 4096), weights(4096, 4096), choose(8, 4096, 4096)
    workspace = products.workspace_of([(tile, 4096)], "cuda")
    out = torch.empty(8, 4096, device="cuda").bfloat16()
    skinny_gemm(x, w, out, workspace, tile, pdl=False)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with no_sync():
        skinny_gemm(x, w, out, workspace, tile, pdl=False)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
