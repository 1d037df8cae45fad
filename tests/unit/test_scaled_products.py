"""Products in eight bits: what is rounded, by which scale, and that rows depend on themselves."""

import re

import pytest
import torch

from tests.support.interpreted import INTERPRETED, WHY, ptx_of
from tests.support.pairwise import in_whole
from tests.support.products import noise, workspace_of
from tests.support.scaled import product_of, worth
from worker.config.checkpoint.quantization import SCALE_BLOCK as BLOCK
from worker.ops import scaled_triton as tiles
from worker.ops.jit import HAS_TRITON
from worker.ops.norms import swiglu_ref
from worker.ops.norms_triton import add_rms_norm_triton, swiglu_triton
from worker.ops.scaled import E4M3, eight_bits_ref
from worker.ops.scaled_library import agrees
from worker.ops.scaled_triton import (
    ScaledTile,
    _scaled_gemm_kernel,
    add_rms_norm_both_triton,
    add_rms_norm_eight_triton,
    eight_bits_triton,
    scaled_gemm,
    scaled_product_triton,
    swiglu_eight_triton,
)
from worker.ops.skinny_triton import SkinnyTile, _skinny_gemm_kernel, choose, skinny_gemm

GRAINS = {"blocks": 16, "rows": 1, "row": 1}  # of the scales; "row": one for all its columns


def matrix(n: int, k: int, grain: str = "blocks", seed: int = 1) -> tuple[torch.Tensor, ...]:
    """Values [n, k] e4m3, and scales of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(n, k, generator=generator).mul_(100).clamp_(-448, 448).to(E4M3)
    width = 1 if grain == "row" else -(-k // BLOCK)
    scales = torch.rand(n // GRAINS[grain], width, generator=generator).mul_(8).exp2_() * 1e-4
    return values, scales


def activations(m: int, k: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Rows and blocks of very different sizes, zeros, and one number that outweighs its block."""
    x = noise(m, k, dtype=torch.float32, seed=seed)
    x *= torch.linspace(-6, 6, m).exp2()[:, None] * torch.linspace(2, -2, k).exp2()
    x[0, :BLOCK] = 0
    x[-1, 0] = 1000
    return x.to(dtype)


@pytest.mark.parametrize("k", [BLOCK, 192, 3 * BLOCK])
def test_each_row_and_block_is_rounded_by_a_scale_of_its_own(k: int) -> None:
    x = activations(9, k)
    values, scales = eight_bits_ref(x)
    assert values.dtype == E4M3
    assert scales.stride(0) == 1
    assert not values.float().isnan().any()
    blocks = torch.nn.functional.pad(x.float(), (0, -k % BLOCK)).view(9, -1, BLOCK)
    assert torch.allclose(scales, blocks.abs().amax(-1).clamp(min=1e-10) / 448)
    assert values.float().abs().amax() == 448
    off = (worth(values, scales) - x.double()).abs()
    least = scales.repeat_interleave(BLOCK, 1)[:, :k] * 2**-10
    assert bool((off <= torch.maximum(x.double().abs() * 2**-4, least)).all())


def test_no_number_becomes_nan_and_a_nan_stays_one() -> None:
    """Nothing is clamped: amax · (448 / amax) is 448 and a bit at most, which rounds to 448."""
    made = torch.rand(4_000, BLOCK, generator=torch.Generator().manual_seed(3)) * 1e4 + 1e-3
    assert not eight_bits_ref(made)[0].float().isnan().any()
    made[5, 7] = float("nan")
    spoilt = (eight_bits_ref(made)[0].float() * eight_bits_ref(made)[1]).isnan().any(-1)
    assert spoilt.nonzero().tolist() == [[5]]


@pytest.mark.parametrize("grain", GRAINS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 32, 128), (9, 48, 200), (70, 16, 384)])
def test_a_product_is_near_that_of_what_the_weights_are_worth(m, n, k, grain) -> None:
    x, (w, scales) = activations(m, k, torch.float32), matrix(n, k, grain)
    values, of_rows = eight_bits_ref(x)
    exact = worth(values, of_rows) @ worth(w, scales).T
    found = product_of(x, w, scales)
    assert (found - exact).norm() < 1e-6 * exact.norm(), "all but f32's rounding is in the values"
    whole = x.double() @ worth(w, scales).T
    assert (found - whole).norm() < 0.04 * whole.norm()
    rounded = product_of(x.bfloat16(), w, scales)
    assert rounded.dtype == torch.bfloat16


def test_a_row_depends_on_no_other_row() -> None:
    x, (w, scales) = activations(40, 256, torch.float32), matrix(32, 256)
    alone = product_of(x, w, scales)
    for spoil in (float("nan"), 1e30):
        others = torch.full_like(x, spoil)
        others[7] = x[7]
        assert torch.equal(product_of(others, w, scales)[7], alone[7])


if not INTERPRETED:
    needs_triton = pytest.mark.skipif(not HAS_TRITON, reason=WHY)
    NO_FLOAT_ATOMICS = r"\b(red|atom)\.\S*\.(f16|bf16|f32|f64)"

    def assert_all_loads_overlap(ptx: str) -> None:
        """Scales come as tiles do: a step that waits for their load takes several times as long."""
        assert "cp.async.cg.shared.global" in ptx, "tiles"
        assert "cp.async.ca.shared.global" in ptx, "scales, 4 bytes each"

    @needs_triton
    @pytest.mark.parametrize(
        ("split", "gated", "block_m", "grain"),
        [(1, True, 64, 16), *in_whole((4, False, 16, 1), (1, False, 32, 16), (8, False, 64, 16))],
    )
    def test_few_rows_compile_for_hopper_without_one(split, gated, block_m, grain) -> None:
        types = {"x": "*fp8e4nv", "of_rows": "*fp32", "w": "*fp8e4nv", "scales": "*fp32"}
        types |= {"out": "*bf16", "partial": "*fp32", "arrivals": "*i32"}
        sizes = "M", "N", "K", "x", "out", "column", "rows", "blocks"
        types |= {name if name.isupper() else f"stride_{name}": "i32" for name in sizes}
        constants = {
            "BLOCK_M": block_m, "BLOCK_N": 64, "BLOCK_K": BLOCK, "SPLIT": split, "STEPS": 16,
            "STAGES": 4, "EVEN_N": True, "EVEN_K": True, "PDL": True, "TRIGGER": 7,
            "GATED": gated, "GRAIN": grain,
        }  # fmt: skip
        ptx = ptx_of(_skinny_gemm_kernel, types, constants, num_warps=4, num_stages=4)
        assert f"wgmma.mma_async.sync.aligned.m64n{block_m}k32.f32.e4m3.e4m3" in ptx
        assert_all_loads_overlap(ptx)
        assert not re.search(NO_FLOAT_ATOMICS, ptx)

    @needs_triton
    @pytest.mark.parametrize("grain", [16])
    def test_many_rows_compile_for_hopper_without_one(grain) -> None:
        types = {"x": "*fp8e4nv", "of_rows": "*fp32", "w": "*fp8e4nv", "of_weights": "*fp32"}
        sizes = "M", "N", "K", "stride_column", "stride_rows", "stride_blocks", "stride_out"
        types |= {"out": "*bf16", **dict.fromkeys(sizes, "i32")}
        constants = {
            "BLOCK_M": 128, "BLOCK_N": 64, "BLOCK": BLOCK, "GRAIN": grain, "GROUP": 8,
            "STAGES": 4, "EVEN_K": True, "PDL": True,
        }  # fmt: skip
        ptx = ptx_of(_scaled_gemm_kernel, types, constants, num_warps=4, num_stages=4)
        assert "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3" in ptx
        assert_all_loads_overlap(ptx)
        assert not re.search(NO_FLOAT_ATOMICS, ptx)

else:

    def streamed(x, w, scales, split=1, *, gated=False) -> torch.Tensor:
        tile = SkinnyTile(choose(len(x), 64, 64).block_m, 64, BLOCK, split, 4, 3, 2)
        width = len(w) // 2 if gated else len(w)
        around = torch.full((len(x) + 2, width + 3), 77.0, dtype=x.dtype)
        workspace = workspace_of([(tile, len(w))])
        workspace.partial.fill_(float("nan"))
        out = around[1:-1, :width]
        values, of_rows = eight_bits_triton(x)
        scaled = of_rows, scales
        skinny_gemm(values, w, out, workspace, tile, gated=gated, scaled=scaled)
        found = out.clone()
        around[1:-1, :width] = 77.0
        assert (around == 77.0).all()
        return found

    def tiled(x, w, scales, rows=64) -> torch.Tensor:
        around = torch.full((len(x) + 2, len(w) + 3), 77.0, dtype=x.dtype)
        out = around[1:-1, : len(w)]
        scaled_gemm(*eight_bits_triton(x), w, scales, out, ScaledTile(rows, 64, 4, 3))
        found = out.clone()
        around[1:-1, : len(w)] = 77.0
        assert (around == 77.0).all()
        return found

    def near(found: torch.Tensor, wanted: torch.Tensor, bound: float = 2**-6) -> bool:
        """Each row within two roundings to bf16, which the interpreter cuts."""
        found, wanted = found.double(), wanted.double()
        off = (found - wanted).norm(dim=-1)
        return bool((off <= bound * wanted.norm(dim=-1)).all())

    @pytest.mark.parametrize(("m", "k"), [(1, 128), (9, 200), (20, 512)])
    def test_the_kernel_rounds_as_its_definition(m, k) -> None:
        x = activations(m, k)
        assert_same_rows(eight_bits_triton(x), eight_bits_ref(x))

    def assert_same_rows(found, wanted) -> None:
        """Values and scales."""
        assert torch.equal(found[0].view(torch.uint8), wanted[0].view(torch.uint8))
        assert torch.equal(found[1], wanted[1])
        assert found[1].stride(0) == 1

    @pytest.mark.parametrize(("m", "k"), [(1, 128), (9, 200), (6, 96)])
    @pytest.mark.filterwarnings("ignore:overflow")  # numpy's, of exp
    def test_what_norms_and_gates_leave_is_rounded_as_if_alone(m, k) -> None:
        x, residual, weight = activations(m, k), noise(m, k, seed=4), noise(k, seed=5)
        *found, total = add_rms_norm_eight_triton(x, residual, weight, 1e-6)
        normed, wanted = add_rms_norm_triton(x, residual, weight, 1e-6)
        assert_same_rows(found, eight_bits_triton(normed))
        assert torch.equal(total, wanted)
        *found, total, itself = add_rms_norm_both_triton(x, residual, weight, 1e-6)
        assert_same_rows(found, eight_bits_triton(normed))
        assert torch.equal(total, wanted)
        assert torch.equal(itself, normed)
        gate_up = activations(m, 2 * k)
        assert_same_rows(swiglu_eight_triton(gate_up), eight_bits_triton(swiglu_triton(gate_up)))

    @pytest.mark.product(
        m=(1, 15, 33, 64), shape=((64, 256), (80, 200), (32, 520)), split=(1, 2, 4),
        grain=tuple(GRAINS),
    )  # fmt: skip
    def test_few_rows_equal_the_definition(m, shape, split, grain) -> None:
        n, k = shape
        x, (w, scales) = activations(m, k), matrix(n, k, grain)
        assert near(streamed(x, w, scales, split), product_of(x, w, scales))

    @pytest.mark.parametrize("grain", GRAINS)
    @pytest.mark.filterwarnings("ignore:overflow")  # numpy's, of exp
    def test_a_gated_product_equals_the_definition(grain) -> None:
        x, (w, scales) = activations(17, 256), matrix(96, 256, grain)
        found = streamed(x, w, scales, gated=True)
        assert near(found, swiglu_ref(product_of(x, w, scales)), 2**-5)

    @pytest.mark.product(
        m=(65, 130), shape=((64, 256), (80, 200)), grain=tuple(GRAINS), rows=(64, 128)
    )
    def test_many_rows_equal_the_definition(m, shape, grain, rows) -> None:
        n, k = shape
        x, (w, scales) = activations(m, k), matrix(n, k, grain)
        assert near(tiled(x, w, scales, rows), product_of(x, w, scales))

    @pytest.mark.parametrize("product", [streamed, tiled])
    @pytest.mark.filterwarnings(
        "ignore:invalid value", "ignore:overflow", "ignore:All-NaN"
    )  # of the other rows
    def test_a_kernel_s_row_depends_on_no_other(product) -> None:
        x, (w, scales) = activations(20, 256), matrix(48, 256)
        alone = product(x, w, scales)
        for row, spoil in ((0, float("nan")), (7, 1e30), (19, 0.0)):
            others = torch.full_like(x, spoil)
            others[row] = x[row]
            assert torch.equal(product(others, w, scales)[row], alone[row])

    def test_the_library_gets_operands_as_it_wants_them(monkeypatch) -> None:
        """Its layouts are checked, and what it would compute is; it runs on GPUs alone."""

        class Recipe:
            BlockWise1x128, BlockWise128x128 = "rows", "blocks"

        def scaled_mm(x, w, of_rows, by_row, of_blocks, by_block, *, output_dtype) -> torch.Tensor:
            (m, k), n = x.shape, w.shape[1]
            assert (by_row, by_block, m % 4) == ("rows", "blocks", 0)
            assert (of_rows.shape, of_rows.stride()) == ((m, k // BLOCK), (1, m))
            assert (of_blocks.shape, of_blocks.stride()) == (
                (k // BLOCK, n // BLOCK),
                (1, k // BLOCK),
            )
            held.append(of_blocks.data_ptr())
            whole = of_blocks.t().repeat_interleave(BLOCK, 0)
            return (worth(x, of_rows) @ worth(w.t(), whole).T).to(output_dtype)

        monkeypatch.setattr(torch.nn.functional, "scaled_mm", scaled_mm, raising=False)
        monkeypatch.setattr(torch.nn.functional, "ScalingType", Recipe, raising=False)
        x, (w, _) = activations(67, 512), matrix(256, 512)
        scales, held = matrix(2, 512, "rows")[1], list[int]()
        agrees.cache_clear()
        found = product_of(x, w, scales, True, by=scaled_product_triton)
        assert agrees(x.device)
        assert held[-1] == scales.data_ptr(), "no copy is made in a step"
        assert near(found, product_of(x, w, scales))
        out = torch.empty(67, 256, dtype=x.dtype)
        assert product_of(x, w, scales, True, out, by=scaled_product_triton) is out
        assert torch.equal(out, found)
        own = []
        monkeypatch.setattr(tiles, "multiplied", lambda *args: own.append(args))
        narrow = x[:, :384].contiguous(), w[:, :384].contiguous(), scales[:, :3]
        product_of(x, w, scales, by=scaled_product_triton)
        finer = scales.repeat_interleave(8, 0)
        others = (x[:64], w, scales), (x.half(), w, scales), narrow, (x, w, finer)
        for operands in others:
            product_of(*operands, True, by=scaled_product_triton)
        assert not own
        agrees.cache_clear()
        monkeypatch.setattr(torch.nn.functional, "scaled_mm", lambda x, w, *_, **__: x.float() @ w)
        assert not agrees(x.device)
        agrees.cache_clear()
