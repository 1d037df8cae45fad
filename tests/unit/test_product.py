"""Which tiles linear layers ask for, and the scratch there is for them."""

from __future__ import annotations

import pytest

from worker.kernels.gemm.product import MAX_PARTIALS, MAX_TILES, OWN_ROWS
from worker.kernels.gemm.skinny_gemm import choose

# Columns around every step of the table of tiles, and those of the models in benchmarks/models.
COLUMNS = (*range(1, 6300, 31), 1535, 1536, 3071, 3072, 6143, 6144, 16383, 24576, 65535, 151936)


@pytest.mark.parametrize("m", [1, 17, OWN_ROWS])
@pytest.mark.parametrize("k", [64, 512, 4096, 12288])
def test_the_scratch_holds_every_product_and_its_counters(m, k):
    for n in COLUMNS:
        tile = choose(m, n, k)
        assert tile.num_partials(n) <= MAX_PARTIALS
        assert tile.num_tiles(n) <= MAX_TILES


def test_no_scratch_lies_idle():
    assert max(choose(OWN_ROWS, n, 4096).num_partials(n) for n in COLUMNS) == MAX_PARTIALS
