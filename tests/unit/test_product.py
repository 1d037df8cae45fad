"""Tables of cuBLASLt's algorithms: what is read, refused, shipped, and what happens without one.

Which tiles linear layers ask for, the scratch there is for them, and where results go.
"""

import json
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from benchmarks import gemm
from tests.support.products import noise
from worker.ops.lt_gemm import TUNED, WORDS, CublasLt, Table, table_of
from worker.ops.norms import swiglu
from worker.ops.product import MAX_PARTIALS, MAX_TILES, OWN_ROWS, gated_product, product
from worker.ops.skinny_triton import choose

ROOT = Path(__file__).parents[2]
SHIPPED = sorted(TUNED.glob("*.json"))
LAST = (1 << 64) - 1
TABLE = Table(
    "Some Card",
    130100,
    {(128, 4096, 4096): (LAST, *range(WORDS - 1)), (96, 6144, 4096): (1,) * WORDS},
)


@pytest.mark.parametrize("table", [TABLE, Table("x", 1, {})])
def test_a_table_reads_back(table: Table):
    assert Table.parse(table.dump()) == table


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float16"},
        {"algorithms": None},
        {"algorithms": {"128,4096": [0] * WORDS}},
        {"algorithms": {"a,b,c": [0] * WORDS}},
        {"algorithms": {"1,2,3": [0] * (WORDS - 1)}},
        {"algorithms": {"1,2,3": [LAST + 1] * WORDS}},
        {"algorithms": {"1,2,3": [-1] * WORDS}},
        {"algorithms": {"1,2,3": ["0"] * WORDS}},
        {"algorithms": {"1,2,3": {"words": [0] * WORDS}}},
    ],
)
def test_what_is_no_table_is_refused(change):
    with pytest.raises(ValueError, match=r"table|word|unpack|invalid literal"):
        Table.parse(json.dumps(json.loads(TABLE.dump()) | change))


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"device": "x"}'])
def test_nor_is_other_text(text):
    with pytest.raises(ValueError, match=r"not a table|Expecting value"):
        Table.parse(text)


def test_a_device_gets_the_table_of_its_name_alone(tmp_path):
    (tmp_path / "Some_Card.json").write_text(TABLE.dump())
    (tmp_path / "Other.json").write_text(TABLE.dump())
    (tmp_path / "Broken.json").write_text("{}")
    assert table_of("Some Card", tmp_path) == TABLE
    assert table_of("Other", tmp_path) is None
    assert table_of("Unknown", tmp_path) is None
    with pytest.raises(ValueError, match="not a table"):
        table_of("Broken", tmp_path)


@pytest.mark.parametrize("path", SHIPPED, ids=[path.stem for path in SHIPPED])
def test_shipped_tables_are_for_rows_that_our_kernel_leaves(path):
    table = Table.parse(path.read_text())
    assert table_of(table.device) == table
    assert all(m > OWN_ROWS for m, _, _ in table.algorithms)


def test_they_are_part_of_the_package():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = patterns["tool"]["setuptools"]["package-data"]["worker"]
    packed = {path for pattern in patterns for path in (ROOT / "worker").glob(pattern)}
    assert SHIPPED
    assert packed.issuperset(SHIPPED)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has the library")
def test_a_torch_without_cuda_has_no_library():
    assert CublasLt.loaded() is None


@pytest.mark.parametrize("m", [OWN_ROWS + 1, 128])
def test_without_a_table_the_product_is_torchs(m):
    x, w = noise(m, 256), noise(384, 256, seed=1)
    assert torch.equal(product(x, w), F.linear(x, w))
    assert torch.equal(product(x, w, w[:, 0]), F.linear(x, w, w[:, 0]))
    assert torch.equal(gated_product(x, w), swiglu(F.linear(x, w)))


@pytest.mark.parametrize("args", [["--device", "cpu"], ["--device", "cuda", "--m", "64"]])
def test_tuning_wants_a_gpu_and_many_rows(args, monkeypatch, tmp_path):
    path = tmp_path / "table.json"
    monkeypatch.setattr(sys, "argv", ["gemm", "--tune", "--m", "128", "--json", str(path), *args])
    with pytest.raises(SystemExit):
        gemm.main()
    assert not path.exists()


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
