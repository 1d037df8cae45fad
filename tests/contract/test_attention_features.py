"""Windows, soft caps, sinks and odd head sizes against the dense oracle, on every backend.

As test_attention.py, which plain causal attention has to itself. On a GPU:
tests/gpu/test_attention_features_on_cuda.py.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.contract import test_attention as plain
from tests.support.attention_asm import attend_asm, prompt_ptx
from tests.support.interpreted import INTERPRETED, WHY, ptx_of
from tests.support.pairwise import in_whole, one_in, whole
from worker.attention.base import AttentionShape
from worker.attention.build import ByLayerAttention, build_attentions
from worker.attention.triton import TritonAttention
from worker.config.checkpoint.mask import CAUSAL, KeyMask
from worker.errors import Unsupported
from worker.forward.batch import Bounds
from worker.forward.context import forward_context
from worker.ops.jit import HAS_TRITON
from worker.registry import resolve

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOW = KeyMask(window=20)
# Scores of about ±6 under a cap of 4; logits of sinks of about ±6.
ASKED: dict[str, dict[str, Any]] = {
    "window": {"mask": WINDOW},
    "cap": {"cap": 4.0, "scale": 1.0},
    "window and cap": {"mask": WINDOW, "cap": 4.0, "scale": 1.0},
    "sinks": {"sinks": True},
    "all": {"mask": WINDOW, "cap": 4.0, "scale": 1.0, "sinks": True},
}
LACKING = {"sinks", "all"}  # of FlashInfer
CASES = [
    pytest.param(backend, asked, id=f"{backend}-{asked}")
    for backend in plain.BACKENDS
    for asked in (ASKED if whole or not INTERPRETED else ("window", "all"))
    if backend != "flashinfer" or asked not in LACKING
]


@pytest.mark.parametrize(("backend", "asked"), CASES)
def test_decode_windows_and_chunks_match_the_dense_oracle(backend: str, asked: str) -> None:
    options = ASKED[asked]
    plain.check(backend, plain.MIXED, padded_rows=3, padded_reqs=2, **options)
    # Rows in many splits, of which the first has the sink; a verified window behind a long prefix.
    shapes = [(399, 1), (0, 1), (130, 4), (0, 2)]
    plain.check(backend, shapes, heads=(8, 1), page_size=64, **options)


@pytest.mark.parametrize("backend", ["triton"] if INTERPRETED else ["reference", "by_length"])
@pytest.mark.parametrize("asked", one_in(2, ["window and cap", "sinks"]))
def test_heads_of_96_numbers(backend: str, asked: str) -> None:
    shapes = [(0, 16), (37, 1), (5, 7), (300, 1), (64, 3)]
    plain.check(backend, shapes, head_dim=96, groups=4, padded_rows=3, **ASKED[asked])
    plain.check(backend, shapes[3:], head_dim=96, page_size=64, dtype="bfloat16")


@pytest.mark.skipif(not INTERPRETED, reason="of the triton backend alone")
@pytest.mark.parametrize(
    ("asked", "head_dim", "window"),
    [("all", 64, 100), *in_whole(("window", 96, 150), ("sinks", 128, None))],
)
def test_long_chunks_match_the_dense_oracle(
    asked: str, head_dim: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel for them: units before the window, across its edge, within, and beyond."""
    monkeypatch.setattr(TritonAttention, "SHORT_ROWS", 4)
    launched = plain.spied(monkeypatch)
    options: dict[str, Any] = ASKED[asked] | {"mask": KeyMask(window=window)}
    plain.check(
        "triton", [(330, 40), (0, 3), (64, 1), (0, 140)], page_size=64, head_dim=head_dim,
        groups=2, dtype="bfloat16", padded_rows=20, padded_reqs=1, **options,
    )  # fmt: skip
    assert launched


@pytest.mark.parametrize("backend", plain.STATIC)
@pytest.mark.parametrize("width", [1, 4])
def test_pages_before_the_window_are_not_read(backend: str, width: int) -> None:
    """They may belong to another request by then: other content changes no bit."""
    rows, pages = plain.make_rows([(300, width), (30, width)], 16, 0)
    pool = plain.make_pool(16, 2, 32, 1, "float32", pages)
    for cache in pool.layer(0):
        cache[1:] = torch.randn(cache[1:].shape)
    shape = AttentionShape(4, 2, 32, 0.2, KeyMask(window=50))
    attention: Any = resolve("attention backend", backend, plain.TABLE)(pool, shape)
    batch = plain.make_batch(rows, 16, 0, 0)
    q = torch.randn(2 * width, 4, 32)

    def attend() -> torch.Tensor:
        with forward_context(batch, attention, attention.plan(batch)):
            return attention.forward(q, 0)

    before = attend()
    first = (300 - 50 + 1) // 64 * 64 // 16  # page of the block of keys that the window begins in
    for cache in pool.layer(0):
        cache[rows[0].pages[:first]] = float("nan")
    batch.page_table[0, :first] = 10**6
    if backend == "reference":  # gathers by the table, but for keys that no row sees
        batch.page_table[0, :first] = 0
    assert torch.equal(attend(), before)
    pool.close()


def test_layers_of_several_masks_have_a_backend_each(monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, str] = dict.fromkeys(("prefill", "decode", "spec"), plain.STATIC[0])
    rows, pages = plain.make_rows([(0, 40), (30, 3)], 16, 0)
    pool = plain.make_pool(16, 2, 32, 1, "float32", pages)
    for layer in range(plain.NUM_LAYERS):
        for cache in pool.layer(layer):
            cache[1:] = torch.randn(cache[1:].shape)
    shape = AttentionShape(4, 2, 32, 0.2)
    masks = [WINDOW, CAUSAL, WINDOW, WINDOW]
    by_layer: Any = build_attentions(names, pool, shape, masks).decode
    assert isinstance(by_layer, ByLayerAttention)
    assert by_layer.static_plan
    batch = plain.make_batch(rows, 16, 1, 1)
    q = torch.randn(batch.num_tokens, 4, 32)
    for layer, mask in enumerate(masks):
        alone: Any = build_attentions(names, pool, replace(shape, mask=mask)).decode
        assert not isinstance(alone, ByLayerAttention)
        with forward_context(batch, alone, alone.plan(batch)):
            wanted = alone.forward(q, layer)
        with forward_context(batch, by_layer, by_layer.plan(batch)):
            assert torch.equal(by_layer.forward(q, layer), wanted)
        assert all(map(torch.equal, by_layer.kv(layer), pool.layer(layer)))
    bounds = Bounds(2, 43, 40, 40)
    if INTERPRETED:
        assert by_layer.variant(bounds) != build_attentions(names, pool, shape).decode.variant(
            bounds
        )
    one: Any = build_attentions(names, pool, shape, [WINDOW] * 4).decode
    assert not isinstance(one, ByLayerAttention), "all layers see the same keys"
    pool.close()


@pytest.mark.skipif(INTERPRETED, reason="of doubles")
def test_short_steps_backend_serves_what_that_of_long_ones_lacks() -> None:
    pool = plain.make_pool(16, 2, 32, 1, "float32", 2)
    shape = AttentionShape(4, 2, 32, 1.0, sinks=True)
    cls: Any = resolve("attention backend", "by_length", plain.TABLE)
    sinks = [torch.zeros(4)] * plain.NUM_LAYERS
    made = cls(pool, shape, sinks)
    assert made._long is made._short
    other = cls(pool, replace(shape, sinks=False, mask=WINDOW))
    assert other._long is not other._short
    with pytest.raises(Unsupported, match=r"cannot serve KeyMask.*: its sinks"):
        resolve("attention backend", "flashinfer", plain.TABLE)(pool, shape, sinks)
    pool.close()


if not INTERPRETED:

    @pytest.mark.skipif(not HAS_TRITON, reason=WHY)
    @pytest.mark.parametrize(
        ("head_dim", "num_reqs", "width", "eight_bits"),
        [(256, 4, 512, False), *in_whole((96, 32, 1, True), (96, 8, 1, False))],
    )
    def test_the_kernel_with_all_of_it_compiles_for_an_h200(head_dim, num_reqs, width, eight_bits):
        shape = AttentionShape(32, 8, head_dim, 1.0, KeyMask(window=512), cap=50.0, sinks=True)
        asm, _ = attend_asm(shape, num_reqs, width, eight_bits=eight_bits)
        ptx = asm["ptx"]
        assert "cp.async" in ptx
        assert "wgmma" in ptx or "mma.sync" in ptx

    @pytest.mark.skipif(not HAS_TRITON, reason=WHY)
    @pytest.mark.parametrize("head_dim", one_in(2, [96, 256]))
    def test_the_kernels_of_long_chunks_with_all_of_it_compile_for_an_h200(head_dim: int):
        from worker.attention import prompt_triton as prompt
        from worker.ops.jit import power_of_two

        shape = AttentionShape(32, 8, head_dim, 1.0, KeyMask(window=512), cap=50.0, sinks=True)
        assert "wgmma" in prompt_ptx(shape)
        gathered: dict[str, Any] = dict.fromkeys(("k_cache", "v_cache", "keys", "values"), "*bf16")
        names = ("page_table", "seq_lens", "first_rows", "query_start")
        gathered |= dict.fromkeys(names, "*i32")
        strides = ("stride_table", "stride_page", "stride_cache_head", "stride_head")
        gathered |= dict.fromkeys(strides, "i32")
        constants = {
            "PAGE": 64, "HEAD_DIM": head_dim, "BLOCK_D": power_of_two(head_dim), "WINDOW": 512,
            "UNIT": prompt.UNIT,
        }  # fmt: skip
        assert "st.global" in ptx_of(prompt._gather_kernel, gathered, constants)


@pytest.mark.skipif(not INTERPRETED, reason="of the triton backend alone")
@pytest.mark.parametrize("window", [20, 100, 130, 700])
def test_items_of_a_window_have_room_wherever_it_begins(window: int) -> None:
    """A tile's keys begin at a block's begin, before the first that its rows see."""
    pool = plain.make_pool(16, 2, 32, 1, "float32", 90)
    shape = AttentionShape(4, 2, 32, 1.0, KeyMask(window=window))
    attention = TritonAttention(pool, shape)
    for length, width in ((window + i, width) for i in range(0, 70, 9) for width in (1, 16)):
        rows, _ = plain.make_rows([(length, width)], 16, seed=0)
        planned = attention.plan(plain.make_batch(rows, 16, 0, 0))
        assert planned.counts[0] <= planned.tiles.max_items
    pool.close()


@pytest.mark.skipif(not INTERPRETED, reason="of the triton backend alone")
def test_the_plan_of_a_long_windowed_prompt_reads_no_table_beyond_its_rows() -> None:
    """Items begin at tokens, of which a row of the table has one for a whole page."""
    from worker.attention.prompt_triton import plan_prompts

    beyond = torch.full((1, 1024), -7, dtype=torch.int32)
    beyond[:, :10] = torch.arange(10)
    starts, lens = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, 600], [640]))
    shape = AttentionShape(4, 2, 64, 1.0, KeyMask(window=100))
    gathered = torch.empty(2, 2, 1024, 64)
    plan = plan_prompts(starts, lens, beyond[:, :10], Bounds(1, 600, 600, 640), shape, gathered)
    items = plan.paged.items[: plan.paged.counts[0]]
    assert items[-1, 3] > 10  # where a tile's keys begin
    assert set(items[:, 6].tolist()) == {0}
