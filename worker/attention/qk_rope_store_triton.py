"""Kernels of qk_rope_store.py."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from worker.attention.eight_bits_triton import exponent_for
from worker.attention.qk_rope_store import HeadNorms, Rotation
from worker.cache.eight_bits import E4M3
from worker.ops.e4m3_triton import to_e4m3
from worker.ops.jit import enter, overlap, power_of_two, tl, triton

MAX_HEADS = 8  # of one token in one program: 1024 numbers at head_dim 128
MANY, WARPS = 1024, 8  # from so many tokens on, a program has so many warps, of several tokens


@triton.jit
def _normed(x, scale, weight, inside, DTYPE: tl.constexpr):
    """Numbers of heads, times their head's scale and weight; rounded as rms_norm_ref does."""
    w = tl.load(weight, mask=inside, other=0.0)[None, :]
    x = (x * scale).to(weight.dtype.element_ty).to(tl.float32) * w.to(tl.float32)
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def _store_rows(cache, start, exponents, lanes, a, b, real, both, HALF: tl.constexpr):
    """Rows of heads, two halves a, b: [ROWS, BLOCK], into slots; see eight_bits.quantized.

    start, exponents: [ROWS], where a head's row and its exponent are; real: [ROWS].
    """
    to = cache + start[:, None] + lanes[None, :]
    if cache.dtype.element_ty == tl.float8e4nv:
        a, b = a.to(tl.float32), b.to(tl.float32)
        amax = tl.maximum(tl.max(tl.abs(a), 1), tl.max(tl.abs(b), 1))
        exponent, inverse = exponent_for(amax)  # type: ignore[misc]
        inverse = inverse[:, None]
        tl.store(to, to_e4m3(a * inverse), mask=both)
        tl.store(to + HALF, to_e4m3(b * inverse), mask=both)
        at = cache.to(tl.pointer_type(tl.uint8)) + exponents
        tl.store(at, exponent.to(tl.uint8), mask=real)
    else:
        tl.store(to, a, mask=both)
        tl.store(to + HALF, b, mask=both)


@triton.jit(do_not_specialize=["num_tokens"])
def _qk_rope_store_kernel(
    qkv, positions, table, k_cache, v_cache, slot_mapping, q_weight, k_weight, q_out,
    stride_qkv, stride_layer, stride_page, stride_head, stride_token, num_tokens, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    BLOCK: tl.constexpr, LAYERS: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tokens / TOKENS, heads / HEADS), or with LAYERS (.., heads / HEADS, layers).

    HEADS divides both head counts, so a program has heads of q, of k or of v only.
    BLOCK: power of two >= HEAD_DIM / 2. A head is handled as two halves, which rope pairs.
    """
    enter(PDL)
    HALF: tl.constexpr = HEAD_DIM // 2
    row = tl.arange(0, TOKENS * HEADS)
    token = tl.program_id(0).to(tl.int64) * TOKENS + row // HEADS
    real = token < num_tokens
    if LAYERS:  # rows of qkv hold all layers, one behind the other; so does k_weight
        layer = tl.program_id(2).to(tl.int64)
        qkv += layer * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
        k_cache += layer * stride_layer
        v_cache += layer * stride_layer
        if NORM:
            k_weight += layer * HEAD_DIM
    first = tl.program_id(1) * HEADS
    heads = first + row % HEADS
    lanes = tl.arange(0, BLOCK)
    inside = lanes < HALF
    both = real[:, None] & inside[None, :]
    source = qkv + (token * stride_qkv + heads * HEAD_DIM)[:, None]
    a_at = source + lanes[None, :]
    a = tl.load(a_at, mask=both, other=0.0)
    b = tl.load(a_at + HALF, mask=both, other=0.0)

    if first < NUM_HEADS + NUM_KV_HEADS:
        DTYPE: tl.constexpr = q_out.dtype.element_ty
        x, y = a.to(tl.float32), b.to(tl.float32)
        if NORM:
            scale = tl.rsqrt(tl.sum(x * x + y * y, 1) / HEAD_DIM + eps)[:, None]
            weight = k_weight
            if first < NUM_HEADS:
                weight = q_weight
            x = _normed(x, scale, weight + lanes, inside, DTYPE)
            y = _normed(y, scale, weight + HALF + lanes, inside, DTYPE)
        position = tl.load(positions + token, mask=real, other=0)
        angles = table + (position * ROTARY_DIM)[:, None]
        if ROTARY_DIM == HEAD_DIM:
            cos = tl.load(angles + lanes[None, :], mask=both, other=0.0)
            sin = tl.load(angles + HALF + lanes[None, :], mask=both, other=0.0)
            a = (x * cos - y * sin).to(DTYPE)
            b = (y * cos + x * sin).to(DTYPE)
        else:  # all pairs lie in the first half
            PAIRS: tl.constexpr = ROTARY_DIM // 2
            turned, early = lanes < ROTARY_DIM, lanes < PAIRS
            partner = tl.where(early, lanes + PAIRS, lanes - PAIRS)
            paired = real[:, None] & turned[None, :]
            z = tl.load(source + partner[None, :], mask=paired, other=0.0).to(tl.float32)
            if NORM:
                z = _normed(z, scale, weight + partner, turned, DTYPE)  # type: ignore
            angle = angles + (lanes % PAIRS)[None, :]
            cos = tl.load(angle, mask=paired, other=1.0)
            sin = tl.load(angle + PAIRS, mask=paired, other=0.0)
            a = (x * cos + tl.where(early[None, :], -z, z) * sin).to(DTYPE)
            b = y.to(DTYPE)

    if first < NUM_HEADS:
        q_at = q_out + ((token * NUM_HEADS + heads) * HEAD_DIM)[:, None] + lanes[None, :]
        tl.store(q_at, a, mask=both)
        tl.store(q_at + HALF, b, mask=both)
    else:
        slot = tl.load(slot_mapping + token, mask=real, other=0)
        page = slot // PAGE_SIZE
        of_head = page * stride_page + (heads - NUM_HEADS) % NUM_KV_HEADS * stride_head
        start = of_head + (slot - page * PAGE_SIZE) * stride_token
        exponents = of_head + PAGE_SIZE * HEAD_DIM + (slot - page * PAGE_SIZE)
        if first < NUM_HEADS + NUM_KV_HEADS:
            _store_rows(k_cache, start, exponents, lanes, a, b, real, both, HALF)
        else:
            _store_rows(v_cache, start, exponents, lanes, a, b, real, both, HALF)


def qk_rope_store_triton(
    qkv: Tensor,
    rotation: Rotation,
    caches: tuple[Tensor, ...],
    slot_mapping: Tensor,
    norms: HeadNorms | None,
    num_layers: int = 1,
    stride_layer: int = 0,
) -> Tensor:
    """stride_layer: elements from one layer's caches to the next one's, where there are several."""
    (table, positions), (k_cache, v_cache) = rotation, caches
    _, num_kv_heads, page_size, head_dim = k_cache.shape
    num_heads = qkv.shape[1] // num_layers // head_dim - 2 * num_kv_heads
    assert k_cache.dtype in (qkv.dtype, E4M3)
    assert qkv.stride(1) == k_cache.stride(3) == 1
    assert k_cache.stride() == v_cache.stride()
    rotary_dim = table.shape[1]
    assert table.is_contiguous()
    assert rotary_dim == head_dim or rotary_dim <= head_dim // 2
    num_tokens = len(qkv)
    per_program = math.gcd(num_heads, num_kv_heads, MAX_HEADS)
    warps = max(1, per_program // 2)  # a token's: a row's sum has the same order in any launch
    tokens = max(1, WARPS // warps) if num_tokens >= MANY else 1
    q = torch.empty(num_tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    blocks = -(-num_tokens // tokens), (num_heads + 2 * num_kv_heads) // per_program, num_layers
    _qk_rope_store_kernel[blocks](
        qkv, positions, table, k_cache, v_cache, slot_mapping,
        q if norms is None else norms.q, q if norms is None else norms.k, q,
        qkv.stride(0), stride_layer, k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
        num_tokens, 0.0 if norms is None else norms.eps,
        **overlap(
            qkv, NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
            ROTARY_DIM=rotary_dim, PAGE_SIZE=page_size, TOKENS=tokens, HEADS=per_program,
            BLOCK=power_of_two(head_dim // 2), LAYERS=num_layers > 1, NORM=norms is not None,
            num_warps=tokens * warps,
            enable_fp_fusion=False,  # rope rounds products, as torch does
        ),
    )  # fmt: skip
    return q


def layers_rope_store_triton(
    kv: Tensor,
    rotation: Rotation,
    caches: Sequence[tuple[Tensor, ...]],
    slot_mapping: Tensor,
    k_weights: Tensor | None,
    eps: float,
) -> None:
    """One launch."""
    first, num_layers = caches[0], len(caches)
    spacing = 0 if num_layers == 1 else caches[1][0].data_ptr() - first[0].data_ptr()
    for layer, both in enumerate(caches):
        for cache, start in zip(both, first, strict=True):
            assert cache.data_ptr() == start.data_ptr() + layer * spacing
            assert cache.stride() == start.stride()
    assert k_weights is None or k_weights.is_contiguous()
    norms = None if k_weights is None else HeadNorms(k_weights, k_weights, eps)
    stride_layer = spacing // kv.element_size()
    qk_rope_store_triton(kv, rotation, first, slot_mapping, norms, num_layers, stride_layer)
