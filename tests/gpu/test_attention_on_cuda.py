"""Triton's and FlashInfer's attention on one GPU, the reference backend in float32 as the oracle.

FlashInfer compiles its kernels once a machine for each (FA2 or FA3, dtype, head_dim): 26 s for FA2
and 66 s for FA3 on 16 cores. GQA ratio, page size, layer groups and lengths cost nothing, so those
are tested in full for two of them; KVLANE_TEST_FULL=1 adds the others (six in all).
"""

import os
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.contract.test_attention import NUM_LAYERS, make_batch, make_pool, make_rows
from tests.support.attention_cases import DTYPES, EVERY, GROUPS, HEAD_DIMS, PAGE_SIZES
from worker.attention import triton as triton_backend
from worker.attention.base import AttentionShape
from worker.attention.paged_tiles import SHORT_KEYS
from worker.attention.qk_rope_store import store_kv_ref
from worker.cache.pool import KVPool
from worker.config.backends import ATTENTION
from worker.config.checkpoint.mask import KeyMask
from worker.forward.batch import Batch, HostLengths
from worker.forward.context import forward_context
from worker.registry import resolve

pytestmark = pytest.mark.gpu(1)

LAYER = 2
CUDA = torch.device("cuda")
COMPILED = [("bfloat16", 128), ("float16", 64)]
if os.environ.get("KVLANE_TEST_FULL"):
    COMPILED = [(dtype, head_dim) for dtype in DTYPES for head_dim in HEAD_DIMS]
needs_flashinfer = pytest.mark.skipif(
    find_spec("flashinfer") is None, reason="needs flashinfer: pip install flashinfer-python"
)
ALL: dict[str, Any] = {"mask": KeyMask(window=300), "cap": 20.0, "scale": 0.5, "sinks": True}
BACKENDS = ["triton", pytest.param("flashinfer", marks=needs_flashinfer)]
BOUNDS = {"bfloat16": 0.01, "float16": 0.0015, "float32": 2e-5}  # of |error| / (1 + |value|)


@dataclass(slots=True)
class Case:
    """A pool, a batch over it, and what the layer is fed."""

    pool: KVPool
    batch: Batch
    q: Tensor
    k: Tensor
    v: Tensor


def make(
    shapes: list[tuple[int, int]],
    heads: tuple[int, int] = (8, 2),
    head_dim: int = 128,
    page: int = 16,
    groups: int = 1,
    dtype: str = "bfloat16",
    padded_rows: int = 3,
    padded_reqs: int = 1,
    seed: int = 0,
) -> Case:
    """Requests of (prefix, width); their prefixes are random, what no request owns is NaN."""
    rows, pages = make_rows(shapes, page, seed)
    pool = make_pool(page, heads[1], head_dim, groups, dtype, pages, CUDA)
    torch.manual_seed(seed)
    for row in rows:
        at = torch.arange(row.prefix)
        mine, slots = torch.tensor(row.pages)[at // page].cuda(), (at % page).cuda()
        for cache in pool.layer(LAYER):
            size = row.prefix, heads[1], head_dim
            cache[mine, :, slots] = torch.randn(size, device=CUDA, dtype=cache.dtype)
    with CUDA:
        batch = make_batch(rows, page, padded_rows, padded_reqs)
    torch_dtype = getattr(torch, dtype)
    q, k, v = (
        torch.randn(batch.num_tokens, n, head_dim, device="cuda", dtype=torch_dtype)
        for n in (heads[0], heads[1], heads[1])
    )
    return Case(pool, batch, q, k, v)


def backend(name: str, case: Case, **options: Any) -> Any:
    """With these fields of an AttentionShape; its sinks are random."""
    region, num_heads = case.pool.region(), case.q.shape[1]
    options = {"scale": region.head_dim**-0.5, **options}
    shape = AttentionShape(num_heads, region.num_kv_heads, region.head_dim, **options)
    torch.manual_seed(7)
    layers = range(NUM_LAYERS if shape.sinks else 0)
    sinks = [3 * torch.randn(num_heads, device="cuda") for _ in layers]
    return resolve("attention backend", name, ATTENTION)(case.pool, shape, sinks)


def attend(attention: Any, case: Case, batch: Batch | None = None) -> Tensor:
    batch = batch or case.batch
    with forward_context(batch, attention, attention.plan(batch)):
        store_kv_ref(case.k, case.v, attention.kv(LAYER), batch.slot_mapping)
        return attention.forward(case.q, LAYER)


def oracle(case: Case, **options: Any) -> Tensor:
    """The reference backend's result from a float32 copy of the pool."""
    region = case.pool.region()
    exact = make_pool(
        region.page_size, region.num_kv_heads, region.head_dim, region.num_groups, "float32",
        case.pool.num_pages, CUDA,
    )  # fmt: skip
    pairs = zip(exact.layer(LAYER), case.pool.layer(LAYER), strict=True)
    for cache, source in pairs:
        cache.copy_(source)
    in_f32 = Case(exact, case.batch, case.q.float(), case.k.float(), case.v.float())
    return attend(backend("reference", in_f32, **options), in_f32)


def check(case: Case, name: str = "triton", **options: Any) -> None:
    out, expected = attend(backend(name, case, **options), case), oracle(case, **options)
    error = ((out.float() - expected).abs() / (1 + expected.abs())).max().item()
    assert error < BOUNDS[case.pool.region().dtype], error
    assert not out[int(case.batch.query_start[-1]) :].any()


RAGGED = [(0, 1), (63, 1), (64, 1), (700, 1), (129, 1), (1300, 1)]
WIDTHS = [(0, 16), (37, 1), (500, 7), (0, 1), (64, 3), (1000, 16)]
CHUNKS = [(0, 300), (512, 200), (100, 1), (17, 130)]
LONG = ([(0, 1300)], [(700, 1100), (0, 40), (64, 130), (300, 1)], [(3000, 1025), (127, 129)])
LONG_POOLS = [(64, 128, "bfloat16"), (128, 128, "float16"), (16, 64, "float16")]


@pytest.mark.parametrize(("ratio", "head_dim", "page", "dtype", "groups"), EVERY)
def test_decode_prefill_and_windows_match_the_reference(ratio, head_dim, page, dtype, groups):
    for shapes in (RAGGED, WIDTHS, CHUNKS):
        check(make(shapes, (8, 8 // ratio), head_dim, page, groups, dtype))


@pytest.mark.parametrize("window", [None, 1, 100, 1000])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("first_key", [0, 1])
def test_masks_match_the_reference(first_key, causal, window):
    mask = KeyMask(first_key, causal, window)
    for shapes in (RAGGED, WIDTHS, CHUNKS):
        for page in PAGE_SIZES:
            check(make(shapes, (8, 2), 128, page, 4, "bfloat16"), mask=mask)
    check(make(LONG[1], (8, 2), 128, 64, 4, "bfloat16"), mask=mask)  # or prompt_attention's


@needs_flashinfer
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("page", PAGE_SIZES)
@pytest.mark.parametrize(("dtype", "head_dim"), COMPILED)
def test_flashinfer_matches_the_reference(dtype, head_dim, page, groups):
    for kv_heads in (8, 4, 2, 1):
        for shapes in (RAGGED, WIDTHS, CHUNKS):
            check(make(shapes, (8, kv_heads), head_dim, page, groups, dtype), "flashinfer")


def only_prompts(*_args: Any) -> Tensor:
    raise AssertionError("the batch is for prompt_attention")


@pytest.mark.parametrize(("page", "head_dim", "dtype"), LONG_POOLS)
def test_long_chunks_match_the_reference(page, head_dim, dtype, monkeypatch):
    monkeypatch.setattr(triton_backend, "paged_attention", only_prompts)
    for shapes in LONG:
        for heads in ((8, 2), (14, 2), (4, 4)):
            check(make(shapes, heads, head_dim, page, 4, dtype, padded_rows=40))


@pytest.mark.parametrize("cuts", [(1030, 2100), (1025, 2051)])
def test_where_a_long_chunk_is_cut_changes_no_bit(cuts, monkeypatch):
    """Nor does a request beside it."""
    monkeypatch.setattr(triton_backend, "paged_attention", only_prompts)
    case = make([(0, 3200), (100, 1100)], heads=(32, 8), page=64, padded_reqs=0, padded_rows=0)
    attention = backend("triton", case)
    whole = attend(attention, case)
    for first, end in pairwise((0, *cuts, 3200)):
        width = end - first
        batch = replace(
            case.batch,
            query_start=torch.tensor([0, width], dtype=torch.int32).cuda(),
            seq_lens=torch.tensor([end], dtype=torch.int32).cuda(),
            page_table=case.batch.page_table[:1],
            num_reqs=1,
            num_tokens=width,
            max_query_len=width,
        )
        with forward_context(batch, attention, attention.plan(batch)):
            part = attention.forward(case.q[first:end], LAYER)
        assert torch.equal(part, whole[first:end])


@pytest.mark.parametrize("options", [{}, ALL], ids=["plain", "all"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_float32_is_float32(head_dim, options):
    for shapes in (RAGGED, WIDTHS, CHUNKS):
        check(make(shapes, head_dim=head_dim, dtype="float32"), **options)


def test_a_batch_of_many_rows_and_a_very_long_one():
    shapes = [(17 * i % 640, 1) for i in range(250)] + [(20000, 1)]
    check(make(shapes, page=64, padded_reqs=5, padded_rows=5))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("shapes", [RAGGED, WIDTHS, CHUNKS])
def test_the_same_bits_every_time(shapes, name):
    case = make(shapes, heads=(32, 8))
    attention = backend(name, case)
    first = attend(attention, case)
    assert all(torch.equal(attend(attention, case), first) for _ in range(20))


@pytest.mark.parametrize("shapes", [RAGGED, WIDTHS])
def test_a_row_s_bits_do_not_depend_on_the_other_rows(shapes):
    """Each request alone, the others cut down to nothing, under a much higher length bound.

    Chunks of 16 tokens and more have smaller tiles up to SHORT_KEYS, so it stays below that.
    """
    case = make(shapes, heads=(32, 8))
    bound = 30000 if case.batch.max_query_len < 16 else SHORT_KEYS
    attention = backend("triton", case)
    whole = attend(attention, case)
    for i in range(len(shapes)):
        seq_lens = torch.zeros_like(case.batch.seq_lens)
        seq_lens[i] = case.batch.seq_lens[i]
        alone = replace(case.batch, seq_lens=seq_lens, max_seq_len_ub=bound)
        start, end = case.batch.query_start[i : i + 2].tolist()
        with forward_context(alone, attention, attention.plan(alone)):
            out = attention.forward(case.q, LAYER)
        assert torch.equal(out[start:end], whole[start:end])
        out[start:end] = 0
        assert not out.any(), "requests without KV"


@pytest.mark.parametrize("options", [{}, ALL], ids=["plain", "all"])
@pytest.mark.parametrize("num_reqs", [1, 3, 40, 256])
def test_a_graph_serves_lengths_that_it_was_not_captured_with(num_reqs, options):
    """Captured at short lengths under a high bound; replayed with others, and with rows gone."""
    shapes = [(1 + 37 * i % 900 + 5000 * (i == 1), 1) for i in range(num_reqs)]
    case = make(shapes, heads=(32, 8), page=64, padded_rows=0, padded_reqs=0)
    attention = backend("triton", case, **options)
    live = case.batch
    buffer = replace(live, seq_lens=torch.ones_like(live.seq_lens), max_seq_len_ub=40960)
    attend(attention, case, buffer)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(attention, case, buffer)
    for keep in (num_reqs, num_reqs // 2, num_reqs):
        seq_lens = live.seq_lens.clone()
        seq_lens[keep:] = 0
        buffer.seq_lens.copy_(seq_lens)
        graph.replay()
        eager = attend(attention, case, replace(live, seq_lens=seq_lens))
        assert torch.equal(out, eager)
        assert not out[keep:].any()


@pytest.mark.parametrize("name", BACKENDS)
def test_a_row_that_ended_unseen_changes_no_other(name):
    """The device has the sink in its place; the host still counts on."""
    case = make(RAGGED, heads=(32, 8), padded_rows=0, padded_reqs=0)
    attention, live = backend(name, case), case.batch
    whole = attend(attention, case)
    sunk = [each.clone() for each in (live.seq_lens, live.slot_mapping, live.page_table)]
    for each, value in zip(sunk, (1, 0, 0), strict=True):
        each[3] = value  # the row of 701 tokens
    gone = replace(live, seq_lens=sunk[0], slot_mapping=sunk[1], page_table=sunk[2])
    out = attend(attention, case, gone)
    others = [0, 1, 2, 4, 5]
    assert torch.equal(out[others], whole[others])
    assert out.isfinite().all()


@needs_flashinfer
@pytest.mark.parametrize("shapes", [RAGGED, CHUNKS])
def test_two_steps_are_planned_while_the_device_is_busy(shapes):
    """The second plan does not wait for the device, nor overwrite what the first still needs."""
    case = make(shapes, heads=(32, 8))
    attention, long = backend("flashinfer", case), case.batch
    widths = [width for _, width in shapes] + [0]
    short = replace(
        long, seq_lens=torch.tensor(widths, dtype=torch.int32).cuda(),
        host=HostLengths(widths, widths),
    )  # fmt: skip
    attend(attention, case)

    def enqueue(batch: Batch) -> Tensor:
        with forward_context(batch, attention, attention.plan(batch)):
            return attention.forward(case.q, LAYER)

    wanted = []
    for batch in (long, short):
        wanted.append(enqueue(batch))
        torch.cuda.synchronize()
    # All memory that the two steps take is to be in the allocators' caches: CUDA's own may wait.
    rehearsal = [enqueue(batch) for batch in (long, short)]
    pinned = [torch.empty(n, dtype=torch.int32).pin_memory() for n in (4, 8) for _ in range(32)]
    torch.cuda.synchronize()
    del rehearsal, pinned
    torch.cuda._sleep(2_000_000_000)  # cycles: about a second
    awake = torch.cuda.Event()
    awake.record()
    found = [enqueue(batch) for batch in (long, short)]
    assert not awake.query(), "plan() has waited for the device"
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert not torch.equal(wanted[0], wanted[1])
