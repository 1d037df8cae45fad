"""The product in equal shares against float64, under Triton's interpreter; compiled for sm_90."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch

from tests.support.interpreted import INTERPRETED, WHY, ptx_of, run_interpreted
from tests.support.products import computed, error, noise
from worker.kernels import product as product_module
from worker.kernels import skinny_gemm
from worker.kernels.jit import HAS_TRITON
from worker.kernels.product import MAX_PARTIALS, MAX_TILES, MEASURED, OWN_ROWS
from worker.kernels.skinny_gemm import SkinnyWorkspace
from worker.kernels.stream_k_gemm import (
    MAX_PARTS,
    StreamTile,
    _launch,
    _stream_k_kernel,
    choose,
    fits,
    stream_k_gemm,
)

# The interpreter cuts f32 to bf16 where a GPU rounds, hence twice the usual bound.
BOUNDS = {torch.bfloat16: 8e-3, torch.float16: 1e-3}
MODELS = [
    *[(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096)],
    *[(1, 64), (300, 1000), (128, 65536), (3072, 4096), (2048, 64)],
]


@pytest.mark.parametrize("num_sms", [132, 114, 7])
@pytest.mark.parametrize("rows", [64, 128, 256])
@pytest.mark.parametrize(("n", "k"), MODELS)
def test_any_shape_is_cut_into_equal_shares_of_few_parts(n, k, rows, num_sms):
    tile = choose(rows, n, k, num_sms)
    cut = tile.cut(n, k)
    units = cut.tiles * cut.steps
    ends = [share * units // cut.shares for share in range(cut.shares + 1)]
    lengths = {end - begin for begin, end in pairwise(ends)}
    assert min(lengths) > 0
    assert max(lengths) - min(lengths) <= 1
    parts = [
        sum(begin < (i + 1) * cut.steps and end > i * cut.steps for begin, end in pairwise(ends))
        for i in range(0, cut.tiles, max(1, cut.tiles // 50))
    ]
    assert max(parts) <= cut.parts <= MAX_PARTS
    assert not cut.split or set(parts) == {cut.split}
    assert tile.block_m == rows
    assert tile.width * cut.tiles >= n > tile.width * (cut.tiles - 1)
    ring = (tile.width + rows) * tile.block_k * 2 * tile.num_stages
    assert ring <= 227 * 1024
    if max(parts) > 1:
        slots = cut.shares * (1 if cut.split else 2)
        assert slots * tile.block_m * tile.width <= tile.num_partials(n)


def test_the_class_of_the_number_of_rows_and_the_weights_choose_the_kernel(monkeypatch):
    tile_for = product_module.tile_for.__wrapped__
    assert tile_for(64, 4096, 4096, 132) == skinny_gemm.choose(64, 4096, 4096)
    assert tile_for(65, 4096, 4096, 132) == choose(128, 4096, 4096, 132)
    assert tile_for(129, 4096, 4096, 132) == choose(256, 4096, 4096, 132)
    measured = {(64, 4096, 4096): choose(64, 4096, 4096, 132)}
    monkeypatch.setattr(product_module, "MEASURED", measured)
    assert tile_for(33, 4096, 4096, 132) == tile_for(64, 4096, 4096, 132)
    assert tile_for(64, 4096, 4096, 132) in measured.values()
    assert tile_for(32, 4096, 4096, 132) == skinny_gemm.choose(32, 4096, 4096)


def test_the_workspace_of_linear_layers_holds_every_product_of_ours():
    for m, (n, k) in product((1, *product_module.ROW_CLASSES), MODELS):
        if m <= product_module.OWN_ROWS:
            tile = product_module.tile_for(m, n, k, 132)
            assert tile.num_partials(n) <= product_module.MAX_PARTIALS
            assert tile.num_tiles(n) <= product_module.MAX_TILES


def test_what_was_measured_fits_the_workspace_and_is_not_passed_over():
    for (rows, n, _), tile in MEASURED.items():
        assert tile.num_partials(n) <= MAX_PARTIALS or rows > OWN_ROWS
        assert tile.num_tiles(n) <= MAX_TILES


def test_what_the_copy_engine_cannot_read_does_not_fit():
    x, w = torch.empty(3, 72, dtype=torch.bfloat16), torch.empty(5, 72, dtype=torch.bfloat16)
    assert fits(x, w)
    assert fits(x[:, 8:], w)
    assert not fits(x[:, 4:], w)
    assert not fits(x, torch.empty(5, 70, dtype=torch.bfloat16))


if not INTERPRETED:
    needs_triton = pytest.mark.skipif(not HAS_TRITON, reason=WHY)

    @needs_triton
    def test_this_file_under_the_interpreter():
        run_interpreted(__file__)

    @needs_triton
    @pytest.mark.parametrize("x_left", [True, False])
    @pytest.mark.parametrize("split", [0, 1, 4])
    def test_it_compiles_for_hopper_without_one(split, x_left):
        types = {"x": "tensordesc<bf16[128, 64]>", "w": "tensordesc<bf16[128, 64]>"}
        types |= {"w_rest": "tensordesc<bf16[64, 64]>", "out": "*bf16", "partial": "*fp32"}
        types |= {"words": "*i32"} | dict.fromkeys(
            ("M", "N", "stride_out", "units", "patience"), "i32"
        )
        constants = {
            "BLOCK_M": 128, "BLOCK_N": 128, "REST": 64, "BLOCK_K": 64, "STEPS": 64, "SPLIT": split,
            "PARTS": split or 4, "CHUNKS": max(split, 1), "X_LEFT": x_left,
            "SPECIALIZE": False, "PDL": True, "UPCAST": False,
        }  # fmt: skip
        ptx = ptx_of(_stream_k_kernel, types, constants, num_warps=8, num_stages=5)
        assert "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16" in ptx
        assert "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16" in ptx
        assert ptx.index("griddepcontrol.wait") < ptx.index("cp.async.bulk.tensor")
        assert "griddepcontrol.launch_dependents" in ptx
        assert not re.search(r"\b(red|atom)\.\S*\.(f16|bf16|f32|f64)", ptx)  # no float atomics
        assert ".local " not in ptx

else:
    WIDE = StreamTile(64, 128, 64, 64, 1, 4, 3)

    @pytest.mark.parametrize("dtype", BOUNDS)
    @pytest.mark.parametrize("x_left", [True, False])
    @pytest.mark.parametrize("shares", [1, 3, 8])
    @pytest.mark.parametrize(("m", "n", "k"), [(1, 192, 512), (50, 200, 520), (64, 400, 504)])
    def test_any_shape_in_any_shares_matches_float64(m, n, k, shares, x_left, dtype):
        x, w = noise(m, k, dtype=dtype), noise(n, k, dtype=dtype, seed=1)
        tile = replace(WIDE, shares=shares, x_left=x_left)
        assert error(computed(x, w, tile), x, w) < BOUNDS[dtype]

    @pytest.mark.parametrize("rest", [0, 32])
    @pytest.mark.parametrize(("rows", "m"), [(128, 65), (128, 128), (256, 129), (256, 256)])
    def test_large_blocks_match_float64(rows, m, rest):
        x, w = noise(m, 264), noise(100, 264, seed=1)
        for x_left in (True, False):
            tile = StreamTile(rows, 64, rest, 64, 4, 8, 3, x_left)
            assert error(computed(x, w, tile), x, w) < BOUNDS[torch.bfloat16]

    @pytest.mark.parametrize("rows", [64, 128, 256])
    def test_the_general_choice_matches_float64(rows):
        x, w = noise(40, 392), noise(300, 392, seed=1)
        tile = choose(rows, 300, 392, 6)
        assert tile.cut(300, 392).parts > 1
        assert error(computed(x, w, tile), x, w) < BOUNDS[torch.bfloat16]

    @pytest.mark.parametrize("shares", [2, 3, 8])
    def test_two_runs_are_equal_whatever_the_workspace_held_and_whoever_adds_up(shares):
        x, w = noise(40, 512), noise(200, 512, seed=1)
        tile = replace(WIDE, shares=shares)
        first = computed(x, w, tile)
        assert torch.equal(first, computed(x, w, tile, poison=float("nan")))
        assert torch.equal(first, computed(x, w, replace(tile, patience=0)))

    def test_who_has_all_partial_sums_adds_up_its_own_rows_only():
        """The last program of two to write, where the other one is waiting for it."""
        x, w = noise(64, 128), noise(64, 128, seed=1)
        tile = StreamTile(64, 64, 0, 64, 2, 4, 3)
        workspace = SkinnyWorkspace.allocate([(tile, 64)], "cpu")
        workspace.partial.zero_()
        workspace.arrivals[0] = 1  # one has written zeros, and not given up
        out = torch.full((64, 64), 77.0, dtype=x.dtype)
        _, arguments, constants = _launch(x, w, out, workspace, tile, False)
        _stream_k_kernel[(1,)](*arguments, **constants)
        half = computed(x[:, :64].contiguous(), w[:, :64].contiguous(), replace(tile, shares=1))
        assert torch.equal(out[:32], half[:32])
        assert (out[32:] == 77.0).all()
        assert workspace.arrivals[0] == 2 + 256  # the other one has yet to leave

    @pytest.mark.parametrize("shares", [2, 3, 8])
    @pytest.mark.parametrize("others", [0.0, float("inf"), float("nan")])
    @pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, of the other rows
    def test_a_row_depends_on_no_other_and_not_on_their_number(shares, others):
        x, w = noise(60, 256), noise(200, 256, seed=1)
        tile = replace(WIDE, shares=shares)
        alone = computed(x, w, tile)
        assert torch.equal(computed(x[:33], w, tile), alone[:33])
        for row in (0, 7, 59):
            changed = torch.full_like(x, others)
            changed[row] = x[row]
            assert torch.equal(computed(changed, w, tile)[row], alone[row])

    def test_rows_may_be_part_of_a_wider_tensor():
        wide, w = noise(4, 304), noise(64, 128, seed=1)
        tile = replace(WIDE, shares=2)
        assert torch.equal(
            computed(wide[:, :128], w, tile), computed(wide[:, :128].contiguous(), w, tile)
        )

    def test_a_workspace_that_is_too_small_is_refused():
        x, w = noise(4, 256), noise(64, 256, seed=1)
        with pytest.raises(AssertionError):
            stream_k_gemm(
                x, w, x[:, :64], SkinnyWorkspace.allocate([], "cpu"), replace(WIDE, shares=2)
            )
