"""KV and weights in eight bits on a GPU: what is stored, what reads it, what multiplies it."""

from typing import Any

import pytest
import torch

from tests.equivalence import test_eight_bit_weights as laws
from tests.support.scaled import product_of, worth
from worker.attention.base import AttentionShape
from worker.attention.qk_rope_store import HeadNorms, Rotation, qk_rope_store_ref
from worker.attention.triton import TritonAttention
from worker.cache.eight_bits import dequantized, exponents_of, quantized
from worker.cache.layout import KVLayout, KVRegion
from worker.cache.pool import KVPool
from worker.config.checkpoint.experts import ExpertShape, Held
from worker.config.checkpoint.mask import CAUSAL, KeyMask
from worker.config.checkpoint.quantization import SCALE_BLOCK as BLOCK
from worker.forward.batch import Batch, HostLengths
from worker.forward.context import forward_context
from worker.ops.experts.product import expert_products, expert_products_ref
from worker.ops.experts.route import new_load, route
from worker.ops.rope import rope_table
from worker.ops.scaled import (
    eight_bits,
    eight_bits_ref,
    scaled_gated_product,
    scaled_gated_product_ref,
    scaled_product,
)
from worker.ops.scaled_boxed_triton import MAX_BOXED_ROWS, choose_boxed
from worker.weights.eight_bits import as_e4m3

pytestmark = pytest.mark.gpu(1)
EIGHT, PAGE, HEADS, KV_HEADS = "float8_e4m3fn", 64, 32, 8


def pool_of(dtype: str, head_dim: int, num_pages: int) -> KVPool:
    region = KVRegion("target", 1, KV_HEADS, head_dim, 1, PAGE, dtype)
    return KVPool(KVLayout((region,)), num_pages, torch.device("cuda"))


@pytest.mark.parametrize("head_dim", [128, 96, 256])
def test_the_kernel_stores_what_the_definition_stores(head_dim: int) -> None:
    from worker.attention.qk_rope_store_triton import qk_rope_store_triton

    torch.manual_seed(0)
    qkv = torch.randn(300, (HEADS + 2 * KV_HEADS) * head_dim, device="cuda")
    qkv = (qkv * 10 ** (8 * torch.rand(300, 1, device="cuda") - 4)).bfloat16()
    inverse = 10.0 ** -torch.arange(0, 4, 8 / head_dim)
    rotation = Rotation(rope_table(inverse, 512, qkv.device), torch.arange(300, device="cuda"))
    slots = torch.randperm(9 * PAGE, device="cuda")[:300] + PAGE
    found = []
    for store in (qk_rope_store_ref, qk_rope_store_triton):
        pool = pool_of(EIGHT, head_dim, 10)
        q = store(qkv, rotation, pool.layer(0), slots, None)
        found.append([q, *(each.view(torch.uint8).clone() for each in pool.caches())])
    assert all(map(torch.equal, *found))
    weights = torch.rand(2, head_dim, device="cuda", dtype=torch.bfloat16)
    qk_rope_store_triton(
        qkv, rotation, pool.layer(0), slots, HeadNorms(weights[0], weights[1], 1e-6)
    )


@pytest.mark.parametrize("mask", [CAUSAL, KeyMask(window=300)], ids=["causal", "window"])
@pytest.mark.parametrize(
    ("num_reqs", "width", "context"),
    [
        (1, 1, 8192),
        (32, 1, 1000),
        (64, 1, 1000),
        (256, 1, 300),
        (8, 4, 700),
        (8, 8, 700),
        (1, 16, 900),
        (3, 100, 700),
        (2, 512, 900),
        (1, 2048, 4096),
    ],
)
@pytest.mark.parametrize("head_dim", [128, 256, 96, 64])
def test_attention_has_the_bits_of_what_the_cache_is_worth(
    head_dim, num_reqs, width, context, mask
) -> None:
    torch.manual_seed(1)
    pages = -(-context // PAGE)
    pools = [pool_of(dtype, head_dim, num_reqs * pages + 1) for dtype in (EIGHT, "bfloat16")]
    for eight, plain in zip(pools[0].layer(0), pools[1].layer(0), strict=True):
        sizes = 10 ** (2 * torch.rand(*plain.shape[:3], 1, device="cuda") - 1)
        values, exponents = quantized((torch.randn(plain.shape, device="cuda") * sizes).bfloat16())
        eight.copy_(values)
        exponents_of(eight).copy_(exponents)
        plain.copy_(dequantized(values, exponents, torch.bfloat16))
    order = (torch.randperm(num_reqs * pages) + 1).int().view(num_reqs, pages).cuda()
    num_tokens = num_reqs * width
    ids = torch.zeros(num_tokens, dtype=torch.int64, device="cuda")
    starts = torch.arange(num_reqs + 1, dtype=torch.int32, device="cuda") * width
    lengths = torch.full((num_reqs,), context, dtype=torch.int32, device="cuda")
    host = HostLengths([width] * num_reqs, [context] * num_reqs)
    batch = Batch(ids, ids, ids, starts, lengths, order, num_reqs, num_tokens, width, context, host)
    q = torch.randn(num_tokens, HEADS, head_dim, device="cuda").bfloat16()
    shape = AttentionShape(HEADS, KV_HEADS, head_dim, head_dim**-0.5, mask, dtype="bfloat16")
    found = []
    for pool in pools:
        made: Any = TritonAttention(pool, shape)
        with forward_context(batch, made, made.plan(batch)):
            found.append(made.forward(q, 0))
    assert int((found[0] != found[1]).sum()) == 0
    assert bool(found[0].isfinite().all())


SHAPES = [
    (6144, 4096, 128), (4096, 12288, 16), (24576, 4096, 128), (24576, 4096, 1), (304, 1000, 16),
    (1024, 576, 1),
]  # fmt: skip


def eight_of(n: int, k: int, grain: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.randn(n, k, device="cuda") * k**-0.5
    return as_e4m3(drawn, (n // grain, -(-k // BLOCK) if grain > 1 else 1))


def rows_of(m: int, k: int) -> torch.Tensor:
    sizes = 10 ** (4 * torch.rand(m, 1, device="cuda") - 2)
    return (torch.randn(m, k, device="cuda") * sizes).bfloat16()


@pytest.mark.parametrize("m", [1, 17, 300])
def test_activations_are_rounded_as_by_the_definition(m: int) -> None:
    torch.manual_seed(2)
    for k in (128, 1000, 4096):
        x = rows_of(m, k)
        (values, scales), (wanted, of_wanted) = eight_bits(x), eight_bits_ref(x)
        assert torch.equal(values.view(torch.uint8), wanted.view(torch.uint8))
        assert torch.equal(scales, of_wanted)


def assert_products_are_the_definition_s(x: torch.Tensor, *rest: Any) -> None:
    """Gated ones are in eight bits, and where the sum differs by a bit a number may round to the
    next step of e4m3. Of some rows one number is nearly all."""

    def off(got: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
        assert got.shape == exact.shape
        return (got.double() - exact).norm(dim=-1) / exact.double().norm(dim=-1)

    assert off(product_of(x, *rest, by=scaled_product), product_of(x, *rest)).max() < 8e-3
    both = scaled_gated_product, scaled_gated_product_ref
    gated = off(*(worth(*product_of(x, *rest, by=by)) for by in both))
    assert gated.max() <= 2**-3
    assert gated.mean() < 0.02


@pytest.mark.parametrize("m", [1, 8, 33, 64, 65, 128, 300, 2048])
@pytest.mark.parametrize(("n", "k", "grain"), SHAPES)
def test_products_are_the_definition_s(m: int, n: int, k: int, grain: int) -> None:
    torch.manual_seed(3)
    assert_products_are_the_definition_s(rows_of(m, k), *eight_of(n, k, grain))


@pytest.mark.parametrize(("n", "k", "grain"), SHAPES)
def test_a_row_of_a_product_is_the_same_in_any_batch(n: int, k: int, grain: int) -> None:
    torch.manual_seed(4)
    x, eight = rows_of(2048, k), eight_of(n, k, grain)

    def product(rows: torch.Tensor) -> torch.Tensor:
        return product_of(rows, *eight, by=scaled_product)

    def gated(rows: torch.Tensor) -> torch.Tensor:
        return worth(*product_of(rows, *eight, by=scaled_gated_product))

    for way, has_gates in ((product, False), (gated, n >= 6144)):
        band = [m for m in range(64, MAX_BOXED_ROWS + 1) if choose_boxed(m, n, k, gated=has_gates)]
        most = max(band, default=64)
        few = {1, 2, 16, 33, 63, 64, min(65, most), most}
        for counts in (sorted(few), (most + 1, 300, 1024, 2048)):
            whole = way(x[: counts[-1]])
            for count in counts:
                assert torch.equal(way(x[:count]), whole[:count]), (way, count)
    x[1:] = float("nan")
    assert torch.equal(product(x[:64])[0], product(x[:1])[0])


@pytest.mark.parametrize("count", [1, 20, 200, 1024])
def test_experts_are_the_definition_s_and_rows_the_same_in_any_batch(count: int) -> None:
    torch.manual_seed(5)
    shape, held, size = ExpertShape(64, 8, 256, renormalizes=True), Held(0, 64), 512
    x, gate = torch.randn(count, size, device="cuda").bfloat16(), rows_of(64, size)
    stacks = [
        as_e4m3(torch.randn(64, n, k, device="cuda") * k**-0.5, (64, n // 16, k // 128))
        for n, k in ((512, size), (size, 256))
    ]
    (up, of_up), (down, of_down) = stacks

    def computed(x: torch.Tensor, products: Any = expert_products) -> torch.Tensor:
        routes = route(x, gate, None, 0, shape, held, new_load(held, x.device))
        return products(x, routes, up, down, held, scales=(of_up, of_down))

    got, exact = computed(x), computed(x, expert_products_ref)
    norm = exact.float().norm(dim=-1).clamp_min(1e-3)
    off = (got.float() - exact.float()).norm(dim=-1) / norm
    # A hidden number may fall to the other side of a step: tensor cores add e4m3 with 14 bits.
    assert off.max() < 0.04
    assert off.mean() < 2**-7
    for few in {1, count // 3 or 1, count - 1 or 1}:
        assert torch.equal(computed(x[:few]), got[:few])


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("qwen3", "fp8"),
        ("phi3", "channel"),
        ("experts", "fp8"),
        ("gated", "block"),
        ("shared", "fp8"),
    ],
)
def test_a_model_in_eight_bits_says_the_same_whatever_serves_it(kind: str, form: str) -> None:
    """Through graphs, which a start compares with eager steps bit for bit."""
    kv = "float8_e4m3fn" if kind == "qwen3" else "auto"
    for dtype, ways in (("bfloat16", ["pulled"]), ("float32", ["pulled", "preempted"])):
        wanted = laws.served(kind, form, "here", kv, dtype, device="cuda", strict=True)
        for way in ways:
            assert laws.served(kind, form, way, kv, dtype, device="cuda", strict=True) == wanted
