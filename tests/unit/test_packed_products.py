"""Products of weights in four bits: kernels against their definition, and compiled for sm_90."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.interpreted import INTERPRETED, WHY, assembled, compiling
from tests.support.pairwise import in_whole
from tests.support.products import noise
from worker.config.checkpoint.experts import ExpertShape, Held
from worker.ops import packed_triton
from worker.ops.experts import product_triton
from worker.ops.experts.product import Finish, expert_products_ref
from worker.ops.experts.route import new_load, route_ref
from worker.ops.packed import (
    as_lines,
    as_packed,
    bytes_of,
    packed_product_ref,
    padded_groups,
    worth,
    woven,
)
from worker.ops.packed_triton import choose_packed, packed_gemm, product_by_library, unpack
from worker.ops.product import MAX_PARTIALS
from worker.ops.scaled import E4M3
from worker.ops.skinny_triton import SkinnyTile

pytest.importorskip("triton", reason=WHY)
BF16, F16 = torch.bfloat16, torch.float16
# Dtype of scales, columns of a group (0: all), whether zero points and factors are stored.
NUMBERS: dict[str, tuple[torch.dtype, int, bool, bool]] = {
    "int4": (BF16, 32, False, False),
    "awq": (F16, 128, True, False),
    "rows": (torch.float32, 0, True, False),
    "mxfp4": (torch.uint8, 32, False, False),
    "nvfp4": (E4M3, 16, False, True),
}


def packed(name: str, *shape: int, seed: int = 1) -> tuple[Any, ...]:
    """(values, scales, zeros, factors) of [.., n, k], every number among them."""
    kind, group, has_zeros, has_factors = NUMBERS[name]
    generator = torch.Generator().manual_seed(seed)
    *lead, k = shape
    groups = k // group if group else 1
    values = torch.randint(0, 256, (*lead, bytes_of(k)), generator=generator, dtype=torch.uint8)
    sizes = (torch.rand(*lead, groups, generator=generator) * 4 - 6).exp2()
    scales = (sizes.log2().round() + 127).to(kind) if kind == torch.uint8 else sizes.to(kind)
    zeros = torch.randint(0, 16, scales.shape, generator=generator, dtype=torch.uint8)
    factors = torch.rand(*lead, 1, generator=generator) + 0.5
    if kind == torch.uint8:
        scales = F.pad(scales, (0, padded_groups(groups) - groups))
    return values, scales, zeros if has_zeros else None, factors if has_factors else None


def test_a_number_is_what_the_formats_say() -> None:
    """By hand: the examples of their documents."""
    two = woven(as_lines(torch.tensor([[0x5A, 0x7F]], dtype=torch.uint8)))
    of_127 = torch.tensor([[127]], dtype=torch.uint8)
    assert worth(two, of_127)[:, :4].tolist() == [[-1.0, 3.0, -6.0, 6.0]]
    assert worth(two, of_127 - 2)[:, :4].tolist() == [[-0.25, 0.75, -1.5, 1.5]]
    assert worth(two, of_127 * 0)[:, :2].tolist() == [[-(2.0**-127), 3 * 2.0**-127]]
    scales, zeros = torch.tensor([[0.5]]), torch.tensor([[7]], dtype=torch.uint8)
    two = woven(two, back=True)
    assert worth(two, scales, zeros)[:, :4].tolist() == [[1.5, -1.0, 4.0, 0.0]]
    assert worth(two, scales)[:, :4].tolist() == [[1.0, -1.5, 3.5, -0.5]]


def test_lines_have_four_numbers_in_16_bits() -> None:
    columns = torch.arange(34) % 16
    lines = as_lines((columns[::2] | columns[1::2] << 4).to(torch.uint8))
    assert lines.view(torch.uint16).tolist()[:9] == [*(0x8080 + 0x1111 * i for i in range(8)), 0]
    assert len(lines) == bytes_of(33) == 32


@pytest.mark.parametrize("kind", [torch.float32, torch.uint8, E4M3])
def test_what_is_drawn_is_near_what_is_packed(kind: torch.dtype) -> None:
    w = torch.randn(8, 96, generator=torch.Generator().manual_seed(4)) * 0.1
    values, scales, factors = as_packed(w, 96 // (16 if kind == E4M3 else 32), kind)
    found = worth(values, scales, None, factors if kind == E4M3 else None)
    assert (found - w).norm() < 0.16 * w.norm()


@pytest.mark.parametrize("m", [1, 8, 32, 64, 65, 2048])
def test_sums_are_cut_by_the_weights_shape_alone(m: int) -> None:
    shapes = (4096, 4096), (4096, 11008), (4096, 12288), (24512, 4096), (28672, 4096), (64, 64)
    for n, k in shapes:
        tile, alone = choose_packed(m, n, k), choose_packed(1, n, k, product_follows=True)
        assert tile.split == (alone.split if m <= 64 else 1)
        assert m > 64 or columns_of_a_part(tile, k) == columns_of_a_part(alone, k)
        assert tile.num_partials(n) <= MAX_PARTIALS


def columns_of_a_part(tile: SkinnyTile, k: int) -> int:
    return -(-k // (tile.block_k * tile.split)) * tile.block_k


if not INTERPRETED:

    @pytest.mark.parametrize(
        ("name", "m"),
        [("awq", 16), *in_whole(*((name, m) for name in NUMBERS for m in (8, 64, 300)))],
    )
    def test_they_compile_for_hopper_without_one(name: str, m: int) -> None:
        held, x = packed(name, 256, 256), noise(m, 256)
        tile = choose_packed(m, 256, 256)
        with compiling(packed_triton, "_packed_gemm_kernel") as ptx:
            packed_gemm(x, held, x.new_empty(m, 256), tile)
        text = ptx["_packed_gemm_kernel"]
        assert ("serialized" in assembled(text)) == ((name, m) == ("int4", 300))
        assert re.search(rf"wgmma\S+m64n{tile.block_m}k16\.f32\.bf16\.bf16", text)
        assert not re.search(r"\b(st|ld)\.local\b", text), "nothing spills"

    @pytest.mark.parametrize("name", ["awq", *in_whole(*((name,) for name in NUMBERS))])
    def test_what_a_library_multiplies_is_written_16_bytes_at_a_time(name: str) -> None:
        with compiling(packed_triton, "_unpack_kernel") as ptx:
            unpack(packed(name, 64, 256), 0, torch.empty(64, 256, dtype=BF16))
        text = ptx["_unpack_kernel"]
        assert re.search(r"ld\.global\.v4\.b32", text)
        assert set(re.findall(r"st\.global\.(\S+)", text)) == {"v4.b32"}
        assert not re.search(r"\b(st|ld)\.local\b", text)

    @pytest.mark.parametrize("name", [*in_whole(*((name,) for name in NUMBERS))])
    def test_experts_compile_for_hopper_without_one(name: str) -> None:
        x, routes, up, down = experts(name, 16, BF16)
        with compiling(product_triton) as ptx:
            finish = as_gpt_oss(BF16)
            products(x, routes, up, down, by=product_triton.expert_products_triton, finish=finish)
        text = ptx["_grouped_kernel"]
        assert re.search(r"wgmma\S+m64n16k16\.f32\.bf16\.bf16", text)
        assert "serialized" not in assembled(text), "each product would wait for the one before"
        assert not re.search(r"\b(st|ld)\.local\b", text)


def experts(name: str, n: int, dtype: torch.dtype) -> tuple[Any, ...]:
    shape, held = ExpertShape(4, 2, 128, renormalizes=True), Held(0, 4)
    x, gate = noise(n, 256, dtype=dtype), noise(4, 256, dtype=dtype, seed=3)
    routes = route_ref(x, gate, None, 0, shape, held, new_load(held, torch.device("cpu")))
    return x, routes, packed(name, 4, 256, 256), packed(name, 4, 256, 128, seed=2)


def products(
    x: Tensor, routes: Any, up: Any, down: Any, by: Any = expert_products_ref, **more: Any
) -> Tensor:
    return by(x, routes, up[0], down[0], Held(0, 4), None, packed=(up[1:], down[1:]), **more)


def as_gpt_oss(dtype: torch.dtype) -> Finish:
    """Biases and a clamp, of the experts that are here."""
    biases = (noise(4, 256, dtype=dtype, seed=seed) for seed in (5, 6))
    return Finish(*biases, gain=1.702, plus=1.0, limit=1.0)


if INTERPRETED:

    def near(found: Tensor, wanted: Tensor, bound: float = 2**-6) -> bool:
        """Rows within two roundings to bf16, which the interpreter cuts."""
        found, wanted = found.double(), wanted.double()
        return bool(((found - wanted).norm(dim=-1) <= bound * wanted.norm(dim=-1)).all())

    def tiled(x: Tensor, held: Any, n: int, split: int = 1, tokens: int = 16) -> Tensor:
        around = torch.full((len(x) + 2, n + 3), 77.0, dtype=x.dtype)
        out = around[1:-1, :n]
        packed_gemm(x, held, out, SkinnyTile(tokens, 64, 128, split, 4, 3, 0))
        found = out.clone()
        around[1:-1, :n] = 77.0
        assert (around == 77.0).all()
        return found

    @pytest.mark.parametrize(
        ("name", "m", "shape", "split", "dtype"),
        [
            ("int4", 3, (80, 96), 2, BF16),
            ("awq", 17, (64, 256), 1, F16),
            ("rows", 1, (32, 99), 1, BF16),
            ("mxfp4", 3, (64, 96), 2, BF16),
            ("nvfp4", 3, (48, 96), 1, BF16),
            *in_whole(
                *((name, m, (n, 256), split, dtype)
                  for name in NUMBERS for m in (1, 40) for n in (64, 100) for split in (1, 2)
                  for dtype in (BF16, F16) if (name, dtype) != ("mxfp4", F16))
            ),
        ],
    )  # fmt: skip
    def test_a_kernel_equals_the_definition(name, m, shape, split, dtype) -> None:
        held, x = packed(name, *shape), noise(m, shape[1], dtype=dtype)
        assert near(tiled(x, held, shape[0], split, 64), packed_product_ref(x, *held))

    @pytest.mark.parametrize(
        ("name", "dtype"),
        [("awq", F16), ("mxfp4", BF16), *in_whole(*((x, F16) for x in ("int4", "rows", "nvfp4")))],
    )
    def test_a_library_multiplies_numbers_that_are_rounded_once(name, dtype, monkeypatch) -> None:
        held, x = packed(name, 50, 128), noise(3, 128, dtype=dtype)
        around = torch.full((52, 128), 77.0, dtype=dtype)
        numbers = worth(*held).to(dtype)
        assert torch.equal(unpack(held, 0, around[1:51]), numbers)
        assert torch.equal(unpack(held, 20, around[1:31]), numbers[20:])
        assert (around[[0, 51]] == 77.0).all()
        monkeypatch.setattr(packed_triton, "SLICE_BYTES", 16 * 128 * 2)
        assert near(product_by_library(x, held, x.new_empty(3, 50)), x @ numbers.t())

    def test_a_gated_product_is_its_swiglu() -> None:
        held, x = packed("awq", 80, 256), noise(3, 256, dtype=F16)
        tile, found = SkinnyTile(16, 64, 256, 1, 4, 3, 0), torch.full((3, 40), 77.0, dtype=F16)
        packed_gemm(x, held, found, tile, gated=True)
        assert near(found, packed_product_ref(x, *held, gated=True))

    @pytest.mark.parametrize("name", ["awq", *in_whole(("mxfp4",), ("nvfp4",))])
    @pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
    def test_a_row_depends_on_no_other(name: str) -> None:
        held, x = packed(name, 64, 128), noise(20, 128)
        alone = tiled(x, held, 64)
        for row, spoil in ((7, float("nan")), (19, 0.0)):
            others = torch.full_like(x, spoil)
            others[row] = x[row]
            assert torch.equal(tiled(others, held, 64)[row], alone[row])

    @pytest.mark.parametrize(
        ("name", "n"),
        [
            ("awq", 5),
            ("mxfp4", 40),
            *in_whole(*((name, n) for name in NUMBERS for n in (3, 5, 40))),
        ],
    )
    @pytest.mark.filterwarnings("ignore:overflow")  # numpy's, of exp
    def test_experts_equal_the_definition(name: str, n: int) -> None:
        dtype = F16 if name != "mxfp4" else BF16
        x, routes, up, down = experts(name, n, dtype)
        for more in ({}, {"finish": as_gpt_oss(dtype)}):
            found = products(x, routes, up, down, product_triton.expert_products_triton, **more)
            assert near(found, products(x, routes, up, down, **more), 2**-5)
