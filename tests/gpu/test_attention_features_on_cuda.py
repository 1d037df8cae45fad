"""Windows, soft caps, sinks and heads of 96 numbers on a GPU: both of our kernels, and FlashInfer.

The reference backend in float32 is the oracle; see test_attention_on_cuda.py.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu import test_attention_on_cuda as plain
from worker.attention import triton as triton_backend
from worker.attention.base import AttentionShape
from worker.config.backends import ATTENTION
from worker.config.checkpoint.mask import KeyMask
from worker.registry import resolve

pytestmark = pytest.mark.gpu(1)

# Scores are about ±11 at head_dim 128 and scale 1, so that a cap of 20 bends them.
ASKED: dict[str, dict[str, Any]] = {
    "window": {"mask": KeyMask(window=100)},
    "long window": {"mask": KeyMask(window=1000)},
    "cap": {"cap": 20.0, "scale": 0.5},
    "sinks": {"sinks": True},
    "all": {"mask": KeyMask(window=300), "cap": 20.0, "scale": 0.5, "sinks": True},
}
DTYPES = {64: "float16", 96: "bfloat16", 128: "bfloat16", 256: "bfloat16"}
SHAPES = {"decode": plain.RAGGED, "windows": plain.WIDTHS, "chunks": plain.CHUNKS}


def shape_of(case: plain.Case, options: dict[str, Any]) -> AttentionShape:
    region = case.pool.region()
    options = {"scale": region.head_dim**-0.5, **options}
    return AttentionShape(case.q.shape[1], region.num_kv_heads, region.head_dim, **options)


def sinks_of(case: plain.Case, options: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(7)
    wanted = range(plain.NUM_LAYERS if options.get("sinks") else 0)
    return [3 * torch.randn(case.q.shape[1], device="cuda") for _ in wanted]


def backend(name: str, case: plain.Case, options: dict[str, Any]) -> Any:
    cls: Any = resolve("attention backend", name, ATTENTION)
    return cls(case.pool, shape_of(case, options), sinks_of(case, options))


def check(case: plain.Case, options: dict[str, Any], name: str = "triton") -> None:
    out = plain.attend(backend(name, case, options), case)
    region = case.pool.region()
    exact = plain.pool_of(
        region.num_kv_heads, region.head_dim, region.page_size, region.num_groups, "float32",
        case.pool.num_pages,
    )  # fmt: skip
    layers = zip(exact.layer(plain.LAYER), case.pool.layer(plain.LAYER), strict=True)
    for cache, source in layers:
        cache.copy_(source)
    in_f32 = plain.Case(exact, case.batch, case.q.float(), case.k.float(), case.v.float())
    expected = plain.attend(backend("reference", in_f32, options), in_f32)
    error = ((out.float() - expected).abs() / (1 + expected.abs())).max().item()
    assert error < plain.BOUNDS[region.dtype], error
    assert not out[int(case.batch.query_start[-1]) :].any()


@pytest.mark.product(
    asked=tuple(ASKED),
    head_dim=tuple(DTYPES),
    shapes=tuple(SHAPES),
    heads=((8, 2), (32, 8), (4, 4)),
    page=(16, 64),
)
def test_the_paged_kernel_matches_the_reference(asked, head_dim, shapes, heads, page) -> None:
    case = plain.make(SHAPES[shapes], heads, head_dim, page, 4, DTYPES[head_dim])
    check(case, ASKED[asked])


@pytest.mark.parametrize("head_dim", [96, 128])
def test_float32_is_float32(head_dim: int) -> None:
    check(plain.make(plain.WIDTHS, head_dim=head_dim, dtype="float32"), ASKED["all"])


@pytest.mark.product(
    asked=tuple(ASKED), head_dim=tuple(DTYPES), page=(16, 64), number=tuple(range(len(plain.LONG)))
)
def test_the_kernel_of_long_chunks_matches_the_reference(
    asked, head_dim, page, number, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_backend, "paged_attention", plain.only_prompts)
    shapes, dtype = plain.LONG[number], DTYPES[head_dim]
    check(plain.make(shapes, (8, 2), head_dim, page, 4, dtype, padded_rows=40), ASKED[asked])


@plain.needs_flashinfer
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("asked", ["window", "long window", "cap"])
def test_flashinfer_matches_the_reference(asked: str, shapes: str) -> None:
    case = plain.make(SHAPES[shapes], (32, 8), 128, 64, 4, "bfloat16")
    check(case, ASKED[asked], "flashinfer")


@pytest.mark.parametrize("width", [1, 4])
def test_pages_before_the_window_are_not_read(width: int) -> None:
    """Not even their ids, which another request may have by then."""
    case = plain.make([(5000, width), (900, width), (30000, width)], (32, 8), page=64)
    attention = backend("triton", case, {"mask": KeyMask(window=1000)})
    before = plain.attend(attention, case)
    for row, prefix in ((0, 5000), (2, 30000)):
        first = (prefix - 1000 + 1) // 64
        for cache in case.pool.layer(plain.LAYER):
            cache[case.batch.page_table[row, :first].long()] = float("nan")
        case.batch.page_table[row, :first] = 1 << 30
    assert torch.equal(plain.attend(attention, case), before)


def test_a_graph_serves_lengths_that_it_was_not_captured_with() -> None:
    shapes = [(1 + 377 * i % 9000, 1) for i in range(32)]
    case = plain.make(shapes, (32, 8), page=64, padded_rows=0, padded_reqs=0)
    attention = backend("triton", case, ASKED["all"])
    live = case.batch
    buffer = replace(live, seq_lens=torch.ones_like(live.seq_lens), max_seq_len_ub=40960)
    plain.attend(attention, case, buffer)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = plain.attend(attention, case, buffer)
    buffer.seq_lens.copy_(live.seq_lens)
    graph.replay()
    assert torch.equal(out, plain.attend(attention, case, replace(live, max_seq_len_ub=40960)))
