"""Which tiles linear layers ask for, the scratch there is for them, and where results go."""

import pytest
import torch

from worker.ops.product import MAX_PARTIALS, MAX_TILES, OWN_ROWS, product
from worker.ops.skinny_triton import choose

# Columns around every step of the table of tiles, and those of the models in benchmarks/models.
COLUMNS = (*range(1, 6300, 31), 1535, 1536, 3071, 3072, 6143, 6144, 16383, 24576, 65535, 151936)


@pytest.mark.parametrize("m", [1, 17, OWN_ROWS])
@pytest.mark.parametrize("k", [64, 512, 4096, 12288])
@pytest.mark.parametrize("eight", [False, True])
def test_the_scratch_holds_every_product_and_its_counters(m, k, eight):
    for n in COLUMNS:
        tile = choose(m, n, k, eight=eight)
        assert tile.num_partials(n) <= MAX_PARTIALS
        assert tile.num_tiles(n) <= MAX_TILES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("m", [1, 3, 200])
def test_a_result_is_the_same_where_it_is_asked_for(m, dtype):
    generator = torch.Generator().manual_seed(m)
    x, w = (torch.randn(n, 96, generator=generator).to(dtype) for n in (m, 40))
    around = torch.full((m + 2, 40), 7.0, dtype=dtype)
    for bias in (None, w[:, 0].contiguous()):
        found = product(x, w, bias, around[1:-1])
        assert found.data_ptr() == around[1].data_ptr()
        assert torch.equal(around[1:-1], product(x, w, bias))
        assert (around[:: m + 1] == 7.0).all()
