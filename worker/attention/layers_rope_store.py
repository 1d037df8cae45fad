"""Keys and values of several layers at once, of tokens that do not attend: norm, rope, KV store."""

from collections.abc import Sequence

from torch import Tensor

from worker.attention.qk_rope_store import HeadNorms, Rotation, qk_rope_store_ref
from worker.ops.op import op

Caches = Sequence[tuple[Tensor, ...]]


def layers_rope_store_ref(
    kv: Tensor,
    positions: Tensor,
    table: Tensor,
    caches: Caches,
    slot_mapping: Tensor,
    k_weights: Tensor | None,
    eps: float,
) -> None:
    """Rotate the keys of all layers, and put them and the values into their slots.

    Args:
        kv: [num_tokens, num_layers · 2 · num_kv_heads · head_dim] of the caches' dtype, each row
            contiguous: of each layer the heads of k, then of v.
        positions: [num_tokens] i64.
        table: see rope_table.
        caches: keys and values of each layer, see KVPool.layer; equally spaced in memory.
        slot_mapping: [num_tokens] i64; see store_kv_ref.
        k_weights: [num_layers, head_dim], the norm of each head of k before rope; None: no norm.
        eps: of these norms.
    """
    for layer, part in enumerate(kv.chunk(len(caches), dim=1)):
        norms = None if k_weights is None else HeadNorms(k_weights[layer], k_weights[layer], eps)
        qk_rope_store_ref(part, Rotation(table, positions), caches[layer], slot_mapping, norms)


layers_rope_store = op(layers_rope_store_ref)
