"""From the packed projection to attention's input in one pass: q/k norm, rope, and the KV store."""

from __future__ import annotations

from torch import Tensor

from worker.attention.store_kv import store_kv_ref
from worker.ops.op import op
from worker.ops.rms_norm import rms_norm_ref
from worker.ops.rope import rope_ref


def qk_rope_store_ref(
    qkv: Tensor,
    positions: Tensor,
    table: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> Tensor:
    """The rotated queries; the rotated keys and the values go to their slots.

    Args:
        qkv: [num_tokens, (num_heads + 2 · num_kv_heads) · head_dim] of the cache's dtype, each
            row contiguous: the heads of q, then of k, then of v. num_heads may be 0.
        positions: [num_tokens] i64.
        table: see rope_table.
        k_cache: see store_kv_ref; written, like v_cache.
        v_cache: of the same strides.
        slot_mapping: [num_tokens] i64; see store_kv_ref.
        q_weight: [head_dim], the norm of each head of q before rope; None: no norm. k_weight alike.
        k_weight: None if and only if q_weight is.
        eps: of both norms.

    Returns:
        [num_tokens, num_heads, head_dim], contiguous.
    """
    num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
    kv_width = num_kv_heads * head_dim
    parts = qkv.split([qkv.shape[1] - 2 * kv_width, kv_width, kv_width], dim=-1)
    q, k, v = (part.view(len(qkv), part.shape[1] // head_dim, head_dim) for part in parts)
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm_ref(q, q_weight, eps), rms_norm_ref(k, k_weight, eps)
    q, k = rope_ref(q, k, positions, table)
    store_kv_ref(k, v, k_cache, v_cache, slot_mapping)
    return q


qk_rope_store = op(qk_rope_store_ref)
