"""Attention in plain torch, for any device, page size, dtype of float and head size."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.attention.base import AttentionCaps, AttentionShape, PoolAttention
from worker.cache.eight_bits import E4M3, dequantized
from worker.cache.pool import KVPool
from worker.forward.batch import Batch
from worker.forward.context import current

# Key columns are padded to this: fused kernels on CUDA want aligned mask rows.
KEY_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    """Gather indices and the mask of one batch, padded to [num_reqs, width] × [num_keys].

    width = max_query_len; num_keys = max_seq_len_ub rounded up; group = query heads per kv head.
    """

    query_rows: Tensor  # [num_reqs * width] i64; batch rows of padded query rows
    key_rows: Tensor  # [num_reqs * num_kv_heads * num_keys] i64; rows of head_dim in the pool
    mask: Tensor  # [num_reqs, 1, group * width, num_keys]; 0 or -inf, added to the scores
    out_rows: Tensor  # [num_tokens] i64; padded query rows of batch rows
    is_padding: Tensor  # [num_tokens, 1, 1] bool; rows whose result is zero
    scratch: Sequence[Tensor]  # parts: [num_reqs, num_kv_heads, num_keys, head_dim]; layers refill
    keys: Tensor  # the first of them
    values: Tensor  # the last of them, its leading out_dim numbers
    width: int


class ReferenceAttention(PoolAttention):
    """Gathers the requests' keys and values, then runs one padded, masked attention.

    Work and memory grow with num_reqs · max_query_len · max_seq_len_ub. For 64 × 304 tokens of 2
    heads × 32 (f32, two CPU cores), one index_select of rows of head_dim takes 0.25 ms, indexing
    the strided view 0.77. Into fresh memory it takes 3 ms, most of them page faults, so the layers
    of one pass share their scratch.
    """

    caps: ClassVar[AttentionCaps] = AttentionCaps(
        dtypes=frozenset({"float32", "bfloat16", "float16", "float8_e4m3fn"})
    )
    static_plan: ClassVar[bool] = True

    def __init__(self, pool: KVPool, shape: AttentionShape, sinks: Sequence[Tensor] = ()) -> None:
        super().__init__(pool, shape, sinks)
        self.num_heads, self.num_kv_heads = self.heads
        self.head_dim, self.mask = shape.head_dim, shape.mask
        self._is_plain = shape.features == shape.mask.unlike_causal  # no cap and no sinks
        self._is_eight = self._layers[0][0].dtype == E4M3
        item_bytes = self._layers[0][0].element_size()
        # With exponents, if there are any.
        self._rows_per_part = self.region.part_bytes // (self.head_dim * item_bytes)
        self._rows = [
            tuple(_as_rows(part, self._rows_per_part) for part in parts) for parts in self._layers
        ]
        page_stride, head_stride, token_stride, _ = self._layers[0][0].stride()
        assert token_stride == self.head_dim, "a head's tokens of a page are contiguous"
        self._rows_per_page = page_stride // self.head_dim
        heads = torch.arange(self.num_kv_heads, device=pool.device)
        self._head_rows = (heads * (head_stride // self.head_dim)).view(1, -1, 1)

    def plan(self, batch: Batch) -> ReferencePlan:
        width = batch.max_query_len
        num_keys = -(-batch.max_seq_len_ub // KEY_ALIGNMENT) * KEY_ALIGNMENT
        device = batch.seq_lens.device
        seq_lens = batch.seq_lens.long()
        query_start = batch.query_start.long()
        query_lens = query_start[1:] - query_start[:-1]
        columns = torch.arange(width, device=device)
        query_rows = (query_start[:-1, None] + columns).clamp(max=batch.num_tokens - 1)

        keys = torch.arange(num_keys, device=device)
        positions = (seq_lens - query_lens)[:, None] + columns  # [num_reqs, width]
        first_key = torch.full_like(positions, self.mask.first_key)
        if self.mask.window is not None:
            first_key = torch.maximum(first_key, positions - self.mask.window + 1)
        whole = (seq_lens - 1)[:, None].expand_as(positions)
        last_key = positions if self.mask.causal else whole
        attends = (columns < query_lens[:, None]) & (positions >= 0) & (first_key <= last_key)
        # A query row that sees nothing sees key 0, because a softmax over nothing is NaN.
        first_key, last_key = (torch.where(attends, key, 0) for key in (first_key, last_key))
        hidden = (keys < first_key[:, :, None]) | (keys > last_key[:, :, None])
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=device)
        mask.masked_fill_(hidden, float("-inf"))

        rows = torch.arange(batch.num_tokens, device=device)
        owner = torch.searchsorted(query_start[1:], rows, right=True)
        owner = owner.clamp(max=batch.num_reqs - 1)
        column = (rows - query_start[owner]).clamp(0, width - 1)
        out_rows = owner * width + column
        is_padding = (rows >= query_start[-1]) | ~attends.flatten()[out_rows]
        kv_shape = (batch.num_reqs, self.num_kv_heads, num_keys, self.head_dim)
        scratch = [torch.empty(kv_shape, dtype=self.dtype, device=device) for _ in self._rows[0]]
        return ReferencePlan(
            query_rows=query_rows.flatten(),
            key_rows=self._key_rows(batch.page_table, seq_lens, query_lens, keys),
            mask=mask.repeat(1, self.num_heads // self.num_kv_heads, 1).unsqueeze(1),
            out_rows=out_rows,
            is_padding=is_padding.view(-1, 1, 1),
            scratch=scratch,
            keys=scratch[0],
            values=scratch[-1][..., : self.shape.out_dim],
            width=width,
        )

    def forward(self, q: Tensor, layer_id: int, out: Tensor | None = None) -> Tensor:
        plan = current().attn_plan
        assert isinstance(plan, ReferencePlan), "the plan must be this backend's own"
        for rows, to in zip(self._rows[layer_id], plan.scratch, strict=True):
            to = to.view(-1, self.head_dim)
            if self._is_eight:
                to.copy_(self._decoded(rows, plan.key_rows))
            else:
                torch.index_select(rows, 0, plan.key_rows, out=to)

        # Fold the query heads of one kv head into the query rows: no copy of K and V per head.
        group = self.num_heads // self.num_kv_heads
        queries = q.index_select(0, plan.query_rows)
        queries = queries.view(-1, plan.width, self.num_kv_heads, group, self.head_dim)
        queries = queries.permute(0, 2, 3, 1, 4).flatten(2, 3)
        if self._is_plain:
            attended = F.scaled_dot_product_attention(
                queries, plan.keys, plan.values, attn_mask=plan.mask, scale=self.shape.scale
            )
        else:
            attended = self._weights(queries, plan, self.sinks[layer_id]) @ plan.values
        attended = attended.view(-1, self.num_kv_heads, group, plan.width, self.shape.out_dim)
        attended = attended.permute(0, 3, 1, 2, 4).reshape(-1, self.num_heads, self.shape.out_dim)
        attended = attended.index_select(0, plan.out_rows).masked_fill_(plan.is_padding, 0.0)
        return attended if out is None else out.copy_(attended)

    def _decoded(self, rows: Tensor, wanted: Tensor) -> Tensor:
        """[num rows, head_dim] of `dtype`: rows in eight bits, whose exponents follow a page."""
        size, raw = self.region.page_size, rows.view(torch.uint8)
        part = wanted // self._rows_per_part * self._rows_per_part  # first row of page and head
        exponents = (part + size) * self.head_dim + wanted - part
        values = raw.index_select(0, wanted).view(E4M3)
        return dequantized(values, raw.view(-1)[exponents], self.dtype)

    def _weights(self, queries: Tensor, plan: ReferencePlan, sinks: Tensor | None) -> Tensor:
        """Softmax weights of keys, [num_reqs, num_kv_heads, group * width, num_keys].

        queries: [num_reqs, num_kv_heads, group * width, head_dim]; sinks: [num_heads] or None.
        """
        scores = (queries @ plan.keys.transpose(-1, -2)).float() * self.shape.scale
        if cap := self.shape.cap:
            scores = cap * torch.tanh(scores / cap)
        scores += plan.mask
        if sinks is not None:
            of_rows = sinks.float().view(self.num_kv_heads, -1).repeat_interleave(plan.width, 1)
            of_rows = of_rows.expand(len(scores), -1, -1).unsqueeze(-1)
            return torch.cat((scores, of_rows), -1).softmax(-1)[..., :-1].to(queries.dtype)
        return scores.softmax(-1).to(queries.dtype)

    def _key_rows(
        self, page_table: Tensor, seq_lens: Tensor, query_lens: Tensor, keys: Tensor
    ) -> Tensor:
        """Pool row of every (request, kv head, key).

        Keys past a request's end, and before the first that it sees, repeat that one, so that no
        stale slot is read: the mask alone would let a NaN through (0 · NaN).
        """
        first = torch.full_like(seq_lens, self.mask.first_key)
        if self.mask.window is not None:
            first = torch.maximum(first, seq_lens - query_lens - self.mask.window + 1)
        held = (keys >= first[:, None]) & (keys < seq_lens[:, None])
        # 0 if there is none: no row sees it then.
        spare = torch.minimum(seq_lens - 1, first).clamp(min=0)[:, None]
        keys = torch.where(held, keys, spare)  # [num_reqs, num_keys]
        pages = page_table.long().gather(1, keys // self.region.page_size)
        rows = pages * self._rows_per_page + keys % self.region.page_size
        return (rows[:, None, :] + self._head_rows).flatten()


def _as_rows(cache: Tensor, num_rows: int) -> Tensor:
    """The memory from a layer's first key (or value) on, as rows of head_dim.

    Row page·(page stride) + head·(head stride) + token, in units of head_dim, is that token's.
    num_rows: of the last page's last head, exponents behind its tokens included.
    """
    num_pages, num_heads, _, head_dim = cache.shape
    last = (num_pages - 1) * cache.stride(0) + (num_heads - 1) * cache.stride(1)
    return cache.as_strided((last // head_dim + num_rows, head_dim), (head_dim, 1))
