"""The weight-streaming product against float64, under Triton's interpreter; compiled for sm_90."""

import re

import pytest
import torch

from tests.support.interpreted import INTERPRETED, WHY, ptx_of
from tests.support.pairwise import in_whole
from tests.support.products import computed, error, noise, workspace_of
from worker.ops.jit import HAS_TRITON
from worker.ops.norms_triton import swiglu_triton
from worker.ops.skinny_triton import MAX_ROWS, SkinnyTile, _skinny_gemm_kernel, choose, skinny_gemm

# The interpreter cuts f32 to bf16 where a GPU rounds, hence twice the usual bound.
BOUNDS = {torch.bfloat16: 8e-3, torch.float16: 1e-3}


@pytest.mark.parametrize("k", [64, 100, 128, 4096, 12288])
@pytest.mark.parametrize("n", [1, 300, 1024, 4096, 6144, 24576, 151936])
def test_the_weights_alone_choose_what_the_sums_depend_on(n, k):
    tiles = [choose(m, n, k) for m in range(1, MAX_ROWS + 1)]
    assert {tile.block_m for tile in tiles} == {16, 32, 64}
    assert all(m <= tile.block_m for m, tile in enumerate(tiles, 1))
    assert len({(t.block_n, t.split) for t in tiles}) == 1
    assert len({t.block_k for t in tiles}) == 1 or tiles[0].split == 1
    assert tiles[0].split == 1 or tiles[0].split * tiles[0].block_k <= k
    ring = (tiles[-1].block_n + MAX_ROWS) * tiles[-1].block_k * 2 * tiles[-1].num_stages
    assert ring <= 227 * 1024


if not INTERPRETED:
    needs_triton = pytest.mark.skipif(not HAS_TRITON, reason=WHY)

    @needs_triton
    @pytest.mark.parametrize(
        ("split", "gated", "block_m"),
        [
            (1, False, 64), (2, False, 16), (1, True, 32),
            *in_whole(
                (1, False, 16), (1, False, 32), (2, False, 32), (2, False, 64), (1, True, 16),
                (1, True, 64),
            ),
        ],
    )  # fmt: skip
    def test_it_compiles_for_hopper_without_one(split, gated, block_m):
        types = dict.fromkeys(("x", "w", "out"), "*bf16") | {"partial": "*fp32", "arrivals": "*i32"}
        types |= {"of_rows": "constexpr", "scales": "constexpr"}
        sizes = "M", "N", "K", "x", "out", "column", "rows", "blocks"
        types |= {name if name.isupper() else f"stride_{name}": "i32" for name in sizes}
        constants = {
            "BLOCK_M": block_m, "BLOCK_N": 64, "BLOCK_K": 128, "SPLIT": split, "STEPS": 16,
            "EVEN_N": True, "EVEN_K": True, "PDL": True, "TRIGGER": 7,
            "GATED": gated, "GRAIN": 0, "STAGES": None,
        }  # fmt: skip
        ptx = ptx_of(_skinny_gemm_kernel, types, constants, num_warps=4, num_stages=4)
        assert f"wgmma.mma_async.sync.aligned.m64n{block_m}k16.f32.bf16.bf16" in ptx
        assert "cp.async.cg.shared.global" in ptx
        assert "griddepcontrol.launch_dependents" in ptx
        assert ptx.index("griddepcontrol.wait") < ptx.index("cp.async.cg.shared.global")
        assert not re.search(r"\b(red|atom)\.\S*\.(f16|bf16|f32|f64)", ptx)  # no float atomics

else:

    def product(
        x: torch.Tensor, w: torch.Tensor, tile: SkinnyTile | None = None, poison: float = 7e7
    ) -> torch.Tensor:
        return computed(x, w, tile or choose(len(x), *w.shape), poison=poison)

    def tile_of(m: int, split: int, block_k: int = 64) -> SkinnyTile:
        return SkinnyTile(choose(m, 64, 64).block_m, 64, block_k, split, 4, 3, 2)

    @pytest.mark.product(
        m=(1, 2, 15, 16, 17, 33, 64),
        shape=((64, 256), (70, 200), (33, 130), (129, 65)),
        split=(1, 2, 3, 4),
        dtype=tuple(BOUNDS),
    )
    def test_any_shape_matches_float64(m, shape, split, dtype):
        n, k = shape
        x, w = noise(m, k, dtype=dtype), noise(n, k, dtype=dtype, seed=1)
        out = product(x, w, tile_of(m, split))
        assert error(out, x, w) < BOUNDS[dtype]
        rounded = (x.float() @ w.float().t()).to(dtype)
        assert error(out, x, w) < 2 * error(rounded, x, w) + BOUNDS[dtype] / 2

    @pytest.mark.product(
        m=(1, 16, 40, 64), shape=((32, 64), (100, 130), (33, 256)), dtype=tuple(BOUNDS)
    )
    def test_a_gated_product_is_the_activation_of_the_whole_one(m, shape, dtype):
        width, k = shape
        # Sums of such numbers are exact: numpy adds them in another order for other tiles.
        x, w = (
            noise(rows, k, dtype=torch.float32, seed=rows).mul(4).round().div(16).to(dtype)
            for rows in (m, 2 * width)
        )
        tile = tile_of(m, 1)
        wanted = swiglu_triton(product(x, w, tile))
        around = torch.full((m + 2, width + 3), 77.0, dtype=dtype)
        workspace = workspace_of([(tile, 2 * width)])
        skinny_gemm(x, w, around[1 : m + 1, :width], workspace, tile, gated=True)
        assert torch.equal(around[1 : m + 1, :width], wanted)
        around[1 : m + 1, :width] = 77.0
        assert (around == 77.0).all()

    @pytest.mark.parametrize("m", [1, 8, 64])
    def test_the_table_s_own_choice_matches_float64(m):
        x, w = noise(m, 384), noise(100, 384, seed=1)
        assert error(product(x, w), x, w) < BOUNDS[torch.bfloat16]

    @pytest.mark.parametrize(
        ("split", "others"),
        [
            (1, float("nan")), (4, float("nan")), (4, 1e30),
            *in_whole((1, 0.0), (4, 0.0), (1, 1e30), (1, float("inf")), (4, float("inf"))),
        ],
    )  # fmt: skip
    @pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, of the other rows
    def test_a_row_depends_on_no_other(split, others):
        x, w = noise(20, 256), noise(70, 256, seed=1)
        alone = product(x, w, tile_of(20, split))
        for row in (0, 7, 19):
            changed = torch.full_like(x, others)
            changed[row] = x[row]
            assert torch.equal(product(changed, w, tile_of(20, split))[row], alone[row])
