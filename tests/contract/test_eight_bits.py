"""KV in eight bits: what is stored, and that attention reads exactly that."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.contract.test_attention import BACKENDS, TABLE, make_batch, make_pool, make_rows
from tests.support.interpreted import INTERPRETED
from tests.support.pairwise import more
from worker.attention.base import AttentionShape
from worker.attention.qk_rope_store import HeadNorms, Rotation, qk_rope_store_ref, store_kv_ref
from worker.attention.qk_rope_store_triton import qk_rope_store_triton
from worker.cache.eight_bits import E4M3, dequantized, exponents_of, quantized
from worker.cache.layout import KVLayout, KVRegion
from worker.cache.pool import KVPool
from worker.config.checkpoint.mask import CAUSAL, KeyMask
from worker.forward.context import forward_context
from worker.ops.rope import rope_table
from worker.registry import resolve

EIGHT = "float8_e4m3fn"
CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
PAIRED = ["flashinfer", "by_length"]  # doubles of what takes no eight bits


def rows_of(num: int, head_dim: int, seed: int = 0) -> torch.Tensor:
    """[num, head_dim] bf16 in f32, of sizes from 1e-30 to 1e30, with zeros."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10 ** (60 * torch.rand(num, 1, generator=generator) - 30)
    made = torch.randn(num, head_dim, generator=generator) * sizes
    made *= torch.rand(num, head_dim, generator=generator) > 0.1
    made[0] = 0.0
    return made.bfloat16().float()


def test_every_number_is_near_and_every_row_uses_the_range() -> None:
    rows = rows_of(4_000, 64)
    values, exponents = quantized(rows)
    again = dequantized(values, exponents, torch.float32)
    amax = rows.abs().amax(-1, keepdim=True)
    # Half a step of e4m3: a relative one, or below 2^-6 · scale an absolute one.
    scale = (exponents.int() << 23).view(torch.float32).unsqueeze(-1)
    bound = torch.maximum(rows.abs() * 2**-4, scale * 2**-10)
    assert bool(((again - rows).abs() <= bound).all())
    used = (amax / scale)[amax > 1e-20 * 448]
    assert bool(((used > 224) & (used <= 448)).all()), "the smallest power of two"
    assert torch.equal(again, again.bfloat16().float()), "bf16 holds it"


def test_what_was_read_is_stored_as_it_was() -> None:
    """So a prompt that is computed again from pulled KV, or moved, is the same."""
    rows = rows_of(4_000, 64, seed=1)
    once = dequantized(*quantized(rows), torch.float32)
    twice = dequantized(*quantized(once), torch.float32)
    assert torch.equal(once, twice)


@pytest.mark.parametrize(("head_dim", "page_size"), [(128, 64), (96, 16), (256, 16), (32, 1)])
def test_a_page_has_exponents_and_no_number_overlaps(head_dim: int, page_size: int) -> None:
    region = KVRegion("target", 4, 2, head_dim, 2, page_size, EIGHT)
    pool = KVPool(KVLayout((region,)), 3, CPU)
    half = KVRegion("target", 4, 2, head_dim, 2, page_size, "bfloat16")
    if page_size == 64:
        assert region.page_bytes / half.page_bytes == pytest.approx(0.508, abs=5e-4)
    caches = [cache for layer in range(4) for cache in pool.layer(layer)]
    for number, cache in enumerate(caches, 1):
        cache.view(torch.uint8).fill_(number)
        exponents_of(cache).fill_(100 + number)
    for number, cache in enumerate(caches, 1):
        assert bool((cache.view(torch.uint8) == number).all())
        assert bool((exponents_of(cache) == 100 + number).all())
    pool.close()


@pytest.fixture
def pool() -> Iterator[KVPool]:
    made = KVPool(KVLayout((KVRegion("target", 1, 2, 64, 1, 16, EIGHT),)), 4, CPU)
    yield made
    made.close()


@interpreted
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("rotary_dim", [16, *more(64)])
def test_the_kernel_stores_what_the_definition_stores(norm, rotary_dim, pool: KVPool) -> None:
    generator = torch.Generator().manual_seed(2)
    qkv = torch.randn(20, (4 + 2 * 2) * 64, generator=generator)
    qkv *= 10 ** (8 * torch.rand(20, 1, generator=generator) - 4)
    slots = torch.randperm(48, generator=generator)[:20] + 16
    table = rope_table(10.0 ** -torch.arange(0, 4, 8 / rotary_dim), 128, CPU)
    weights = 1 + 0.1 * torch.randn(2, 64, generator=generator)
    norms = HeadNorms(weights[0], weights[1], 1e-6) if norm else None
    caches, found = pool.layer(0), []
    for store in (qk_rope_store_ref, qk_rope_store_triton):
        for cache in caches:
            cache.view(torch.uint8).zero_()
            exponents_of(cache).zero_()
        q = store(qkv, Rotation(table, torch.arange(20)), caches, slots, norms)
        found.append([q, *(c.float() for c in caches), *(exponents_of(c).clone() for c in caches)])
    named = zip(("q", "k", "v", "k exponents", "v exponents"), *found, strict=True)
    if norm:  # its sum may differ in the last bit, and a number fall to the other side
        for _, one, other in named:
            assert (one.float() - other.float()).abs().gt(one.float().abs() * 0.13).sum() == 0
    else:
        assert [name for name, one, other in named if not torch.equal(one, other)] == []
    assert caches[0].dtype == E4M3


def eight_and_plain(heads: int, head_dim: int, page_size: int, pages: int) -> tuple[KVPool, ...]:
    return tuple(
        make_pool(page_size, heads, head_dim, 2, dtype, pages) for dtype in (EIGHT, "float32")
    )


SHAPES = {"decode": [(40, 1), (1, 1), (130, 1)], "mixed": [(0, 37), (20, 5), (64, 1), (3, 3)]}
MASKS = {"causal": CAUSAL, "window": KeyMask(window=20), "first": KeyMask(1, False, 20)}


@pytest.mark.parametrize("mask", ["causal", *more("window", "first")])
@pytest.mark.parametrize("page_size", [16, *more("64")])
# Triton's kernel reads those of 128 in words.
@pytest.mark.parametrize("head_dim", [128, *more(32)])
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("backend", [each for each in BACKENDS if each not in PAIRED])
def test_attention_is_that_over_what_the_cache_is_worth(
    backend, shapes, head_dim, page_size, mask
) -> None:
    """Bit for bit: powers of two change no other bit, wherever a kernel applies them.

    Triton's kernel adds the dims of keys in another order. A tensor core has none
    (tests/gpu/test_eight_bits_on_cuda.py), but the library under the interpreter does.
    """
    page_size = int(page_size)
    rows, pages = make_rows(SHAPES[shapes], page_size, 3)
    batch = make_batch(rows, page_size, padded_rows=2, padded_reqs=1)
    generator = torch.Generator().manual_seed(4)
    q = torch.randn(batch.num_tokens, 4, head_dim, generator=generator)
    shape = AttentionShape(4, 2, head_dim, 0.5 * head_dim**-0.5, MASKS[mask], dtype="float32")
    num_slots = pages * page_size
    used = torch.tensor([
        row.pages[at // page_size] * page_size + at % page_size
        for row in rows for at in range(row.length)
    ])  # fmt: skip
    k, v = (
        torch.randn(num_slots, 2, head_dim, generator=generator)
        * 10 ** (2 * torch.rand(num_slots, 2, 1, generator=generator) - 1)
        for _ in range(2)
    )
    found = []
    pools = eight_and_plain(2, head_dim, page_size, pages)
    for pool in pools:
        made: Any = resolve("attention backend", backend, TABLE)(pool, shape)
        plan = made.plan(batch)
        kv = [dequantized(*quantized(each), torch.float32) for each in (k, v)]
        # Scores of keys that there are none of may be no number, before they are masked.
        with forward_context(batch, made, plan), np.errstate(invalid="ignore"):
            for layer in range(2):
                for cache in made.kv(layer):  # a page's rest may hold anything
                    cache.view(torch.uint8).fill_(255)
                    if cache.dtype == E4M3:
                        exponents_of(cache).fill_(255)
                store_kv_ref(*(each[used] for each in kv), made.kv(layer), used)
            found.append(made.forward(q, 1))
    if backend == "triton":
        assert torch.allclose(*found, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(*found)
    assert found[0][: batch.num_tokens - 2].abs().sum() > 0
    for pool in pools:
        pool.close()
