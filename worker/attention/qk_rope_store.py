"""From the packed projection to attention's input in one pass: q/k norm, rope, and the KV store."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from worker.cache.eight_bits import E4M3, exponents_of, quantized
from worker.ops.norms import rms_norm_ref
from worker.ops.op import op


def rope_ref(q: Tensor, k: Tensor, positions: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """q and k with pairs (i, i + rotary_dim/2) rotated by their token's angles (the NeoX pairing).

    q, k: [num_tokens, heads, head_dim]; positions: [num_tokens] i64; table: see rope_table; numbers
    of a head from rotary_dim on stay. Rotates in f32; returns new tensors of the inputs' dtype.
    """
    cos, sin = table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = (first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype)
    return torch.cat((*turned, x[..., 2 * half :]), dim=-1)


def store_kv_ref(k: Tensor, v: Tensor, caches: tuple[Tensor, ...], slot_mapping: Tensor) -> None:
    """k_cache[page, :, offset] = k[i] for slot_mapping[i] = page · page_size + offset; v alike.

    k, v: [num_tokens, num_kv_heads, head_dim] of the caches' dtype, or any for eight bits.
    caches: k_cache, v_cache: [num_pages, num_kv_heads, page_size, head_dim], strided, written.
    slot_mapping: [num_tokens] i64. Slots repeat on page 0 only (padded rows), where any may win.
    """
    for cache, rows in zip(caches, (k, v), strict=True):
        store_rows_ref(rows, cache, slot_mapping)


def store_rows_ref(rows: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """One of store_kv_ref's two; rows: [num_tokens, num_kv_heads, head_dim]."""
    pages, offsets = slot_mapping // cache.shape[2], slot_mapping % cache.shape[2]
    if cache.dtype == E4M3:
        values, exponents = quantized(rows)
        exponents_of(cache).transpose(1, 2)[pages, offsets] = exponents
        cache, rows = cache.view(torch.uint8), values.view(torch.uint8)
    cache.transpose(1, 2)[pages, offsets] = rows


class Rotation(NamedTuple):
    """By which angles a batch's tokens are rotated."""

    table: Tensor  # see rope_table
    positions: Tensor  # [num_tokens] i64


class HeadNorms(NamedTuple):
    """RMS norms of heads, before rope."""

    q: Tensor  # [head_dim]
    k: Tensor
    eps: float


def qk_rope_store_ref(
    qkv: Tensor,
    rotation: Rotation,
    caches: tuple[Tensor, ...],
    slot_mapping: Tensor,
    norms: HeadNorms | None,
) -> Tensor:
    """Rotated queries [num_tokens, num_heads, head_dim]; rotated keys and values go to their slots.

    qkv: [num_tokens, (num_heads + 2 · num_kv_heads) · head_dim] as in store_kv_ref, rows
    contiguous: the heads of q, then of k, then of v. num_heads may be 0. caches, slot_mapping: see
    store_kv_ref; the caches have equal strides.
    """
    _, num_kv_heads, _, head_dim = caches[0].shape
    kv_width = num_kv_heads * head_dim
    parts = qkv.split([qkv.shape[1] - 2 * kv_width, kv_width, kv_width], dim=-1)
    q, k, v = (part.view(len(qkv), part.shape[1] // head_dim, head_dim) for part in parts)
    if norms is not None:
        q, k = rms_norm_ref(q, norms.q, norms.eps), rms_norm_ref(k, norms.k, norms.eps)
    q, k = rope_ref(q, k, rotation.positions, rotation.table)
    store_kv_ref(k, v, caches, slot_mapping)
    return q


qk_rope_store = op(qk_rope_store_ref)


def layers_rope_store_ref(
    kv: Tensor,
    rotation: Rotation,
    caches: Sequence[tuple[Tensor, ...]],
    slot_mapping: Tensor,
    k_weights: Tensor | None,
    eps: float,
) -> None:
    """Store keys and values of several layers at once, of tokens that do not attend.

    kv: [num_tokens, num_layers · 2 · num_kv_heads · head_dim], by layer as qkv above. caches:
    by layer, equally spaced in memory. k_weights: [num_layers, head_dim], norms of k's heads before
    rope; None: no norm. The others: see qk_rope_store_ref.
    """
    for layer, part in enumerate(kv.chunk(len(caches), dim=1)):
        norms = None if k_weights is None else HeadNorms(k_weights[layer], k_weights[layer], eps)
        qk_rope_store_ref(part, rotation, caches[layer], slot_mapping, norms)


layers_rope_store = op(layers_rope_store_ref)
