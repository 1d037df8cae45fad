"""Windows, soft caps, sinks and heads of 96 numbers on a GPU: both of our kernels, and FlashInfer.

The reference backend in float32 is the oracle; see test_attention_on_cuda.py.
"""

from typing import Any

import pytest
import torch

from tests.gpu import test_attention_on_cuda as plain
from worker.attention import triton as triton_backend
from worker.config.checkpoint.mask import KeyMask

pytestmark = pytest.mark.gpu(1)

# Scores are about ±11 at head_dim 128 and scale 1, so that a cap of 20 bends them.
ASKED: dict[str, dict[str, Any]] = {
    "window": {"mask": KeyMask(window=100)},
    "long window": {"mask": KeyMask(window=1000)},
    "cap": {"cap": 20.0, "scale": 0.5},
    "sinks": {"sinks": True},
    "all": plain.ALL,
}
DTYPES = {64: "float16", 96: "bfloat16", 128: "bfloat16", 256: "bfloat16"}
SHAPES = {"decode": plain.RAGGED, "windows": plain.WIDTHS, "chunks": plain.CHUNKS}


@pytest.mark.product(
    asked=tuple(ASKED),
    head_dim=tuple(DTYPES),
    shapes=tuple(SHAPES),
    heads=((8, 2), (32, 8), (4, 4)),
    page=(16, 64),
)
def test_the_paged_kernel_matches_the_reference(asked, head_dim, shapes, heads, page) -> None:
    case = plain.make(SHAPES[shapes], heads, head_dim, page, 4, DTYPES[head_dim])
    plain.check(case, **ASKED[asked])


@pytest.mark.product(
    asked=tuple(ASKED), head_dim=tuple(DTYPES), page=(16, 64), number=tuple(range(len(plain.LONG)))
)
def test_the_kernel_of_long_chunks_matches_the_reference(
    asked, head_dim, page, number, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_backend, "paged_attention", plain.only_prompts)
    shapes, dtype = plain.LONG[number], DTYPES[head_dim]
    case = plain.make(shapes, (8, 2), head_dim, page, 4, dtype, padded_rows=40)
    plain.check(case, **ASKED[asked])


@plain.needs_flashinfer
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("asked", ["window", "long window", "cap"])
def test_flashinfer_matches_the_reference(asked: str, shapes: str) -> None:
    case = plain.make(SHAPES[shapes], (32, 8), 128, 64, 4, "bfloat16")
    plain.check(case, "flashinfer", **ASKED[asked])


@pytest.mark.parametrize("width", [1, 4])
def test_pages_before_the_window_are_not_read(width: int) -> None:
    """Not even their ids, which another request may have by then."""
    case = plain.make([(5000, width), (900, width), (30000, width)], (32, 8), page=64)
    attention = plain.backend("triton", case, mask=KeyMask(window=1000))
    before = plain.attend(attention, case)
    for row, prefix in ((0, 5000), (2, 30000)):
        first = (prefix - 1000 + 1) // 64
        for cache in case.pool.layer(plain.LAYER):
            cache[case.batch.page_table[row, :first].long()] = float("nan")
        case.batch.page_table[row, :first] = 1 << 30
    assert torch.equal(plain.attend(attention, case), before)
