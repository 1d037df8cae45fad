"""Kernels of layers_rope_store.py."""

from __future__ import annotations

import math

from torch import Tensor

from worker.attention.layers_rope_store import Caches
from worker.attention.qk_rope_store_triton import MAX_HEADS, normed_heads
from worker.ops.jit import gdc_launch_dependents, gdc_wait, tl, triton
from worker.ops.launch import overlap, power_of_two


@triton.jit
def _layers_rope_store_kernel(
    kv, positions, table, k_cache, v_cache, slot_mapping, k_weights,
    stride_kv, stride_layer, stride_page, stride_head, stride_token, eps,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, 2 * NUM_KV_HEADS / HEADS, layers); see _qk_rope_store_kernel."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    HALF: tl.constexpr = HEAD_DIM // 2
    token, layer = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    first = tl.program_id(1) * HEADS
    heads = first + tl.arange(0, HEADS)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < HALF
    both = inside[None, :]
    row = kv + token * stride_kv + layer * (2 * NUM_KV_HEADS * HEAD_DIM)
    at = row + heads[:, None] * HEAD_DIM + lanes[None, :]
    a = tl.load(at, mask=both, other=0.0)
    b = tl.load(at + HALF, mask=both, other=0.0)
    slot = tl.load(slot_mapping + token)
    page = slot // PAGE_SIZE
    start = layer * stride_layer + page * stride_page + (slot - page * PAGE_SIZE) * stride_token
    if first < NUM_KV_HEADS:
        DTYPE: tl.constexpr = k_cache.dtype.element_ty
        position = tl.load(positions + token)
        cos = tl.load(table + position * HEAD_DIM + lanes, mask=inside, other=0.0)[None, :]
        sin = tl.load(table + position * HEAD_DIM + HALF + lanes, mask=inside, other=0.0)[None, :]
        x, y = a.to(tl.float32), b.to(tl.float32)
        if NORM:
            weight = k_weights + layer * HEAD_DIM
            normed = normed_heads(x, y, weight, lanes, inside, eps, HEAD_DIM, DTYPE)
            x, y = normed[0], normed[1]
        to = k_cache + start + heads[:, None] * stride_head + lanes[None, :]
        tl.store(to, (x * cos - y * sin).to(DTYPE), mask=both)
        tl.store(to + HALF, (y * cos + x * sin).to(DTYPE), mask=both)
    else:
        to = v_cache + start + (heads - NUM_KV_HEADS)[:, None] * stride_head + lanes[None, :]
        tl.store(to, a, mask=both)
        tl.store(to + HALF, b, mask=both)


def layers_rope_store_triton(
    kv: Tensor,
    positions: Tensor,
    table: Tensor,
    caches: Caches,
    slot_mapping: Tensor,
    k_weights: Tensor | None,
    eps: float,
) -> None:
    """See layers_rope_store_ref; one launch."""
    (k_cache, v_cache), num_layers = caches[0], len(caches)
    _, num_kv_heads, page_size, head_dim = k_cache.shape
    item = k_cache.element_size()
    spacing = 0 if num_layers == 1 else caches[1][0].data_ptr() - k_cache.data_ptr()
    for layer, each in enumerate(caches):
        for cache, first in zip(each, caches[0], strict=True):
            assert cache.data_ptr() == first.data_ptr() + layer * spacing
            assert cache.stride() == k_cache.stride()
    assert kv.dtype == k_cache.dtype
    assert kv.stride(1) == k_cache.stride(3) == 1
    assert table.is_contiguous()
    assert k_weights is None or k_weights.is_contiguous()
    per_program = math.gcd(num_kv_heads, MAX_HEADS)
    _layers_rope_store_kernel[(len(kv), 2 * num_kv_heads // per_program, num_layers)](
        kv, positions, table, k_cache, v_cache, slot_mapping,
        kv if k_weights is None else k_weights,
        kv.stride(0), spacing // item, k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), eps,
        **overlap(
            kv, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, PAGE_SIZE=page_size,
            HEADS=per_program, BLOCK=power_of_two(head_dim // 2), NORM=k_weights is not None,
            num_warps=max(1, per_program // 2),
            enable_fp_fusion=False,  # rope rounds each product, as torch does
        ),
    )  # fmt: skip
