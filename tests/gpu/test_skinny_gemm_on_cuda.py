"""The weight-streaming product on one GPU: exactness, repeatability, overlapping launches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from worker.kernels.product import gated_product
from worker.kernels.product import product as linear
from worker.kernels.skinny_gemm import SkinnyWorkspace, choose, skinny_gemm
from worker.kernels.swiglu import swiglu

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.gpu(1)
BOUNDS = {torch.bfloat16: 4e-3, torch.float16: 5e-4}
NARROW, SPLIT, WIDE, ODD = (6144, 4096), (4096, 12288), (24576, 4096), (300, 1000)


def noise(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def weights(n: int, k: int, dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> torch.Tensor:
    return noise(n, k, dtype=torch.float32, seed=seed).mul_(k**-0.5).to(dtype)


def workspace_for(m: int, *shapes: tuple[int, int]) -> SkinnyWorkspace:
    return SkinnyWorkspace.allocate([(choose(m, n, k), n) for n, k in shapes], "cuda")


def product(x: torch.Tensor, w: torch.Tensor, pdl: bool = False) -> torch.Tensor:
    out = torch.full((len(x), len(w)), float("nan"), dtype=x.dtype, device="cuda")
    workspace = workspace_for(len(x), (len(w), x.shape[1]))
    workspace.partial.fill_(float("nan"))
    skinny_gemm(x, w, out, workspace, pdl=pdl)
    assert not workspace.arrivals.any()
    return out


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("m", [1, 8, 17, 64])
@pytest.mark.parametrize(("n", "k"), [NARROW, SPLIT, ODD, (129, 65), (1024, 4096), (70000, 512)])
def test_any_shape_matches_float64(m, n, k, dtype):
    x, w = noise(m, k, dtype=dtype), weights(n, k, dtype)
    exact = x.double() @ w.double().T
    assert (product(x, w).double() - exact).norm() / exact.norm() < BOUNDS[dtype]
    assert torch.equal(product(x, w, pdl=True), product(x, w))


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("m", [1, 8, 32, 64, 65])
@pytest.mark.parametrize(("n", "k"), [WIDE, ODD, (6144, 1024), (17000, 1000)])
def test_a_gated_product_is_the_activation_of_the_whole_one(n, k, m, dtype):
    x, w = noise(m, k, dtype=dtype), weights(n, k, dtype)
    wanted = swiglu(linear(x, w))
    assert torch.equal(gated_product(x, w), wanted)
    found = torch.empty_like(wanted)
    graph = captured(lambda: found.copy_(gated_product(x, w)))
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
    x, w = noise(m, SPLIT[1]), weights(*SPLIT)
    workspace, out = workspace_for(m, SPLIT), torch.empty(m, SPLIT[0], device="cuda").bfloat16()
    first = product(x, w)
    graph = captured(lambda: skinny_gemm(x, w, out, workspace, pdl=True))
    other, noisy = torch.cuda.Stream(), torch.empty(1 << 26, device="cuda")
    for i in range(200):
        with torch.cuda.stream(other):
            noisy[: 1 << (12 + i % 15)].mul_(0.5)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, first), i


@pytest.mark.parametrize("m", [1, 32, 64])
def test_overlapping_launches_read_what_the_kernel_before_wrote(m):
    """A chain of products that share a workspace and two buffers, with torch's kernels between."""
    shapes = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)] * 4
    ws = [weights(n, k, seed=i) for i, (n, k) in enumerate(shapes)]
    workspace = workspace_for(m, *shapes)
    x = noise(m, 4096)
    buffers = [torch.empty(m, 24576, device="cuda").bfloat16() for _ in range(2)]

    def chain(pdl: bool) -> torch.Tensor:
        hidden = x
        for i, (w, (n, k)) in enumerate(zip(ws, shapes, strict=True)):
            out = buffers[i % 2][:, :n]
            skinny_gemm(hidden[:, :k], w, out, workspace, pdl=pdl)
            if i % 3 == 2:
                out.mul_(1.25)
            hidden = out
        return hidden

    expected = chain(False).clone()
    graph = captured(lambda: chain(True))
    for i in range(50):
        for buffer in buffers:
            buffer.fill_(float("nan"))
        graph.replay()
        assert torch.equal(buffers[1][:, :4096], expected), i


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_hot_call_allocates_nothing_and_waits_for_nothing():
    x, w = noise(8, 4096), weights(4096, 4096)
    workspace, out = workspace_for(8, (4096, 4096)), torch.empty(8, 4096, device="cuda").bfloat16()
    skinny_gemm(x, w, out, workspace)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        skinny_gemm(x, w, out, workspace)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
