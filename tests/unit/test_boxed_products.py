"""Products in eight bits of wide decode steps: the definition's, with the bits of few rows."""

import re
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.support.interpreted import INTERPRETED, WHY, ptx_of
from tests.support.pairwise import in_whole
from tests.support.scaled import product_of
from tests.unit.test_scaled_products import BLOCK, GRAINS, activations, matrix
from worker.ops.jit import HAS_TRITON
from worker.ops.product import MAX_BOXED_PARTIALS, MAX_TILES
from worker.ops.scaled import E4M3
from worker.ops.scaled_boxed_triton import (
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
@pytest.mark.parametrize("n", [128, 1024, 3072, 4096, 6144, 9216, 24576, 151936])
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
    assert all(b == a + 1 for (a, _), (b, _) in pairwise(tiles)), "one band of rows"
    assert choose_boxed(64, n, k + 8, gated=gated) is None, "the TMA steps by 16 bytes"


if not INTERPRETED:
    needs_triton = pytest.mark.skipif(not HAS_TRITON, reason=WHY)

    @needs_triton
    @pytest.mark.parametrize(
        ("tokens", "rows", "split", "grain", "gated"),
        [
            (64, 64, 4, 128, False),
            (128, 128, 1, 128, True),
            *in_whole((64, 256, 1, 128, True), (64, 128, 2, 16, False)),
        ],
    )
    def test_it_compiles_for_hopper_without_one(tokens, rows, split, grain, gated) -> None:
        width, fused = rows // 2 if gated else rows, gated and rows == 2 * BLOCK
        types: dict[str, Any] = {
            "x": f"tensordesc<fp8e4nv[{tokens}, 128]>", "w": f"tensordesc<fp8e4nv[{width}, 128]>",
            "of_rows": f"tensordesc<fp32[{tokens}]>", "scales": "*fp32", "partial": "*fp32",
            "arrivals": "*i32", "out": "*fp8e4nv" if fused else "*bf16",
            "out_rows": "*fp32" if fused else "constexpr", "M": "i32", "N": "i32", "K": "i32",
        }  # fmt: skip
        strides = "out", "column", "rows", "blocks", "out_column"
        types |= {f"stride_{name}": "i32" for name in strides}
        constants = {
            "BLOCK_M": tokens, "BLOCK_N": rows, "BLOCK": BLOCK, "GRAIN": grain, "SPLIT": split,
            "STEPS": 8, "STAGES": 4, "EVEN_K": True, "GATED": gated, "HALVED": gated,
            "PDL": True, "TRIGGER": -1,
        }  # fmt: skip
        warps = 8 if rows > 128 else 4
        absent = {name: None for name, kind in types.items() if kind == "constexpr"}
        types = {name: kind for name, kind in types.items() if name not in absent}
        ptx = ptx_of(_boxed_gemm_kernel, types, constants | absent, num_warps=warps, num_stages=4)
        assert f"wgmma.mma_async.sync.aligned.m64n{tokens}k32.f32.e4m3.e4m3" in ptx
        assert "cp.async.bulk.tensor" in ptx
        assert "cp.async.cg.shared.global" not in ptx, "tiles come in boxes"
        copies = ptx.count("cp.async.ca.shared.global")
        assert copies == 4 * (1 + gated), "one a thread and stage, of scales of w"
        assert not re.search(r"\b(red|atom)\.\S*\.(f16|bf16|f32|f64)", ptx)

else:
    from tests.unit.test_scaled_products import near, streamed

    def boxed(x, w, scales, split=1, tokens=64, rows=64, *, gated=False, fused=False) -> Any:
        """One product into poisoned memory; nothing beside may be written."""
        values, of_rows = eight_bits_triton(x)
        tile = SkinnyTile(tokens, rows, BLOCK, split, 4, 3, 2)
        counters, partials = scratch(len(x), len(w), tile)
        poison = torch.full((max(1, partials),), float("nan"))
        workspace = SkinnyWorkspace(poison, torch.zeros(counters, dtype=torch.int32))
        (m, width), kind = (len(x), len(w) // (2 if gated else 1)), E4M3 if fused else x.dtype
        around = torch.full((m + 2, width + 16), 77.0).to(kind)
        wanted = around.clone()
        out = around[1 : m + 1, :width]
        of_out = torch.empty(width // BLOCK, -(-m // 4) * 4).t()[:m] if fused else None
        boxed_gemm(values, of_rows, w, scales, out, workspace, tile, gated=gated, out_rows=of_out)
        assert not workspace.arrivals.any()
        found = out.clone()
        out.copy_(wanted[1 : m + 1, :width])
        assert torch.equal(around.float(), wanted.float())
        return (found, of_out) if fused else found

    @pytest.mark.product(
        m=(33, 70, 130), shape=((64, 256), (80, 208), (160, 528)), split=(1, 2, 4),
        grain=(*GRAINS, "whole"), tile=((64, 64), (128, 64), (64, 128), (128, 128)),
    )  # fmt: skip
    def test_many_rows_equal_the_definition(m, shape, split, grain, tile) -> None:
        n, k = shape
        n = 256 if grain == "whole" else n
        x, (w, scales) = activations(m, k), matrix(n, k, "rows" if grain == "whole" else grain)
        scales = scales[::128].contiguous() if grain == "whole" else scales
        assert near(boxed(x, w, scales, split, *tile), product_of(x, w, scales))

    def exact(m: int, k: int) -> torch.Tensor:
        """Integers of which a block's sum is exact in any order, and so is its scale."""
        x = torch.randint(-7, 8, (m, k), generator=torch.Generator().manual_seed(7)).bfloat16()
        x[:, ::BLOCK] = 7
        return x * torch.arange(m)[:, None].fmod(5).exp2().bfloat16()

    @pytest.mark.parametrize("split", [1, 2])
    def test_a_row_has_the_same_bits_among_few_and_many(split: int) -> None:
        x, (w, scales) = exact(130, 512), matrix(64, 512)
        w = w.float().round().clamp(-8, 8).to(E4M3)
        few = streamed(x[:20], w, scales, split)
        for m, tokens in ((33, 64), (64, 64), (65, 128), (130, 64), (130, 128)):
            assert torch.equal(boxed(x[:m], w, scales, split, tokens)[:20], few), m

    def test_a_row_depends_on_no_other_and_a_nan_stays_one() -> None:
        x, (w, scales) = activations(70, 256), matrix(48, 256)
        alone = boxed(x, w, scales)
        for row, spoil in ((0, float("nan")), (66, 1e30)):
            others = torch.full_like(x, spoil)
            others[row] = x[row]
            found = boxed(others, w, scales)
            assert torch.equal(found[row], alone[row])
            assert bool(found[1].isnan().all()) == (spoil != spoil)

    def test_a_gate_has_the_bits_of_its_kernel_and_in_eight_bits_too() -> None:
        x, (w, _) = activations(70, 256), matrix(512, 256)
        scales = matrix(4, 256, "rows")[1]
        whole = boxed(x, w, scales)
        values, of_rows = swiglu_eight_triton(whole)
        for rows in (128, 256):
            gated = eight_bits_triton(boxed(x, w, scales, rows=rows, gated=True))
            assert torch.equal(gated[0].view(torch.uint8), values.view(torch.uint8))
            assert torch.equal(gated[1], of_rows)
        found, of_found = boxed(x, w, scales, rows=256, gated=True, fused=True)
        assert torch.equal(found.view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(of_found, of_rows)

    def test_layers_get_them_for_the_rows_of_the_band(monkeypatch) -> None:
        from worker.ops import scaled_triton

        def asked(*operands: Any, **options: Any) -> None:
            made.append(operands[6])
            boxed_gemm(*operands, **options)

        made = list[SkinnyTile]()
        monkeypatch.setattr(scaled_triton, "boxed_gemm", asked)
        x, (w, _) = activations(MAX_BOXED_ROWS + 1, 512), matrix(256, 512)
        scales = matrix(2, 512, "rows")[1]
        for m in (32, 33, 65, MAX_BOXED_ROWS, MAX_BOXED_ROWS + 1):
            made.clear()
            tile = choose_boxed(m, 256, 512)
            found = product_of(x[:m], w, scales, by=scaled_product_triton)
            assert made == ([] if tile is None else [tile])
            assert near(found, product_of(x[:m], w, scales))
            scaled_gated_product_triton(*eight_bits_triton(x[:m]), w, scales, x.dtype)
