"""The product in equal shares on one GPU: exactness, repeatability, overlapping launches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.gpu.test_skinny_gemm_on_cuda import noise
from tests.support.products import (
    check_chain,
    check_hot_call,
    check_replays,
    computed,
    error,
    weights,
)
from worker.kernels.stream_k_gemm import MAX_PARTS, StreamTile, choose

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


def product(x: torch.Tensor, w: torch.Tensor, tile: StreamTile) -> torch.Tensor:
    return computed(x, w, tile, poison=float("nan"))


def shared(tile: StreamTile, n: int, k: int) -> StreamTile:
    """With fewer shares where a tile would have too many parts."""
    while tile.cut(n, k).parts > MAX_PARTS:
        tile = replace(tile, shares=tile.shares // 2)
    return tile


def check(tile: StreamTile, n: int, k: int, dtype: torch.dtype) -> None:
    tile = shared(tile, n, k)
    for m in (1, tile.block_m // 2 + 1, tile.block_m):
        x, w = noise(m, k, dtype=dtype), weights(n, k, dtype)
        out = product(x, w, tile)
        assert error(out, x, w) < BOUNDS[dtype]
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
    x, w = noise(100, DOWN[1]), weights(*DOWN)
    for patience in (0, 1, 64):
        check_replays(x, w, replace(TILES[kind], patience=patience), 100)


@pytest.mark.parametrize("m", [64, 128, 256])
def test_overlapping_launches_read_what_the_kernel_before_wrote(m):
    shapes = [QKV, OUT, GATE_UP, DOWN] * 4
    check_chain(m, shapes, [choose(m, n, k, sms()) for n, k in shapes])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_hot_call_allocates_nothing_and_waits_for_nothing():
    check_hot_call(100, choose(128, *OUT, sms()))
