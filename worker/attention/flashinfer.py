"""Attention by FlashInfer, planned on the host. The library is optional."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from worker.attention.base import AttentionCaps, AttentionShape, PoolAttention
from worker.cache.pool import KVPool
from worker.errors import Unsupported
from worker.forward.batch import Batch, HostLengths
from worker.forward.context import current

NUM_SLOTS = 2  # plans that may be in use at a time: of the step that runs and of the next one
MIN_WORKSPACE_BYTES = 128 << 20  # the library's advice


@dataclass(frozen=True, slots=True)
class Ragged:
    """A batch as FlashInfer takes it: padding left out, pages end to end. i32; pinned on CUDA."""

    num_tokens: int  # rows that belong to requests; those after them are padding
    query_start: Tensor  # [num_reqs + 1], host
    page_start: Tensor  # [num_reqs + 1], host; request i has pages[page_start[i] : ...[i + 1]]
    last_page_len: Tensor  # [num_reqs], host; tokens in a request's last page, 1 to page_size
    seq_lens: Tensor  # [num_reqs], host
    pages: Tensor  # [page_start[-1]], device


def ragged(host: HostLengths, page_table: Tensor, page_size: int) -> Ragged:
    """Lay out a batch of `host`'s lengths over page_table [num_reqs, max_pages] i32.

    Requests without rows come last and are left out. Uploads without waiting.
    """
    query_lens = [length for length in host.query_lens if length]
    num_reqs = len(query_lens)
    assert not any(host.query_lens[num_reqs:]), "a padded request before one with rows"
    seq_lens = list(host.seq_lens[:num_reqs])
    assert all(0 < q <= s for q, s in zip(query_lens, seq_lens, strict=True))

    def ints(values: list[int]) -> Tensor:
        made = torch.tensor(values, dtype=torch.int32)
        return made.pin_memory() if page_table.is_cuda else made

    query_start, page_start = [0], [0]
    for query_len, seq_len in zip(query_lens, seq_lens, strict=True):
        query_start.append(query_start[-1] + query_len)
        page_start.append(page_start[-1] + -(-seq_len // page_size))
    starts = ints(page_start)
    on_device = starts.to(page_table.device, non_blocking=True)
    at = torch.arange(page_start[-1], dtype=torch.int32, device=page_table.device)
    owner = torch.searchsorted(on_device[1:], at, right=True)
    return Ragged(
        num_tokens=query_start[-1],
        query_start=ints(query_start),
        page_start=starts,
        last_page_len=ints([(length - 1) % page_size + 1 for length in seq_lens]),
        seq_lens=ints(seq_lens),
        pages=page_table[owner, (at - on_device[owner]).long()],
    )


class FlashInferPlan(NamedTuple):
    """The plan of one pass, for all layers."""

    wrapper: Any  # planned
    num_tokens: int  # rows that are not padding


class Slot(NamedTuple):
    """Wrappers whose pinned buffers hold one plan until the device has fetched it.

    plan() writes the buffers on the host and enqueues their copy. They may be written again only
    when that copy is over, which `fence` tells. One of NUM_SLOTS steps has settled: no wait.
    """

    prefill: Any  # BatchPrefillWithPagedKVCacheWrapper
    decode: Any  # BatchDecodeWithPagedKVCacheWrapper
    fence: torch.cuda.Event


class FlashInferAttention(PoolAttention):
    """Prefill by FlashInfer's FA3 where the GPU and the shape allow, else FA2; decode by FA2.

    Batches of one row a request go to the decode wrapper, on tensor cores: the FA2 kernels of
    prefill, which serve all GQA ratios and are compiled once. The constructor compiles kernels that
    the library lacks (up to minutes, once for a machine, shape and dtype).

    How a long request is split depends on all lengths of the batch, so a row's last bits do too. A
    request that has ended before the host knows is computed on the sink's page, for no reader.
    """

    caps: ClassVar[AttentionCaps] = AttentionCaps(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"bfloat16", "float16"}),
        head_dims=frozenset({64, 128, 256}),
        features=frozenset({"window", "cap"}),
    )
    static_plan: ClassVar[bool] = False

    def __init__(self, pool: KVPool, shape: AttentionShape, sinks: Sequence[Tensor] = ()) -> None:
        super().__init__(pool, shape, sinks)
        self._sizes = *self.heads, shape.head_dim, self.region.page_size
        dtypes = {"q_data_type": self.dtype, "kv_data_type": self.dtype}
        self._options: dict[str, Any] = {**dtypes, "sm_scale": shape.scale}
        if shape.mask.window is not None:
            self._options["window_left"] = shape.mask.window - 1  # beside a row's own key
        if shape.cap:
            self._options["logits_soft_cap"] = shape.cap
        self._slots = self._make_slots(pool.device)
        self._next = 0
        table = torch.zeros(1, 2, dtype=torch.int32, device=pool.device)
        for num_rows in (1, 2):  # compiles decode's kernels, then prefill's
            self._plan(HostLengths([num_rows], [num_rows]), table)

    def plan(self, batch: Batch) -> FlashInferPlan:
        assert batch.host is not None, "planned on the host, so it cannot be captured"
        return self._plan(batch.host, batch.page_table)

    def forward(self, q: Tensor, layer_id: int, out: Tensor | None = None) -> Tensor:
        plan = current().attn_plan
        assert isinstance(plan, FlashInferPlan), "the plan must be this backend's own"
        if out is None:
            out = torch.empty_like(q)
        num = plan.num_tokens
        plan.wrapper.run(q[:num], self._layers[layer_id], out=out[:num])
        if num < len(q):
            out[num:].zero_()
        return out

    def _plan(self, host: HostLengths, page_table: Tensor) -> FlashInferPlan:
        slot = self._slots[self._next]
        self._next = (self._next + 1) % NUM_SLOTS
        work = ragged(host, page_table, self.region.page_size)
        paged = work.page_start, work.pages, work.last_page_len
        options = {**self._options, "seq_lens": work.seq_lens}
        slot.fence.synchronize()
        if max(host.query_lens) == 1:
            wrapper = slot.decode
            wrapper.plan(*paged, *self._sizes, **options)
        else:
            wrapper = slot.prefill
            wrapper.plan(work.query_start, *paged, *self._sizes, causal=True, **options)
        slot.fence.record()
        return FlashInferPlan(wrapper, work.num_tokens)

    def _make_slots(self, device: torch.device) -> list[Slot]:
        """All slots over one workspace, whose content lives within one launch."""
        try:
            library: Any = import_module("flashinfer")
        except ImportError as error:
            raise Unsupported(
                f"attention backend: flashinfer cannot be imported ({error}): "
                "pip install 'flashinfer-python>=0.6.15'"
            ) from error
        workspace = torch.zeros(self._workspace_bytes(device), dtype=torch.uint8, device=device)
        return [
            Slot(
                library.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend="auto"),
                library.BatchDecodeWithPagedKVCacheWrapper(
                    workspace, "HND", use_tensor_cores=True, backend="fa2"
                ),
                torch.cuda.Event(),
            )
            for _ in range(NUM_SLOTS)
        ]

    def _workspace_bytes(self, device: torch.device) -> int:
        """The most that split requests need: at most two tiles a multiprocessor.

        A tile keeps rows and sums in f32: 128 (64 from head_dim 256 on) a query head of a kv head.
        """
        num_heads, num_kv_heads, head_dim, _ = self._sizes
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        rows = (128 if head_dim < 256 else 64) * num_heads // num_kv_heads
        return max(MIN_WORKSPACE_BYTES, 2 * num_sms * rows * (head_dim + 1) * 4 + 1024)
