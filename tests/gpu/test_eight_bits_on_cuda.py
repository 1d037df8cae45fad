"""KV in eight bits on a GPU: what is stored, and that attention reads exactly that."""

from typing import Any

import pytest
import torch

from worker.attention.base import AttentionShape
from worker.attention.qk_rope_store import HeadNorms, Rotation, qk_rope_store_ref
from worker.attention.triton import TritonAttention
from worker.cache.eight_bits import dequantized, exponents_of, quantized
from worker.cache.layout import KVLayout, KVRegion
from worker.cache.pool import KVPool
from worker.forward.batch import Batch, HostLengths
from worker.forward.context import forward_context
from worker.ops.mask import CAUSAL, KeyMask
from worker.ops.rope import rope_table

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
    [(1, 1, 8192), (32, 1, 1000), (256, 1, 300), (8, 4, 700), (2, 512, 900), (1, 2048, 4096)],
)
@pytest.mark.parametrize("head_dim", [128, 256])
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
    assert torch.equal(*found)
    assert bool(found[0].isfinite().all())
