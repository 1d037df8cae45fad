"""Latent attention (MLA): a token is kept as one row, all of it a key, its first part the value.

DeepSeek-AI, "DeepSeek-V2" (arXiv:2405.04434), section 2.1. A row is the token's normed latent and
behind it one rotated key that all heads share; the latent, `value_dim` numbers, is the value.
Queries come absorbed: those of a head have been multiplied into the space of latents.
"""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from worker.attention.base import AttentionCaps
from worker.attention.qk_rope_store import Rotation, store_rows_ref
from worker.attention.reference import ReferenceAttention
from worker.cache.eight_bits import E4M3, dequantized, exponents_of
from worker.forward.batch import Batch
from worker.ops.norms import rms_norm_ref
from worker.ops.op import op

MAX_ABSORBED = 256  # padded tokens of the longest chunk whose queries come absorbed


def absorbs(num_tokens: int) -> bool:
    """Whether queries of so many tokens, padded ones included, come absorbed before a break."""
    return num_tokens <= MAX_ABSORBED


def expands(batch: Batch) -> bool:
    """Whether layers make keys and values of heads of the batch's rows, and no backend attends.

    Never where the host does not know the lengths: in windows, and in captures without breaks.
    """
    return batch.host is not None and not absorbs(batch.max_query_len)


class LatentReference(ReferenceAttention):
    """The definition: absorbed queries over one layer's rows, gathered from their pages.

    The region has one kv head of head_dim numbers (V2-Lite, V3, GLM-4.7-Flash: 576) and one part;
    the shape gives value_dim (512). q: [num_tokens, num_heads, head_dim]; the result, and `out`:
    [num_tokens, num_heads, value_dim], zeros for padded tokens. Tokens of a request, of windows and
    of chunks, see one another causally.
    """

    caps: ClassVar[AttentionCaps] = AttentionCaps(
        dtypes=ReferenceAttention.caps.dtypes,
        features=frozenset({"first_key"}),  # of a layer that drafts
        parts=1,
    )

    def plan(self, batch: Batch) -> Any:
        """None where layers expand."""
        return None if expands(batch) else super().plan(batch)


class LatentNorm(NamedTuple):
    """The RMS norm of latents."""

    weight: Tensor  # [value_dim]
    eps: float


def pairs_rope_ref(x: Tensor, rotation: Rotation) -> Tensor:
    """x with pairs (2i, 2i + 1) rotated by their token's angles, as GPT-J pairs them.

    x: [num_tokens, heads, rotary_dim]. Rotates in f32; returns a new tensor of x's dtype.
    """
    angles = rotation.table.index_select(0, rotation.positions).unsqueeze(1)
    cos, sin = angles.chunk(2, dim=-1)
    first, second = x[..., 0::2].float(), x[..., 1::2].float()
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.stack(turned, dim=-1).flatten(-2).to(x.dtype)


def latent_rope_store_ref(
    q_rope: Tensor,
    latents: Tensor,
    rotation: Rotation,
    norm: LatentNorm,
    rows: Tensor,
    slot_mapping: Tensor,
    out: Tensor,
) -> None:
    """Rotated queries go to `out`, normed latents and their rotated keys to the tokens' slots.

    q_rope: [num_tokens, num_heads, rotary_dim], strided, a head contiguous; num_heads may be 0.
    latents: [num_tokens, value_dim + rotary_dim], rows contiguous: latents before their norm, keys
    before rope. rows: a layer's [num_pages, 1, page_size, value_dim + rotary_dim], written; of
    latents' dtype, or in eight bits: then a row's exponent is of both, rounded to that dtype.
    slot_mapping: see store_kv_ref. out: of q_rope's shape, strided, a head contiguous: q_rope
    itself, or the last numbers of the heads of absorbed queries.
    """
    rotary_dim = rotation.table.shape[1]
    latent, key = latents.split([latents.shape[1] - rotary_dim, rotary_dim], dim=-1)
    key = pairs_rope_ref(key.unsqueeze(1), rotation).squeeze(1)
    row = torch.cat((rms_norm_ref(latent, norm.weight, norm.eps), key), dim=-1)
    store_rows_ref(row.unsqueeze(1), rows, slot_mapping)
    out.copy_(pairs_rope_ref(q_rope, rotation))


latent_rope_store = op(latent_rope_store_ref)


def read_rows(kept: Tensor, pages: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows of these pages as numbers of `dtype`: [len(pages) · page_size, width].

    kept: a layer's [num_pages, 1, page_size, width], of that dtype or in eight bits.
    """
    if kept.dtype != E4M3:
        return kept[:, 0].index_select(0, pages).flatten(0, 1)
    values = kept[:, 0].view(torch.uint8).index_select(0, pages).view(E4M3).flatten(0, 1)
    return dequantized(values, exponents_of(kept)[:, 0].index_select(0, pages).flatten(), dtype)


def latent_absorb_store_ref(
    q: Tensor,
    latents: Tensor,
    rotation: Rotation,
    norm: LatentNorm,
    rows: Tensor,
    slot_mapping: Tensor,
    keys: Tensor,
) -> Tensor:
    """latent_rope_store, and queries against rows: [num_tokens, num_heads, width of a row].

    q: [num_tokens, num_heads, nope_dim + rotary_dim], strided, a head contiguous; keys: [num_heads,
    nope_dim, value_dim], strided, lines contiguous: what makes keys of latents.
    """
    nope, value = keys.shape[1:]
    out = q.new_empty(*q.shape[:2], rows.shape[3])
    rotated = q[..., nope:], latents, rotation, norm, rows, slot_mapping, out[..., value:]
    latent_rope_store_ref(*rotated)
    out[..., :value] = torch.bmm(q[..., :nope].transpose(0, 1), keys).transpose(0, 1)
    return out


latent_absorb_store = op(latent_absorb_store_ref)


def latent_values_ref(attended: Tensor, values: Tensor) -> Tensor:
    """Means of latents [num_tokens, heads, value_dim], contiguous -> of values [.., numbers].

    values: [heads, numbers, value_dim], strided, lines contiguous: what makes values of latents.
    """
    return torch.bmm(attended.transpose(0, 1), values.transpose(1, 2)).transpose(0, 1)


latent_values = op(latent_values_ref)
