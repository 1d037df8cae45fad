"""The product in equal shares on one GPU: exactness, repeatability, overlapping launches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.gpu.test_skinny_gemm_on_cuda import captured, noise, weights
from worker.kernels.skinny_gemm import SkinnyWorkspace
from worker.kernels.stream_k_gemm import MAX_PARTS, StreamTile, choose, stream_k_gemm

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.gpu(1)
BOUNDS = {torch.bfloat16: 4e-3, torch.float16: 5e-4}
QKV, OUT, GATE_UP, DOWN = (6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)
# Whole tiles, equal splits, stream-K; x on either side; 128 and 64 columns together or not.
TILES = {
    "whole": StreamTile(128, 128, 64, 64, 128, 8, 5),
    "split": StreamTile(128, 128, 0, 64, 96, 8, 6),
    "stream-k": StreamTile(128, 128, 64, 64, 132, 8, 5),
    "w left": StreamTile(128, 128, 64, 64, 101, 8, 5, x_left=False),
    "two an SM": StreamTile(128, 128, 0, 64, 250, 4, 3),
    "256 wide": StreamTile(128, 256, 0, 64, 120, 8, 4),
    "256 rows": StreamTile(256, 128, 64, 64, 128, 8, 3, x_left=False),
    "64 rows": StreamTile(64, 128, 64, 64, 128, 4, 6),
}


def sms() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def product(x: torch.Tensor, w: torch.Tensor, tile: StreamTile, pdl: bool = False) -> torch.Tensor:
    out = torch.full((len(x), len(w)), float("nan"), dtype=x.dtype, device="cuda")
    workspace = SkinnyWorkspace.allocate([(tile, len(w))], "cuda")
    workspace.partial.fill_(float("nan"))
    stream_k_gemm(x, w, out, workspace, tile, pdl=pdl)
    assert not workspace.arrivals.any()
    return out


def shared(tile: StreamTile, n: int, k: int) -> StreamTile:
    """With fewer shares where a tile would have too many parts."""
    while tile.cut(n, k).parts > MAX_PARTS:
        tile = replace(tile, shares=tile.shares // 2)
    return tile


def check(tile: StreamTile, n: int, k: int, dtype: torch.dtype) -> None:
    tile = shared(tile, n, k)
    for m in (1, tile.block_m // 2 + 1, tile.block_m):
        x, w = noise(m, k, dtype=dtype), weights(n, k, dtype)
        exact = x.double() @ w.double().T
        out = product(x, w, tile)
        assert (out.double() - exact).norm() / exact.norm() < BOUNDS[dtype]
        assert torch.equal(product(x, w, replace(tile, patience=0)), out)


@pytest.mark.parametrize("kind", TILES)
@pytest.mark.parametrize(("n", "k"), [QKV, DOWN, (300, 1000), (17000, 1000)])
def test_any_shape_matches_float64(n, k, kind):
    check(TILES[kind], n, k, torch.bfloat16)


@pytest.mark.parametrize("kind", ["split", "stream-k"])
def test_float16_matches_float64(kind):
    check(TILES[kind], *QKV, torch.float16)


@pytest.mark.parametrize("rows", [64, 128, 256])
@pytest.mark.parametrize(("n", "k"), [QKV, OUT, GATE_UP, DOWN, (151936, 4096), (17000, 1000)])
def test_a_row_is_the_same_alone_and_in_any_batch_of_its_class(n, k, rows):
    x, w = noise(rows, k), weights(n, k)
    tile = choose(rows, n, k, sms())
    whole = product(x, w, tile)
    for m in (1, 17, rows // 2 + 1, rows - 1):
        assert torch.equal(product(x[:m], w, tile), whole[:m]), m
    x[1:] = float("nan")
    assert torch.equal(product(x, w, tile)[0], whole[0])


@pytest.mark.parametrize("kind", ["split", "stream-k", "two an SM"])
def test_replays_are_equal_whatever_else_the_gpu_does(kind):
    """Another stream's kernels hold SMs back: some programs give up waiting for the others."""
    tile = TILES[kind]
    x, w = noise(100, DOWN[1]), weights(*DOWN)
    first = product(x, w, tile)
    for patience in (0, 1, 64):
        patient = replace(tile, patience=patience)
        workspace = SkinnyWorkspace.allocate([(patient, DOWN[0])], "cuda")
        out = torch.empty(100, DOWN[0], device="cuda").bfloat16()
        graph = captured(
            lambda o=out, s=workspace, t=patient: stream_k_gemm(x, w, o, s, t, pdl=True)
        )
        other, noisy = torch.cuda.Stream(), torch.empty(1 << 26, device="cuda")
        for i in range(100):
            with torch.cuda.stream(other):
                noisy[: 1 << (12 + i % 15)].mul_(0.5)
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, first), (patience, i)


@pytest.mark.parametrize("m", [64, 128, 256])
def test_overlapping_launches_read_what_the_kernel_before_wrote(m):
    """A chain of products that share a workspace and two buffers, with torch's kernels between."""
    shapes = [QKV, OUT, GATE_UP, DOWN] * 4
    ws = [weights(n, k, seed=i) for i, (n, k) in enumerate(shapes)]
    tiles = {(n, k): choose(m, n, k, sms()) for n, k in shapes}
    workspace = SkinnyWorkspace.allocate([(tile, n) for (n, _), tile in tiles.items()], "cuda")
    x = noise(m, 4096)
    buffers = [torch.empty(m, 24576, device="cuda").bfloat16() for _ in range(2)]

    def chain(pdl: bool) -> torch.Tensor:
        hidden = x
        for i, (w, (n, k)) in enumerate(zip(ws, shapes, strict=True)):
            out = buffers[i % 2][:, :n]
            stream_k_gemm(hidden[:, :k], w, out, workspace, tiles[n, k], pdl=pdl)
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
    assert not workspace.arrivals.any()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_hot_call_allocates_nothing_and_waits_for_nothing():
    x, w, tile = noise(100, 4096), weights(*OUT), choose(128, *OUT, sms())
    workspace = SkinnyWorkspace.allocate([(tile, 4096)], "cuda")
    out = torch.empty(100, 4096, device="cuda").bfloat16()
    stream_k_gemm(x, w, out, workspace, tile)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        stream_k_gemm(x, w, out, workspace, tile)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
