"""Tables of cuBLASLt's algorithms: what is read, refused, shipped, and what happens without one."""

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
from worker.ops.product import OWN_ROWS, gated_product, product

ROOT = Path(__file__).parents[2]
SHIPPED = sorted(TUNED.glob("*.json"))
LAST = (1 << 64) - 1
TABLE = Table(
    "Some Card",
    130100,
    {
        (128, 4096, 4096): (LAST, *range(WORDS - 1)),
        (96, 6144, 4096): (1,) * WORDS,
    },
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
