"""Every attention backend against a dense float64 oracle, over a pool poisoned with NaN.

Triton's runs in a process of its own, on a part of the cases: there the interpreter takes the
place of the GPU. FlashInfer's runs over a double of the library. Both as they are:
tests/gpu/test_attention_on_cuda.py.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests.support import pairwise
from tests.support.attention_asm import attend_asm, prompt_ptx
from tests.support.attention_cases import EACH, EVERY, PAIRWISE
from tests.support.interpreted import INTERPRETED, WHY, ptx_of
from worker.attention import triton as triton_backend
from worker.attention.base import AttentionCaps, AttentionShape
from worker.attention.build import build_attentions
from worker.attention.flashinfer import FlashInferAttention
from worker.attention.paged_plan_triton import FIELDS
from worker.attention.qk_rope_store import store_kv_ref
from worker.attention.triton import TritonAttention
from worker.cache.layout import KVLayout, KVRegion
from worker.cache.pool import KVPool
from worker.config import PLANNED_ON_HOST
from worker.config.backends import ATTENTION
from worker.config.checkpoint.mask import CAUSAL, KeyMask
from worker.errors import Unsupported, UserError
from worker.forward.batch import Batch, HostLengths
from worker.forward.context import forward_context
from worker.ops.jit import HAS_TRITON
from worker.registry import resolve

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_LAYERS = 4
BOUNDS = {"float32": 2e-5, "bfloat16": 0.03, "float16": 0.004}
CPU = torch.device("cpu")
SHAPE = AttentionShape(4, 2, 32, 1.0)
TABLE = {
    **ATTENTION,
    "flashinfer": "tests.support.flashinfer_double:FlashInferDouble",
    "by_length": "tests.support.flashinfer_double:ByLengthDouble",
}
STATIC = ["triton"] if INTERPRETED else ["reference"]
BACKENDS = ["triton"] if INTERPRETED else ["flashinfer", "reference", "by_length"]


@dataclass(slots=True)
class Row:
    """One request of a test batch: its cached prefix, its new tokens, its pages."""

    prefix: int
    width: int
    pages: list[int]

    @property
    def length(self) -> int:
        return self.prefix + self.width


def make_pool(
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    groups: int,
    dtype: str,
    pages: int,
    device: torch.device = CPU,
) -> KVPool:
    """A pool in which every slot but the sink page's is NaN."""
    region = KVRegion("target", NUM_LAYERS, num_kv_heads, head_dim, groups, page_size, dtype)
    pool = KVPool(KVLayout((region,)), pages, device)
    for layer_id in range(NUM_LAYERS):
        for cache in pool.layer(layer_id):
            cache[1:] = float("nan")
    return pool


@pytest.fixture
def pool() -> Iterator[KVPool]:
    """The smallest."""
    made = make_pool(16, 2, 32, 1, "float32", 2)
    yield made
    made.close()


def make_rows(shapes: list[tuple[int, int]], page_size: int, seed: int) -> tuple[list[Row], int]:
    """Rows of (prefix, width) with shuffled pages, and the number of pages of the pool."""
    needs = [-(-(prefix + width) // page_size) for prefix, width in shapes]
    total = sum(needs) + 3  # two pages that nobody owns, and the sink
    order = torch.randperm(total - 1, generator=torch.Generator().manual_seed(seed)) + 1
    ids = order.tolist()
    rows = []
    for (prefix, width), need in zip(shapes, needs, strict=True):
        rows.append(Row(prefix, width, ids[:need]))
        ids = ids[need:]
    return rows, total


def make_batch(rows: list[Row], page_size: int, padded_rows: int, padded_reqs: int) -> Batch:
    """As the engine pads: extra rows on page 0 after the last request, extra empty requests."""
    widths = [row.width for row in rows] + [0] * padded_reqs
    max_pages = max(len(row.pages) for row in rows) + 1
    # Entries past a request's pages may be any valid page: here one that is NaN all through.
    held = {page for row in rows for page in row.pages}
    stale = min(set(range(1, len(held) + 2)) - held)
    table = [row.pages + [stale] * (max_pages - len(row.pages)) for row in rows]
    table += [[0] * max_pages] * padded_reqs
    positions = [p for row in rows for p in range(row.prefix, row.length)]
    slots = [
        row.pages[p // page_size] * page_size + p % page_size
        for row in rows
        for p in range(row.prefix, row.length)
    ]
    starts = torch.tensor([0, *widths]).cumsum(0)
    lengths = [row.length for row in rows] + [0] * padded_reqs
    num_tokens = len(positions) + padded_rows
    return Batch(
        input_ids=torch.zeros(num_tokens, dtype=torch.int64),
        positions=torch.tensor(positions + [0] * padded_rows),
        slot_mapping=torch.tensor(slots + [0] * padded_rows),
        query_start=starts.int(),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        page_table=torch.tensor(table, dtype=torch.int32),
        num_reqs=len(widths),
        num_tokens=num_tokens,
        max_query_len=max(widths),
        max_seq_len_ub=max(lengths) + 5,  # an upper bound, not the truth
        host=HostLengths(widths, lengths),
    )


def dense_oracle(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    prefix: int,
    scale: float,
    mask: KeyMask = CAUSAL,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """q: [width, heads, d]; keys, values: [length, kv_heads, d], all f64; one query at a time."""
    group = q.shape[1] // keys.shape[1]
    out = torch.zeros_like(q)
    for j in range(q.shape[0]):
        position = prefix + j
        first = max(mask.first_key, position - mask.window + 1 if mask.window else 0)
        seen = slice(first, position + 1 if mask.causal else len(keys))
        if seen.start >= seen.stop:
            continue
        for head in range(q.shape[1]):
            scores = keys[seen, head // group] @ q[j, head] * scale
            if cap:
                scores = cap * (scores / cap).tanh()
            if sinks is not None:
                scores = torch.cat((scores, sinks[head : head + 1].double()))
            weights = scores.softmax(0)[: seen.stop - seen.start]
            out[j, head] = weights @ values[seen, head // group]
    return out


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def check(
    backend: str,
    shapes: list[tuple[int, int]],
    *,
    page_size: int = 16,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 32,
    groups: int = 1,
    dtype: str = "float32",
    padded_rows: int = 0,
    padded_reqs: int = 0,
    seed: int = 0,
    mask: KeyMask = CAUSAL,
    cap: float = 0.0,
    sinks: bool = False,
    scale: float | None = None,
) -> None:
    """One batch through two layers: results, stored slots, and every slot of nobody's."""
    num_heads, num_kv_heads = heads
    torch_dtype = getattr(torch, dtype)
    rows, pages = make_rows(shapes, page_size, seed)
    pool = make_pool(page_size, num_kv_heads, head_dim, groups, dtype, pages)
    scale = scale or head_dim**-0.5
    generator = torch.Generator().manual_seed(seed)
    shape = AttentionShape(num_heads, num_kv_heads, head_dim, scale, mask, cap=cap, sinks=sinks)
    logits = [3 * torch.randn(num_heads, generator=generator) for _ in range(NUM_LAYERS * sinks)]
    attention: Any = resolve("attention backend", backend, TABLE)(pool, shape, logits)
    batch = make_batch(rows, page_size, padded_rows, padded_reqs)
    plan = attention.plan(batch)
    for layer_id in (1, NUM_LAYERS - 1):
        caches = pool.layer(layer_id)
        dense = [
            [torch.randn(row.length, num_kv_heads, head_dim, generator=generator).to(torch_dtype)
             for _ in range(2)]
            for row in rows
        ]  # fmt: skip
        for row, pair in zip(rows, dense, strict=True):
            for cache, whole in zip(caches, pair, strict=True):
                for p in range(mask.first_key, row.prefix):  # slots before it stay NaN
                    cache[row.pages[p // page_size], :, p % page_size] = whole[p]
        before = [bits(cache).clone() for layer in range(NUM_LAYERS) for cache in pool.layer(layer)]
        q = torch.randn(batch.num_tokens, num_heads, head_dim, generator=generator).to(torch_dtype)
        padding = torch.randn(padded_rows, num_kv_heads, head_dim, generator=generator)
        new = [
            torch.cat([pair[i][row.prefix :] for row, pair in zip(rows, dense, strict=True)]
                      + [padding.to(torch_dtype)])
            for i in range(2)
        ]  # fmt: skip
        with forward_context(batch, attention, plan):
            store_kv_ref(new[0], new[1], caches, batch.slot_mapping)
            out = attention.forward(q, layer_id)
        assert out.shape == q.shape
        assert out.dtype == q.dtype
        start = 0
        for row, (keys, values) in zip(rows, dense, strict=True):
            mine = q[start : start + row.width].double()
            expected = dense_oracle(
                mine, keys.double(), values.double(), row.prefix, scale, mask, cap,
                logits[layer_id] if sinks else None,
            )  # fmt: skip
            error = (out[start : start + row.width].double() - expected).abs().max()
            assert error < BOUNDS[dtype], (row, error)
            start += row.width
        assert not out[start:].any(), "padded rows are zero"
        check_memory(pool, layer_id, rows, dense, before, page_size)
    pool.close()


def check_memory(pool, layer_id, rows, dense, before, page_size) -> None:
    """The new slots of `layer_id` hold the rows' KV; all others but the sink's are as before."""
    caches = [cache for layer in range(NUM_LAYERS) for cache in pool.layer(layer)]
    for i, (cache, old) in enumerate(zip(caches, before, strict=True)):
        now = bits(cache).clone()
        if i // 2 == layer_id:
            for row, pair in zip(rows, dense, strict=True):
                for p in range(row.prefix, row.length):
                    at = (row.pages[p // page_size], slice(None), p % page_size)
                    assert torch.equal(cache[at], pair[i % 2][p])
                    now[at] = old[at]
        assert torch.equal(now[1:], old[1:]), "a slot that no row owns has changed"


LAYOUTS = {"dtype": ("float32", "bfloat16"), "page_size": (1, 16, 64), "groups": (1, 4)}
SHAPES = (PAIRWISE, EVERY), (EACH, PAIRWISE)  # of the reference and doubles, and of Triton
VALUES = [("float32", 16, 4), ("bfloat16", 64, 1)]
MIXED = [(0, 16), (37, 1), (5, 7), (0, 1), (64, 3), (15, 2), (16, 16)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("ratio", "head_dim", "page_size", "dtype", "groups"), SHAPES[INTERPRETED][pairwise.whole]
)
def test_ragged_rows_match_the_dense_oracle(backend, ratio, head_dim, page_size, dtype, groups):
    heads = (8, 8 // ratio) if ratio > 1 else (2, 2)
    shapes = [(0, 5), (21, 1), (6, 3)]
    check(
        backend, shapes, heads=heads, head_dim=head_dim, page_size=page_size, groups=groups,
        dtype=dtype, padded_rows=2,
    )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("dtype", "page_size", "groups"),
    VALUES if INTERPRETED and not pairwise.whole else pairwise.every(LAYOUTS),
)
def test_widths_from_1_to_16_mix_in_one_batch(backend, dtype, page_size, groups):
    check(
        backend, MIXED, dtype=dtype, page_size=page_size, groups=groups, padded_rows=3,
        padded_reqs=2, seed=1,
    )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [1, 9, *pairwise.in_whole((2,))] if INTERPRETED else [1, 2, 9])
def test_a_decode_batch_of_equal_widths(backend, width):
    check(backend, [(n, width) for n in (0, 1, 15, 16, 17, 31, 40)], padded_reqs=1, padded_rows=1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("heads", "head_dim", "page_size"), pairwise.one_in(2, [((8, 1), 32, 64), ((2, 2), 64, 1)])
)
def test_long_rows_in_many_splits(backend, heads, head_dim, page_size):
    shapes = [(399, 1), (0, 2), (256, 3), (255, 1), (63, 1)]
    check(backend, shapes, heads=heads, head_dim=head_dim, page_size=page_size, padded_rows=20)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_decode_row_has_more_heads_than_a_tile(backend):
    check(backend, [(399, 1), (140, 1), (255, 1), (1, 1)], heads=(40, 1), page_size=64)


MASKS = {"window": (None, 1, 5, 70), "first_key": (0, 1), "causal": (True, False)}
FEW_MASKS = [(5, 1, True), (70, 0, False)]
MANY_MASKS = pairwise.every(MASKS) if pairwise.whole or not INTERPRETED else FEW_MASKS


@pytest.mark.parametrize("backend", STATIC)
@pytest.mark.parametrize(("window", "first_key", "causal"), MANY_MASKS)
def test_a_row_sees_the_keys_of_its_mask_and_no_others(backend, window, first_key, causal):
    """Within tiles of many rows, over borders of pages, blocks and splits, and with none to see."""
    mask = KeyMask(first_key, causal, window)
    check(backend, MIXED, page_size=16, padded_rows=3, padded_reqs=2, mask=mask)
    check(backend, [(399, 1), (0, 1), (130, 4), (1, 4)], heads=(8, 1), page_size=64, mask=mask)


@pytest.mark.skipif(not INTERPRETED, reason="of the triton backend alone")
@pytest.mark.parametrize(
    "mask",
    [KeyMask(1, True, 40), *pairwise.in_whole((KeyMask(1, False),), (KeyMask(1, True, 300),))],
)
def test_a_mask_of_a_long_chunk_is_kept_by_the_paged_kernel(mask, monkeypatch):
    monkeypatch.setattr(TritonAttention, "SHORT_ROWS", 4)
    launched = spied(monkeypatch)
    shapes = [(130, 40), (0, 70)] if pairwise.whole else [(130, 10), (0, 45)]
    check("triton", shapes, page_size=64, head_dim=64, dtype="bfloat16", mask=mask)
    assert not launched


@pytest.mark.skipif(not INTERPRETED, reason="of the triton backend alone")
@pytest.mark.parametrize("longest_first", pairwise.one_in(2, [True, False]))
def test_few_programs_take_many_items_each(longest_first, monkeypatch):
    from worker.attention import triton

    def few(*bounds):
        return replace(choose(*bounds), programs=3, longest_first=longest_first)

    choose = triton.choose
    monkeypatch.setattr(triton, "choose", few)
    check("triton", MIXED, padded_rows=20, padded_reqs=1)
    check("triton", [(300, 1), (0, 2), (399, 3), (300, 1)], page_size=64)


@pytest.mark.skipif(not INTERPRETED, reason="of the triton backend alone")
@pytest.mark.parametrize(("head_dim", "page_size"), pairwise.one_in(2, [(64, 64), (128, 16)]))
def test_long_chunks_match_the_dense_oracle(head_dim, page_size, monkeypatch):
    """By the kernel for them, at fewer rows than it serves: units with and without a mask."""
    monkeypatch.setattr(TritonAttention, "SHORT_ROWS", 4)
    launched = spied(monkeypatch)
    shapes = [(130, 40), (0, 3), (64, 1)]
    check(
        "triton", shapes, page_size=page_size, head_dim=head_dim, groups=2, dtype="bfloat16",
        padded_rows=20, padded_reqs=1,
    )  # fmt: skip
    assert launched


@pytest.mark.skipif(not INTERPRETED, reason="of the triton backend alone")
def test_where_a_long_chunk_is_cut_changes_no_bit(monkeypatch):
    monkeypatch.setattr(TritonAttention, "SHORT_ROWS", 4)
    launched = spied(monkeypatch)
    rows, pages = make_rows([(0, 210), (100, 9)], 64, 0)
    pool = make_pool(64, 1, 64, 1, "bfloat16", pages)
    generator = torch.Generator().manual_seed(0)
    for row in rows:
        for cache in pool.layer(0):
            for at in range(row.length):
                cache[row.pages[at // 64], :, at % 64] = torch.randn(1, 64, generator=generator)
    attention: Any = TritonAttention(pool, AttentionShape(2, 1, 64, 0.1))
    q = torch.randn(210, 2, 64, generator=generator).bfloat16()

    def attend(first: int, end: int, *others: Row) -> torch.Tensor:
        batch = make_batch([*others, replace(rows[0], prefix=first, width=end - first)], 64, 0, 0)
        mine = torch.cat([q[: batch.num_tokens - (end - first)], q[first:end]])
        with forward_context(batch, attention, attention.plan(batch)):
            return attention.forward(mine, 0)[first - end :]

    whole = attend(0, 210)
    parts = [attend(0, 45), attend(45, 151, rows[1]), attend(151, 210)]
    assert torch.equal(bits(torch.cat(parts)), bits(whole))
    assert len(launched) == 4
    pool.close()


def spied(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    calls: list[object] = []

    def run(*args: Any) -> torch.Tensor:
        calls.append(args)
        return prompt_attention(*args)

    prompt_attention = triton_backend.prompt_attention
    monkeypatch.setattr(triton_backend, "prompt_attention", run)
    return calls


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_that_ended_unseen_changes_no_other(backend):
    """The device has the sink in its place; the host still counts on."""
    rows, pages = make_rows([(4, 1), (30, 1), (16, 1)], 16, 0)
    pool = make_pool(16, 2, 32, 1, "float32", pages)
    for cache in pool.layer(0):
        cache[1:] = torch.randn(cache[1:].shape)
    attention: Any = resolve("attention backend", backend, TABLE)(pool, SHAPE)
    live = make_batch(rows, 16, 0, 0)
    sunk = [each.clone() for each in (live.seq_lens, live.slot_mapping, live.page_table)]
    sunk[0][1], sunk[1][1], sunk[2][1] = 1, 0, 0
    gone = replace(live, seq_lens=sunk[0], slot_mapping=sunk[1], page_table=sunk[2])
    q, kv = torch.randn(3, 4, 32), torch.randn(3, 2, 32)
    results = []
    for batch in (live, gone):
        with forward_context(batch, attention, attention.plan(batch)):
            store_kv_ref(kv, kv, attention.kv(0), batch.slot_mapping)
            results.append(attention.forward(q, 0))
    assert torch.equal(results[0][[0, 2]], results[1][[0, 2]])
    assert results[1].isfinite().all()
    pool.close()


@pytest.mark.parametrize("backend", STATIC)
def test_an_inactive_row_with_a_query_but_no_kv_is_zero(backend):
    rows, pages = make_rows([(4, 1)], 16, 0)
    pool = make_pool(16, 2, 32, 1, "float32", pages)
    attention: Any = resolve("attention backend", backend, ATTENTION)(pool, SHAPE)
    batch = make_batch(rows, 16, 0, 0)
    batch.seq_lens.zero_()
    batch.slot_mapping.zero_()
    q, kv = torch.ones(1, 4, 32), torch.ones(1, 2, 32)
    with forward_context(batch, attention, attention.plan(batch)):
        store_kv_ref(kv, kv, attention.kv(0), batch.slot_mapping)
        assert not attention.forward(q, 0).any()
    pool.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_serves_the_region_that_it_is_built_over(backend):
    """Of another geometry than the target, under the same page ids. A tail is not for attention."""
    target = KVRegion("target", NUM_LAYERS, 2, 64, 1, 16, "float32")
    draft = KVRegion("draft", 1, 4, 32, 1, 16, "float32")
    tail = KVRegion("tail", 1, 1, 32, 1, 16, "float32", parts=1, rows="page")
    rows, pages = make_rows([(0, 21), (0, 3)], 16, 0)
    pool = KVPool(KVLayout((target, draft, tail)), pages, CPU)
    cls: Any = resolve("attention backend", backend, TABLE)
    attention = cls(pool, AttentionShape(8, 4, 32, 0.3, CAUSAL, "draft"))
    batch = make_batch(rows, 16, 0, 0)
    q, k, v = torch.randn(24, 8, 32), *torch.randn(2, 24, 4, 32)
    with forward_context(batch, attention, attention.plan(batch)):
        store_kv_ref(k, v, attention.kv(0), batch.slot_mapping)
        out = attention.forward(q, 0)
    for at in (slice(0, 21), slice(21, 24)):
        expected = dense_oracle(q[at].double(), k[at].double(), v[at].double(), 0, 0.3)
        assert (out[at].double() - expected).abs().max() < BOUNDS["float32"]
    written = [bool(cache.any()) for cache in pool.caches()]
    assert written == [False] * 2 * NUM_LAYERS + [True, True, False]
    assert all(map(torch.equal, attention.kv(0), pool.layer(0, "draft")))
    with pytest.raises(Unsupported, match="'tail' has 1 parts a page; attention needs 2 a token"):
        cls(pool, AttentionShape(1, 1, 32, 1.0, CAUSAL, "tail"))
    pool.close()


def test_the_configuration_knows_which_backends_plan_on_the_host():
    found = {name for name in ATTENTION if not resolve("attention", name, ATTENTION).static_plan}
    assert found == PLANNED_ON_HOST


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_backend_cannot_serve_is_refused_when_it_is_built(backend):
    cls: Any = resolve("attention backend", backend, TABLE)
    assert isinstance(cls.static_plan, bool)
    pool = make_pool(16, 2, 32, 1, "float32", 2)
    with pytest.raises(Unsupported, match="the model 4 of 32"):
        cls(pool, replace(SHAPE, num_kv_heads=4))
    with pytest.raises(Unsupported, match="3 heads"):
        cls(pool, replace(SHAPE, num_heads=3))
    pool.close()
    if backend == "flashinfer":
        region = KVRegion("target", 1, 2, 32, 1, 16, "float8_e4m3fn")
        pool = KVPool(KVLayout((region,)), 2, CPU)
        with pytest.raises(Unsupported, match="KV dtype float8_e4m3fn is not one of"):
            cls(pool, SHAPE)
        pool.close()


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        ("prefill", "flashinfer", "device cpu is not one of: cuda"),
        ("decode", "flashinfer", "device cpu is not one of: cuda"),
        ("spec", "magic", "unknown attention backend 'magic'; choose one of: by_length, "),
    ],
)
def test_a_refusal_names_the_field(kind, name, expected, pool):
    names: dict[str, str] = dict.fromkeys(("prefill", "decode", "spec"), STATIC[0])
    names[kind] = name
    with pytest.raises(UserError, match=f"^engine.attention.{kind}: .*{expected}") as caught:
        build_attentions(names, pool, SHAPE)
    assert caught.value.param == f"engine.attention.{kind}"


def test_a_missing_library_is_refused_with_the_way_to_get_it(monkeypatch, pool):
    class Anywhere(FlashInferAttention):
        caps = AttentionCaps()

    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(Unsupported, match="pip install 'flashinfer-python"):
        Anywhere(pool, SHAPE)


if not INTERPRETED:

    @pytest.mark.skipif(not HAS_TRITON, reason=WHY)
    @pytest.mark.parametrize(
        ("num_reqs", "width", "tensor_core"), [(8, 1, "mma.sync"), (4, 512, "wgmma")]
    )
    @pytest.mark.parametrize(
        ("mask", "eight_bits"),
        [
            (KeyMask(1, False, 512), False), (CAUSAL, True),
            *pairwise.in_whole((CAUSAL, False), (KeyMask(1), False)),
        ],
    )  # fmt: skip
    def test_the_kernel_compiles_for_an_h200(num_reqs, width, tensor_core, mask, eight_bits):
        shape = AttentionShape(32, 8, 128, 1.0, mask)
        asm, constants = attend_asm(shape, num_reqs, width, eight_bits=eight_bits)
        ptx = asm["ptx"]
        assert tensor_core in ptx
        assert "cp.async" in ptx
        # Which products a tensor core adds at once, whatever width the cache has: key_dims counts
        # the dims of words as four in a row need it.
        widths = {"2", "4"} if constants["WORDS"] else {"2"}
        assert set(re.findall(r"kWidth = (\d+)", asm["ttgir"])) == widths
        if constants["WORDS"]:
            assert "cvt.rn.f16x2.e4m3x2" in ptx
        # All fields of the next item come to the next turn: Triton has dropped one.
        turns = next(line for line in asm["ttgir"].splitlines() if "scf.for %turn" in line)
        assert turns.split("->")[1].count("i32") == FIELDS + 1  # and the number of the turn
        assert "add.f32" not in "".join(line for line in ptx.splitlines() if "atom" in line)

    @pytest.mark.skipif(not HAS_TRITON, reason=WHY)
    @pytest.mark.parametrize(
        ("head_dim", "num_reqs", "width"),  # 64 requests: blocks of 32 keys
        [(128, 8, 1), (64, 8, 1),
         *pairwise.in_whole((128, 64, 1), (128, 8, 8), (96, 8, 1), (256, 8, 1), (64, 8, 8))],
    )  # fmt: skip
    def test_warps_divide_keys_in_eight_bits_as_those_in_16(head_dim, num_reqs, width):
        """Else they would add up softmax weights in another order."""
        shape = AttentionShape(32, 8, head_dim, 1.0, CAUSAL)
        found = []
        for eight_bits in (True, False):
            asm, _ = attend_asm(shape, num_reqs, width, eight_bits=eight_bits)
            found.append(re.findall(r"warpsPerCTA = (\[\d, \d\]), instr", asm["ttgir"]))
        assert found[0] == found[1] != []

    @pytest.mark.skipif(not HAS_TRITON, reason=WHY)
    @pytest.mark.parametrize("mask", [CAUSAL, KeyMask(1, False, 512)])
    def test_plans_compile_for_an_h200(mask):
        from worker.attention import paged_plan_triton as paged

        names = ("query_start", "seq_lens", "page_table", "items", "counts")
        types: dict[str, str] = dict.fromkeys(names, "*i32")
        types |= dict.fromkeys(("max_tiles", "shortest", "most", "stride_table"), "i32")
        constants = {
            "BLOCK_M": 16, "BLOCK_N": 64, "GROUP": 4, "PAGE": 64, "BLOCK_R": 256, "BLOCK_S": 64,
            "FIELDS": paged.FIELDS, "CAUSAL": mask.causal, "SORTED": True,
            "WINDOW": mask.window or 0,
        }  # fmt: skip
        assert "st.global" in ptx_of(paged._plan_kernel, types, constants)

    @pytest.mark.skipif(not HAS_TRITON, reason=WHY)
    @pytest.mark.parametrize("head_dim", [128, 256])
    def test_the_kernel_of_long_chunks_compiles_for_an_h200(head_dim: int):
        ptx = prompt_ptx(AttentionShape(32, 8, head_dim, 1.0))
        assert "wgmma" in ptx
        assert "cp.async.bulk.tensor" in ptx
