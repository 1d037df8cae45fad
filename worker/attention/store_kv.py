"""Write the new tokens' keys and values into the paged cache."""

from __future__ import annotations

from torch import Tensor


def store_kv_ref(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """k_cache[page, :, offset] = k[i] for slot_mapping[i] = page · page_size + offset; v alike.

    k, v: [num_tokens, num_kv_heads, head_dim] of the cache's dtype.
    k_cache, v_cache: [num_pages, num_kv_heads, page_size, head_dim], strided views, written.
    slot_mapping: [num_tokens] i64. Slots repeat on page 0 only (padded rows), where it does not
    matter which of them wins.
    """
    page_size = k_cache.shape[2]
    pages = slot_mapping // page_size
    offsets = slot_mapping - pages * page_size
    k_cache.transpose(1, 2)[pages, offsets] = k
    v_cache.transpose(1, 2)[pages, offsets] = v


store_kv = store_kv_ref
