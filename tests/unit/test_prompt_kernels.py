"""Which kernel computes long chunks, told without a GPU, and what the one in Gluon compiles to."""

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.contract.test_attention import NUM_LAYERS, make_batch, make_pool, make_rows
from tests.support.interpreted import WHY, assembled
from tests.unit.test_compile_ahead import Hopper
from worker.attention import prompt_triton
from worker.attention.base import AttentionCaps, AttentionShape
from worker.attention.paged_plan_triton import _plan_kernel
from worker.attention.paged_tiles import Chip, choose
from worker.attention.prompt_triton import _gather_kernel
from worker.attention.triton import TritonAttention
from worker.cache.pool import KVPool
from worker.config.checkpoint.mask import KeyMask
from worker.forward.batch import Bounds
from worker.forward.context import forward_context
from worker.ops import jit
from worker.ops.compile_ahead import compile_ahead

triton = pytest.importorskip("triton", reason=WHY)

MODULE = "worker.attention.prompt_gluon"
BF16, F8 = "bfloat16", "float8_e4m3fn"


def gluon() -> Any:
    """worker.attention.prompt_gluon; skips the test where this Triton has no such Gluon."""
    try:
        return import_module(MODULE)
    except (ImportError, AttributeError, TypeError) as missing:
        pytest.skip(f"Triton's Gluon for sm_90 is not as expected: {missing}")


class Anywhere(TritonAttention):
    caps = AttentionCaps()


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes the backend over a pool on the CPU, which passes for a Hopper of unknown Gluon."""
    pools: list[KVPool] = []

    def make(
        head_dim: int = 128, page: int = 64, kept: str = BF16, pages: int = 2, **more: Any
    ) -> Any:
        pools.append(make_pool(page, 2, head_dim, 1, kept, pages))
        shape = AttentionShape(4, 2, head_dim, 1.0, **more)
        return Anywhere(pools[-1], shape, [torch.zeros(4)] * NUM_LAYERS * shape.sinks)

    for name in ("is_hopper", "has_room"):
        monkeypatch.setattr(prompt_triton, name, lambda _: True)
    jit.from_gluon.cache_clear()
    yield make
    jit.from_gluon.cache_clear()
    for pool in pools:
        pool.close()


def kernel_of(attention: Any) -> str:
    """Of long chunks: "pages" where they have no kernel of their own."""
    if not attention._has_prompts:
        assert attention.prompt_kernel is None
        return "pages"
    return "triton" if attention.prompt_kernel is None else "gluon"


@pytest.mark.parametrize(
    ("kernel", "given"),
    [
        ("gluon", {}),
        ("gluon", {"head_dim": 64, "page": 16, "kept": "float16"}),
        ("gluon", {"head_dim": 96}),
        ("gluon", {"head_dim": 256}),
        ("gluon", {"sinks": True, "page": 128}),
        ("gluon", {"kept": F8, "dtype": BF16}),
        ("gluon", {"mask": KeyMask(window=1000), "sinks": True}),
        ("triton", {"cap": 20.0}),
        ("pages", {"mask": KeyMask(first_key=1)}),
        ("pages", {"mask": KeyMask(causal=False)}),
        ("pages", {"kept": "float32"}),
        ("pages", {"kept": F8, "dtype": "float32"}),
        ("pages", {"head_dim": 32}),
        ("pages", {"page": 8}),
        ("pages", {"page": 256}),
    ],
)
def test_what_a_layer_asks_for_chooses_the_kernel(
    kernel: str, given: dict[str, Any], built: Callable[..., Any]
) -> None:
    wanted = gluon().KERNEL if kernel == "gluon" else None
    found = built(**given)
    assert kernel_of(found) == kernel
    assert found.prompt_kernel is wanted


@pytest.mark.parametrize("sm", [(8, 0), (9, 0), (10, 0), (12, 0)])
def test_hopper_alone_gets_gluon_s(
    sm: tuple[int, int], built: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit, "_capability", lambda _: sm)
    gpu: Any = SimpleNamespace(is_cuda=True, device=None)
    monkeypatch.setattr(prompt_triton, "is_hopper", lambda _: jit.is_hopper(gpu))
    wanted = "gluon" if sm == (9, 0) and gluon() else "triton"
    assert kernel_of(built()) == wanted
    assert not jit.is_hopper(torch.zeros(1))


@pytest.mark.parametrize("changed", ["", "NVMMASharedLayout", "warp_specialize"])
def test_a_gluon_that_is_not_as_expected_is_told_once(
    changed: str,
    built: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if changed:
        gluon()
        monkeypatch.delattr(f"triton.experimental.gluon.language.{changed}")
    for module in (MODULE, "worker.ops.parts_gluon"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    if not changed:
        monkeypatch.setitem(sys.modules, MODULE, None)
    assert [kernel_of(built()) for _ in range(3)] == ["triton"] * 3
    assert [record.message.count("Gluon") for record in caplog.records] == [1]


@pytest.mark.parametrize(
    "given",
    [
        {"head_dim": 64, "sinks": True},
        {},
        {"head_dim": 96},
        {"head_dim": 256},
        {"head_dim": 256, "mask": KeyMask(window=1000)},
    ],
)
def test_a_long_chunk_is_launched_on_an_h200(
    given: dict[str, Any], built: Callable[..., Any]
) -> None:
    """By a double of the driver: it compiles, without a spilled register, and products overlap."""
    rows, pages = make_rows([(70, 1100)], 64, 0)
    attention, batch = built(pages=pages, **given), make_batch(rows, 64, 20, 0)
    kernels, driver = (_plan_kernel, _gather_kernel, gluon()._prompt_kernel), Hopper()

    def attend() -> None:
        with forward_context(batch, attention, attention.plan(batch)):
            attention.forward(torch.ones(1120, 4, attention.shape.head_dim).bfloat16(), 0)

    for kernel in kernels:
        kernel.device_caches.clear()
    with mock.patch.object(triton.runtime.driver, "_active", driver):
        assert compile_ahead(attend) == 3
    ((ptx,),) = (
        [made.asm["ptx"] for made in kept.values()]
        for kept, *_ in kernels[2].device_caches.values()
    )
    for kernel in kernels:
        kernel.device_caches.clear()
    for part in ("wgmma.mma_async", "cp.async.bulk.tensor", "setmaxnreg", "ex2.approx.ftz"):
        assert part in ptx
    said = assembled(ptx)
    assert "0 bytes spill stores, 0 bytes spill loads" in said
    assert "serialized" not in said


@pytest.mark.parametrize(
    ("tokens", "has_room", "shape"),
    [(128, True, (64, 64, 4)), (512, True, (128, 32, 8)), (128, False, (64, 32, 8)),
     (512, False, (64, 32, 8))],
)  # fmt: skip
def test_heads_of_256_have_large_tiles_where_there_is_room(
    tokens: int, has_room: bool, shape: tuple[int, int, int]
) -> None:
    bounds = Bounds(1, tokens, tokens, 8192 + tokens)
    tiles = choose(bounds, (16, 2), 256, 2, Chip(132, has_room))
    assert (tiles.block_m, tiles.block_n, tiles.num_warps) == shape
    assert tiles.max_items * 2 <= 132, "all programs run at once"
