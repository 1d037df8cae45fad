"""Products by algorithms of cuBLASLt that a table names, on one GPU."""

from ctypes import byref, c_int, c_size_t, c_uint32, c_uint64, c_void_p, sizeof
from itertools import islice
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.support import products
from tests.support.products import captured, error, weights
from worker.ops import lt_gemm
from worker.ops import product as module
from worker.ops.lt_gemm import LtGemm, LtMatmul, Words
from worker.ops.product import product

pytestmark = pytest.mark.gpu(1)
BOUND = 4e-3
MAX_WORKSPACE, REDUCTION_MASK = 1, 3  # attributes of a preference
SHAPES = [(65, 384, 256), (96, 6144, 4096), (128, 4096, 12288), (200, 1032, 520)]


def noise(*shape: int) -> torch.Tensor:
    return products.noise(*shape, device="cuda")


@pytest.fixture(scope="module")
def lt() -> lt_gemm.CublasLt:
    torch.mm(noise(16, 16), noise(16, 16))
    library = lt_gemm.CublasLt.loaded()
    assert library is not None
    return lt_gemm.CublasLt(library, torch.device("cuda", torch.cuda.current_device()))


def proposals(lt: lt_gemm.CublasLt, matmul: LtMatmul) -> list[Words]:
    """The library's guesses, the best first, then those without a reduction; none needs scratch."""
    found: dict[Words, None] = {}
    for reductions in (7, 0):
        preference, count = c_void_p(), c_int()
        results = (lt_gemm.HeuristicResult * 64)()
        lt.call("cublasLtMatmulPreferenceCreate", byref(preference))
        for attribute, value in (
            (MAX_WORKSPACE, c_uint64(0)),
            (REDUCTION_MASK, c_uint32(reductions)),
        ):
            of = preference, c_int(attribute), byref(value), c_size_t(sizeof(value))
            lt.call("cublasLtMatmulPreferenceSetAttribute", *of)
        status = lt.library.cublasLtMatmulAlgoGetHeuristic(
            lt.handle, matmul.operation, matmul.w, matmul.x, matmul.out, matmul.out,
            preference, len(results), results, byref(count),
        )  # fmt: skip
        lt.call("cublasLtMatmulPreferenceDestroy", preference)
        if status == 0:
            here = results[: count.value]
            found |= {tuple(each.words): None for each in here if each.state == 0}
    return list(found)


def gemms(lt: lt_gemm.CublasLt, shape: tuple[int, int, int], num: int = 4) -> list[LtGemm]:
    """Each with another algorithm for this shape."""
    matmul = LtMatmul(lt, shape, shape[2])
    found = []
    for words in islice((w for w in proposals(lt, matmul) if matmul.takes(w)), num):
        found.append(LtGemm(lt, {shape: words}))
    assert found
    return found


def computed(gemm: LtGemm, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    out = gemm(x, w)
    assert out is not None
    return out


@pytest.mark.parametrize("shape", SHAPES)
def test_every_algorithm_is_close_and_repeats_itself(lt, shape):
    m, n, k = shape
    x, w = noise(m, k), weights(n, k)
    wide = noise(m, k + 64)
    wide[:, :k] = x
    for gemm in gemms(lt, shape):
        first = computed(gemm, x, w)
        assert first.shape == (m, n)
        assert error(first, x, w) < BOUND
        for _ in range(10):
            assert torch.equal(computed(gemm, x, w), first)
        assert error(computed(gemm, wide[:, :k], w), x, w) < BOUND


@pytest.mark.parametrize("shape", SHAPES)
def test_a_graph_replays_it(lt, shape):
    m, n, k = shape
    x, w = noise(m, k), weights(n, k)
    for gemm in gemms(lt, shape):
        expected = computed(gemm, x, w).clone()
        out = torch.empty_like(expected)
        graph = captured(lambda gemm=gemm, out=out: out.copy_(computed(gemm, x, w)))
        for _ in range(20):
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, expected)
        other = products.noise(m, k, seed=5, device="cuda")
        again = computed(gemm, other, w)
        x_before = x.clone()
        x.copy_(other)
        graph.replay()
        assert torch.equal(out, again)
        x.copy_(x_before)


def test_an_algorithm_that_the_library_refuses_is_not_taken(lt):
    words: Any = (1 << 63,) * 8
    gemm = LtGemm(lt, {(128, 384, 256): words})
    assert gemm(noise(128, 256), weights(384, 256)) is None


def test_product_takes_the_tuned_one_and_torchs_elsewhere(lt, monkeypatch):
    shape = (128, 4096, 4096)
    x, w = noise(128, 4096), weights(4096, 4096)
    gemm = gemms(lt, shape, 1)[0]
    calls = []
    monkeypatch.setattr(module, "tuned_gemm", lambda device: calls.append(device) or gemm)
    assert torch.equal(product(x, w), computed(gemm, x, w))
    assert torch.equal(product(x[:100], w), F.linear(x[:100], w))
    assert calls == [x.device, x.device]
    assert torch.equal(product(x, w, w[:, 0]), F.linear(x, w, w[:, 0]))
    assert len(calls) == 2
    for m, bias in ((128, None), (100, None), (128, w[:, 0]), (8, None)):
        out = torch.empty(m, 4096, dtype=x.dtype, device=x.device)
        assert product(x[:m], w, bias, out) is out
        assert torch.equal(out, product(x[:m], w, bias))


def test_the_shipped_table_holds_on_this_card():
    device = torch.device("cuda", torch.cuda.current_device())
    gemm = lt_gemm.tuned_gemm(device)
    if gemm is None:
        pytest.skip("no table for this card and this cuBLASLt")
    for m, n, k in gemm.algorithms:
        x, w = noise(m, k), weights(n, k)
        first = computed(gemm, x, w)
        assert float((first.float() - F.linear(x, w).float()).norm() / first.float().norm()) < 2e-3
        for _ in range(20):
            assert torch.equal(computed(gemm, x, w), first)
        assert torch.equal(product(x, w), first)
        shifted = torch.empty(m * k + 8, dtype=x.dtype, device=device)[8:].view(m, k).copy_(x)
        assert torch.equal(computed(gemm, shifted, w), first)  # 16 bytes are all that is asked for
