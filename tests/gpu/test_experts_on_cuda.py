"""Experts on one GPU: their kernels as they are served."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.equivalence import test_dense_laws as laws
from tests.support.engines import running
from tests.support.laws import ids
from worker.config.checkpoint.experts import ExpertShape, Held
from worker.ops.experts import product_triton
from worker.ops.experts.product import expert_products, expert_products_ref
from worker.ops.experts.route import new_load, route, route_ref
from worker.ops.jit import from_gluon

pytestmark = pytest.mark.gpu(1)
SIZE, SHAPE = 2048, ExpertShape(128, 8, 768, renormalizes=True)
WIDE = ExpertShape(512, 10, 128, renormalizes=True)
WHOLE = ExpertShape(64, 6, 128, renormalizes=False)  # of all scores
ALL, JOINED = Held(0, SHAPE.num_experts), Held(0, SHAPE.num_experts, 1)
COUNTS = [1, 2, 7, 16, 17, 64, 65, 128, 200, 256, 500, 1024, 2048]
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.fixture(scope="module")
def weights() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)

    def noise(*sizes: int) -> Tensor:
        return torch.randn(sizes, device="cuda", dtype=torch.bfloat16) * sizes[-1] ** -0.5

    e, i = JOINED.total, SHAPE.width
    return noise(e, SIZE), noise(e, 2 * i, SIZE), noise(e, SIZE, i)


def load(held: Held) -> Tensor:
    return new_load(held, torch.device("cuda"))


def tokens(count: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(1)
    return torch.randn(count, SIZE, device="cuda", generator=generator).bfloat16()


@pytest.mark.parametrize("held", [ALL, JOINED], ids=["alone", "shared"])
def test_a_row_is_the_same_alone_in_any_batch_order_and_padding(weights, held: Held) -> None:
    gate, up, down = (stack[: held.total] for stack in weights)
    x = tokens(5200)  # on Hopper by other kernels than 1024, and than 2048

    def computed(x: Tensor, slots: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        routes = route(x, gate, slots, 64, SHAPE, held, load(held))
        return expert_products(x, routes, up, down, held), routes.ids, routes.weights

    wanted = computed(x)
    for count in COUNTS:
        for got, all_of in zip(computed(x[:count]), wanted, strict=True):
            assert torch.equal(got, all_of[:count]), count
    turned = computed(x.flip(0))
    padded = x.clone()
    padded[300:] = float("nan")
    slots = torch.full((len(x),), 64, device="cuda")
    slots[300:] = 3
    behind = computed(padded, slots)
    for i, all_of in enumerate(wanted):
        assert torch.equal(turned[i].flip(0), all_of)
        assert torch.equal(behind[i][:300], all_of[:300])
    assert not behind[0][300:].any()


@pytest.mark.parametrize("shape", [SHAPE, WIDE, WHOLE], ids=["128", "512", "64"])
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("shared", [0, 1])
def test_routes_are_the_reference_s(shape: ExpertShape, count: int, shared: int) -> None:
    x, num = tokens(count), shape.num_experts
    gate = torch.randn(num + shared, SIZE, device="cuda").bfloat16() * SIZE**-0.5
    held = Held(0, num, 1) if shared else Held(num // 4, num // 2)
    slots = torch.arange(count, device="cuda") % 50 + 10
    got, wanted = (f(x, gate, slots, 20, shape, held, load(held)) for f in (route, route_ref))
    differ = (got.ids != wanted.ids).any(-1)
    assert differ.float().mean() < 0.02  # two of nearly one score: cuBLAS adds in another order
    torch.testing.assert_close(got.weights[~differ], wanted.weights[~differ], atol=2e-5, rtol=1e-4)
    assert (got.ids[slots < 20] == num + shared).all()
    local = got.ids.flatten() - held.first
    local = torch.where((local >= 0) & (local < held.total), local, held.total)
    starts = torch.bincount(local, minlength=held.total + 1).cumsum(0)[: held.total]
    assert got.starts[0] == 0
    assert torch.equal(got.starts[1:].long(), starts)
    last = int(starts[-1])
    assert torch.equal(got.order[:last].long(), local.argsort(stable=True)[:last])


@pytest.mark.parametrize("count", [1, 20, 200, 1024])
def test_products_are_the_reference_s(weights, count: int) -> None:
    gate, up, down = weights
    x = tokens(count)
    for held in (ALL, JOINED, Held(32, 48)):
        part = slice(held.first, held.first + held.total)
        routes = route(x, gate[: SHAPE.num_experts + held.shared], None, 0, SHAPE, held, load(held))
        operands = up[part].contiguous(), down[part].contiguous(), held
        got, wanted = (f(x, routes, *operands) for f in (expert_products, expert_products_ref))
        norm = wanted.float().norm(dim=-1).clamp_min(1e-3)
        assert ((got.float() - wanted.float()).norm(dim=-1) / norm).max() < 2**-7


# Experts, top_k, hidden size, width, tokens: of a prompt, whose last tiles are of every height.
PROMPTS = [(64, 6, 2048, 1408, 2048), (8, 2, 1024, 704, 700), (8, 2, 1024, 704, 1500)]


@pytest.mark.skipif(not HOPPER, reason="needs Hopper")
@pytest.mark.parametrize("lopsided", [0.0, 1.0])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_products_of_prompts_by_gluon_have_triton_s_bits(
    prompt: tuple[int, ...], lopsided: float
) -> None:
    """With lopsided some experts have no row, and others nearly all."""
    num, top_k, size, width, n = prompt
    torch.manual_seed(2)
    x, gate, up, down = (
        (torch.randn(sizes, device="cuda") * sizes[-1] ** -0.5).bfloat16()
        for sizes in ((n, size), (num, size), (num, 2 * width, size), (num, size, width))
    )
    x *= size**0.5
    x[:, 0] += lopsided * 40
    gate[:, 0] += lopsided * torch.linspace(-1, 1, num, device="cuda")
    shape = ExpertShape(num, top_k, width, renormalizes=True)
    for held in (Held(0, num), Held(num // 4, num // 2)):
        part = slice(held.first, held.first + held.total)
        operands = up[part].contiguous(), down[part].contiguous(), held
        slots = torch.full((n,), 64, device="cuda")
        slots[n - 37 :] = 3
        routes = route(x, gate, slots, 64, shape, held, load(held))
        calls: list[int] = []

        def spied(*named: str, calls: list[int] = calls) -> Any:
            product = from_gluon(*named)
            return lambda *args: calls.append(args[-1]) or product(*args)

        with mock.patch.object(product_triton, "from_gluon", spied):
            first, *more = (expert_products(x, routes, *operands) for _ in range(10))
        assert calls == [n * top_k // held.total] * 20
        with mock.patch.object(product_triton, "from_gluon", return_value=None):
            assert torch.equal(first, expert_products(x, routes, *operands))
        assert all(torch.equal(first, other) for other in more)
        wanted = expert_products_ref(x, routes, *operands)
        norm = wanted.float().norm(dim=-1).clamp_min(1e-3)
        assert ((first.float() - wanted.float()).norm(dim=-1) / norm).max() < 2**-7


@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("case", laws.SPARSE)
def test_texts_are_the_reference_s_in_float32(case: str, mode: str) -> None:
    """Through graphs, whose padding is poisoned, pulled or not, in windows."""
    path, wanted = laws.saved(case)
    made = laws.sections(path, mode, device="cuda", strict=True)
    made |= {"transport": {"name": "mooncake", "kind": "tcp"}}
    made["spec"] = {"drafter": "ngram", "widths": [1, 4]}
    with running(made, num_prefill=int(mode == "always")) as cluster:
        for _ in range(2):
            assert ids(cluster.client.generate(laws.prompts(), laws.GREEDY)) == wanted
