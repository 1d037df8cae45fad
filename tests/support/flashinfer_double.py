"""FlashInferAttention where there is no GPU: FlashInfer's wrappers in plain torch.

What they are told by plan() is all that they go by, so our side of the library's contract is tested
by what they compute: which pages, how much of the last one, which rows, which mask.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from worker.attention.base import AttentionCaps
from worker.attention.by_length import ByLengthAttention
from worker.attention.flashinfer import NUM_SLOTS, FlashInferAttention, Slot
from worker.config.backends import ATTENTION


class Wrapper:
    """Both of the library's; `plan` and `run` take what theirs take, in their order."""

    def plan(
        self, page_start: Tensor, pages: Tensor, last_page_len: Tensor,
        num_heads: int, num_kv_heads: int, head_dim: int, page_size: int,
        *, query_start: Tensor, causal: bool, q_data_type: torch.dtype, kv_data_type: torch.dtype,
        sm_scale: float, seq_lens: Tensor, window_left: int = -1, logits_soft_cap: float = 0.0,
    ) -> None:  # fmt: skip
        found = (page_start[1:] - page_start[:-1] - 1) * page_size + last_page_len
        assert torch.equal(found, seq_lens)
        assert ((last_page_len >= 1) & (last_page_len <= page_size)).all()
        assert len(pages) == page_start[-1]
        for each in (query_start, page_start, pages, last_page_len, seq_lens):
            assert each.dtype == torch.int32
        self._starts, self._lens = query_start.tolist(), seq_lens.tolist()
        self._pages = [pages[a:b] for a, b in pairwise(page_start.tolist())]
        self._shape = num_heads, num_kv_heads, head_dim, page_size
        self._causal, self._scale, self._dtypes = causal, sm_scale, (q_data_type, kv_data_type)
        self._window_left, self._cap = window_left, logits_soft_cap

    def run(self, q: Tensor, caches: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        """q, out: [query_start[-1], num_heads, head_dim]; caches as KVPool.layer."""
        num_heads, num_kv_heads, head_dim, page_size = self._shape
        assert (q.dtype, caches[0].dtype) == self._dtypes
        assert q.shape == out.shape == (self._starts[-1], num_heads, head_dim)
        assert caches[0].shape[1:] == (num_kv_heads, page_size, head_dim)
        for i, (length, pages) in enumerate(zip(self._lens, self._pages, strict=True)):
            rows = slice(self._starts[i], self._starts[i + 1])
            keys, values = (
                cache[pages.long()].transpose(1, 2).flatten(0, 1)[:length].float()
                for cache in caches
            )
            group = num_heads // num_kv_heads
            keys, values = (each.repeat_interleave(group, 1) for each in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", q[rows].float(), keys) * self._scale
            if self._cap:
                scores = self._cap * torch.tanh(scores / self._cap)
            width = scores.shape[1]
            if self._window_left >= 0:
                old = torch.ones(width, length, dtype=torch.bool)
                old = old.tril(length - width - self._window_left - 1)
                scores.masked_fill_(old, float("-inf"))
            if self._causal:
                hidden = torch.ones(width, length, dtype=torch.bool).triu(length - width + 1)
                scores.masked_fill_(hidden, float("-inf"))
            out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(out.dtype)
        return out


class Prefill(Wrapper):
    """BatchPrefillWithPagedKVCacheWrapper."""

    def plan(self, query_start: Tensor, *paged: Any, **options: Any) -> None:  # type: ignore[override]
        super().plan(*paged, query_start=query_start, **options)


class Decode(Wrapper):
    """BatchDecodeWithPagedKVCacheWrapper: one row of each request, which sees all of its keys."""

    def plan(self, *paged: Any, **options: Any) -> None:  # type: ignore[override]
        query_start = torch.arange(len(paged[0]), dtype=torch.int32)
        super().plan(*paged, query_start=query_start, causal=False, **options)


class Fence:
    """A CUDA event; there is nothing to wait for."""

    def synchronize(self) -> None: ...

    def record(self) -> None: ...


class FlashInferDouble(FlashInferAttention):
    """The backend itself, over the wrappers above."""

    caps: ClassVar[AttentionCaps] = AttentionCaps(
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        features=FlashInferAttention.caps.features,
    )

    def _make_slots(self, device: torch.device) -> list[Slot]:
        fence: Any = Fence()
        return [Slot(Prefill(), Decode(), fence) for _ in range(NUM_SLOTS)]


class ByLengthDouble(ByLengthAttention):
    """The reference for a few rows, the double above beyond."""

    SHORT = "reference"
    SHORT_ROWS = 10
    TABLE: ClassVar[Mapping[str, str]] = {
        **ATTENTION,
        "flashinfer": "tests.support.flashinfer_double:FlashInferDouble",
    }
