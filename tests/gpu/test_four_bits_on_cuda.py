"""Weights in four bits on a GPU: each number, products, and that rows depend on themselves."""

from typing import Any

import pytest
import torch

from tests.support.products import noise
from tests.unit.test_packed_products import BF16, F16, NUMBERS, experts, packed, products
from worker.config.checkpoint.experts import ExpertShape, Held
from worker.ops.experts.product import expert_products, expert_products_ref
from worker.ops.experts.route import new_load, route
from worker.ops.packed import packed_product, worth
from worker.ops.packed_triton import takes

pytestmark = pytest.mark.gpu(1)
FORMS = [(name, dtype) for name in NUMBERS for dtype in (BF16, F16)]


def on_gpu(held: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(None if part is None else part.cuda() for part in held)


@pytest.mark.parametrize(("name", "dtype"), FORMS)
@pytest.mark.parametrize("m", [16, 512])
def test_every_number_is_that_of_the_definition(name: str, dtype: torch.dtype, m: int) -> None:
    """Rows of the identity take one number each: a product rounds it once, and adds zeros."""
    held = packed(name, 80, 512)
    found = packed_product(torch.eye(512, dtype=dtype).cuda()[:m], *on_gpu(held))
    assert torch.equal(found.cpu(), worth(*held).t()[:m].to(dtype))


@pytest.mark.parametrize("name", NUMBERS)
def test_powers_of_two_of_all_sizes_are_kept(name: str) -> None:
    """Of e8m0 between 2^-62 and 2^65; codes that are subnormal in bf16 are not flushed."""
    values, scales, *others = packed(name, 64, 128)
    if scales.dtype == torch.uint8:
        scales = (torch.arange(256).view(64, 4) % 128 + 65).to(torch.uint8)
    held = values, scales, *others
    found = packed_product(torch.eye(128, dtype=BF16).cuda(), *on_gpu(held))
    assert torch.equal(found.cpu(), worth(*held).t().to(BF16))


@pytest.mark.parametrize(("name", "dtype"), FORMS)
@pytest.mark.parametrize("m", [1, 17, 64, 65, 300, 600])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (100, 384)])
def test_products_are_near_and_rows_depend_on_themselves(
    name: str, dtype: torch.dtype, m: int, n: int, k: int
) -> None:
    held, x = on_gpu(packed(name, n, k)), noise(m, k, dtype=dtype, device="cuda")
    found = packed_product(x, *held)
    exact = x.double() @ worth(*held)[:, :k].double().t()
    assert ((found - exact).norm(dim=-1) <= 2**-8 * exact.norm(dim=-1)).all()
    if m <= 64 and takes(x, held[1]):
        assert torch.equal(packed_product(x[-1:].contiguous(), *held), found[-1:])


@pytest.mark.parametrize("name", NUMBERS)
def test_a_row_of_experts_has_the_same_bits_in_any_batch(name: str) -> None:
    x, _, up, down = experts(name, 300, BF16)
    x, gate, held = x.cuda(), noise(4, 256, seed=3).cuda(), Held(0, 4)
    shape, load = ExpertShape(4, 2, 128, renormalizes=True), new_load(held, x.device)
    alone, *others = (
        products(x[:n], route(x[:n], gate, None, 0, shape, held, load), on_gpu(up), on_gpu(down),
                 by=expert_products)
        for n in (1, 3, 40, 300)
    )  # fmt: skip
    assert all(torch.equal(other[:1], alone) for other in others)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("n", [1, 40, 300])
def test_experts_are_near_their_definition(name: str, n: int) -> None:
    x, routes, up, down = experts(name, n, BF16)
    wanted = products(x, routes, up, down, by=expert_products_ref)
    moved = type(routes)(
        *(part.cuda() if isinstance(part, torch.Tensor) else part for part in routes)
    )
    found = products(x.cuda(), moved, on_gpu(up), on_gpu(down), by=expert_products).cpu()
    assert (found - wanted).norm() <= 2**-7 * wanted.norm()
