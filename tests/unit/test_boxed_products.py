"""Products in eight bits of wide decode steps: the definition's, with the bits of few rows."""

import re
from typing import Any

import pytest
import torch

from tests.support.interpreted import INTERPRETED, WHY, ptx_of
from tests.support.pairwise import in_whole
from tests.support.scaled import product_of
from tests.unit.test_scaled_products import BLOCK, GRAINS, activations, matrix
from worker.ops import scaled_triton
from worker.ops.jit import HAS_TRITON
from worker.ops.product import MAX_BOXED_PARTIALS, MAX_TILES, OWN_ROWS
from worker.ops.scaled import E4M3
from worker.ops.scaled_boxed_triton import (
    FEW_ROWS,
    LONG,
    MAX_BOXED_ROWS,
    _boxed_gemm_kernel,
    boxed_gemm,
    choose_boxed,
    scratch,
)
from worker.ops.scaled_triton import (
    eight_bits_triton,
    scaled_gated_product_triton,
    scaled_product_triton,
    swiglu_eight_triton,
)
from worker.ops.skinny_triton import SkinnyTile, SkinnyWorkspace, choose

# Numpy's, of an exp, of a spoilt row, and of scales beyond the rows, which are whatever was there.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow", "ignore:All-NaN")
ROWS = range(1, MAX_BOXED_ROWS + 1)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("k", [64, 512, 4096, 12288])
@pytest.mark.parametrize("n", [128, 1024, 3072, 4096, 5120, 6144, 9216, 16352, 24576, 151936])
def test_sums_are_cut_as_those_of_few_rows_and_fit(n: int, k: int, gated: bool) -> None:
    few = choose(1, n, k, product_follows=gated, eight=True)
    tiles = [(m, tile) for m in ROWS if (tile := choose_boxed(m, n, k, gated=gated)) is not None]
    for m, tile in tiles:
        assert (tile.split, tile.block_k) == (few.split, BLOCK)
        assert not gated or (tile.gates(n) and n % tile.block_n == 0)
        counters, partials = scratch(m, n, tile)
        assert counters <= MAX_TILES
        assert partials <= MAX_BOXED_PARTIALS
        ring = (tile.block_n + tile.block_m) * BLOCK * tile.num_stages
        assert ring <= 226 * 1024
    most = MAX_BOXED_ROWS if k >= LONG else OWN_ROWS
    band = [] if gated and (n % 128 or not few.gates(n)) else range(FEW_ROWS + 1, most + 1)
    assert [m for m, _ in tiles] == list(band)
    assert choose_boxed(64, n, k + 8, gated=gated) is None, "the TMA steps by 16 bytes"


if not INTERPRETED:
    needs_triton = pytest.mark.skipif(not HAS_TRITON, reason=WHY)

    @needs_triton
    @pytest.mark.parametrize(
        ("rows", "split", "grain", "gated"),
        [
            (64, 4, 128, False),
            (128, 1, 128, True),
            *in_whole((128, 4, 128, False), (64, 2, 16, False)),
        ],
    )
    def test_it_compiles_for_hopper_without_one(rows, split, grain, gated) -> None:
        tokens, width = 64, rows // 2 if gated else rows
        types: dict[str, Any] = {
            "x": f"tensordesc<fp8e4nv[{tokens}, 128]>", "w": f"tensordesc<fp8e4nv[{width}, 128]>",
            "of_rows": f"tensordesc<fp32[{tokens}]>", "scales": "*fp32", "partial": "*fp32",
            "arrivals": "*i32", "out": "*bf16", "M": "i32", "N": "i32", "K": "i32",
        }  # fmt: skip
        types |= {f"stride_{name}": "i32" for name in ("out", "column", "rows", "blocks")}
        constants = {
            "BLOCK_M": tokens, "BLOCK_N": rows, "BLOCK": BLOCK, "GRAIN": grain, "SPLIT": split,
            "STEPS": 8, "STAGES": 4, "EVEN_K": True, "GATED": gated, "PDL": True,
            "TRIGGER": -1,
        }  # fmt: skip
        ptx = ptx_of(_boxed_gemm_kernel, types, constants, num_warps=4, num_stages=4)
        assert f"wgmma.mma_async.sync.aligned.m64n{tokens}k32.f32.e4m3.e4m3" in ptx
        assert "cp.async.bulk.tensor" in ptx
        assert "cp.async.cg.shared.global" not in ptx, "tiles come in boxes"
        copies = ptx.count("cp.async.ca.shared.global")
        assert copies == 4 * (1 + gated), "one a thread and stage, of scales of w"
        assert not re.search(r"\b(red|atom)\.\S*\.(f16|bf16|f32|f64)", ptx)

else:
    from tests.unit.test_scaled_products import assert_same_rows, near, streamed
    from worker.ops.norms_triton import swiglu_triton

    def boxed(x, w, scales, split=1, rows=64, *, gated=False) -> torch.Tensor:
        """One product into poisoned memory; nothing beside may be written."""
        values, of_rows = eight_bits_triton(x)
        tile = SkinnyTile(64, rows, BLOCK, split, 4, 3, 2)
        counters, partials = scratch(len(x), len(w), tile)
        poison = torch.full((max(1, partials),), float("nan"))
        workspace = SkinnyWorkspace(poison, torch.zeros(counters, dtype=torch.int32))
        width = len(w) // 2 if gated else len(w)
        around = torch.full((len(x) + 2, width + 16), 77.0, dtype=x.dtype)
        out = around[1:-1, :width]
        boxed_gemm(values, of_rows, w, scales, out, workspace, tile, gated=gated)
        assert not workspace.arrivals.any()
        found = out.clone()
        out.fill_(77.0)
        assert (around == 77.0).all()
        return found

    @pytest.mark.product(
        m=(33, 70, 128), shape=((64, 256), (80, 208), (160, 528)), split=(1, 2, 4),
        grain=(*GRAINS, "whole"), rows=(64, 128),
    )  # fmt: skip
    def test_many_rows_equal_the_definition(m, shape, split, grain, rows) -> None:
        n, k = shape
        n = 256 if grain == "whole" else n
        x, (w, scales) = activations(m, k), matrix(n, k, "rows" if grain == "whole" else grain)
        scales = scales[::128].contiguous() if grain == "whole" else scales
        assert near(boxed(x, w, scales, split, rows), product_of(x, w, scales))

    def exact(m: int, k: int) -> torch.Tensor:
        """Integers of which a block's sum is exact in any order, and so is its scale."""
        x = torch.randint(-7, 8, (m, k), generator=torch.Generator().manual_seed(7)).bfloat16()
        x[:, ::BLOCK] = 7
        return x * torch.arange(m)[:, None].fmod(5).exp2().bfloat16()

    @pytest.mark.parametrize("split", [1, 2])
    def test_a_row_has_the_same_bits_among_few_and_many(split: int) -> None:
        x, (w, scales) = exact(128, 512), matrix(128, 512)
        w = w.float().round().clamp(-8, 8).to(E4M3)
        few = streamed(x[:20], w, scales, split)
        for m, rows in ((33, 64), (64, 64), (64, 128), (65, 128), (128, 128)):
            assert torch.equal(boxed(x[:m], w, scales, split, rows)[:20], few), m
        gated = streamed(x[:20], w, scales, gated=True)
        for m in (33, 128):
            assert torch.equal(boxed(x[:m], w, scales, rows=128, gated=True)[:20], gated), m

    def test_a_row_depends_on_no_other_and_a_nan_stays_one() -> None:
        x, (w, scales) = activations(70, 256), matrix(48, 256)
        alone = boxed(x, w, scales)
        for row, spoil in ((0, float("nan")), (66, 1e30)):
            others = torch.full_like(x, spoil)
            others[row] = x[row]
            found = boxed(others, w, scales)
            assert torch.equal(found[row], alone[row])
            assert bool(found[1].isnan().all()) == (spoil != spoil)

    @pytest.mark.parametrize("n", [384, 512])
    def test_a_gate_has_the_bits_of_its_kernel(n: int) -> None:
        x, (w, _) = activations(70, 256), matrix(n, 256)
        for scales in (matrix(n // BLOCK, 256, "rows")[1], matrix(n, 256)[1]):
            gated = boxed(x, w, scales, rows=128, gated=True)
            wanted = swiglu_triton(boxed(x, w, scales))
            assert torch.equal(gated.view(torch.int16), wanted.view(torch.int16))

    @pytest.fixture
    def made(monkeypatch) -> list[SkinnyTile]:
        """The tiles of boxed products, as they are asked for."""

        def asked(*operands: Any, **options: Any) -> None:
            tiles.append(operands[6])
            boxed_gemm(*operands, **options)

        tiles = list[SkinnyTile]()
        monkeypatch.setattr(scaled_triton, "boxed_gemm", asked)
        return tiles

    @pytest.mark.parametrize("k", [512, *in_whole((LONG,))])
    def test_layers_get_them_for_the_rows_of_the_band(k: int, made) -> None:
        x, (w, _) = activations(MAX_BOXED_ROWS + 1, k), matrix(256, k)
        scales = matrix(2, k, "rows")[1]
        for m in (FEW_ROWS, FEW_ROWS + 1, OWN_ROWS, OWN_ROWS + 1, MAX_BOXED_ROWS, len(x)):
            made.clear()
            tile = choose_boxed(m, 256, k)
            found = product_of(x[:m], w, scales, by=scaled_product_triton)
            assert made == ([] if tile is None else [tile])
            assert near(found, product_of(x[:m], w, scales))

    def test_layers_get_gates_of_them_with_the_bits_of_their_products(made) -> None:
        x, (w, scales) = activations(33, 128), matrix(6144, 128)
        found = product_of(x, w, scales, by=scaled_gated_product_triton)
        assert made == [choose_boxed(33, 6144, 128, gated=True)]
        whole = product_of(x, w, scales, by=scaled_product_triton)
        assert_same_rows(found, swiglu_eight_triton(whole))
