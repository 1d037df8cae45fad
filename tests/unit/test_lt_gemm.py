"""Tables of cuBLASLt's algorithms: what is read, refused, shipped, and what happens without one."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.support.products import noise
from worker.ops.lt_gemm import TUNED, Shape, Words, algorithms_for
from worker.ops.norms import swiglu
from worker.ops.product import OWN_ROWS, gated_product, product

SHIPPED = sorted(TUNED.glob("*.json"))
LAST = (1 << 64) - 1
ALGORITHMS = {"128,4096,4096": [LAST, *range(7)], "96,6144,4096": [1] * 8}
TABLE = {"device": "Some Card", "cublaslt": 7, "dtype": "bfloat16", "algorithms": ALGORITHMS}


def read(folder: Path, text: str) -> dict[Shape, Words]:
    (folder / "Some_Card.json").write_text(text)
    return algorithms_for("Some Card", 7, folder)


def test_a_table_is_read(tmp_path):
    wanted = {(128, 4096, 4096): (LAST, *range(7)), (96, 6144, 4096): (1,) * 8}
    assert read(tmp_path, json.dumps(TABLE)) == wanted


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float16"},
        {"algorithms": None},
        *(
            {"algorithms": {key: words}}
            for key, words in {
                "128,4096": [0] * 8,
                "a,b,c": [0] * 8,
                "1,2,3": [0] * 7,
                "2,2,3": [-1] * 8,
                "3,2,3": ["0"] * 8,
                "4,2,3": {"words": [0] * 8},
            }.items()
        ),
    ],
)
def test_what_is_no_table_is_refused(change, tmp_path):
    with pytest.raises(ValueError, match=r"Expected|Invalid|unpack|invalid literal"):
        read(tmp_path, json.dumps(TABLE | change))


@pytest.mark.parametrize("change", [{"device": "Other"}, {"cublaslt": 8}])
def test_a_table_for_another_device_or_library_is_none(change, tmp_path):
    assert algorithms_for("Unknown", 7, tmp_path) == {}
    assert read(tmp_path, json.dumps(TABLE | change)) == {}


@pytest.mark.parametrize("path", SHIPPED, ids=[path.stem for path in SHIPPED])
def test_shipped_tables_are_for_rows_that_our_kernel_leaves(path):
    table = json.loads(path.read_text())
    algorithms = algorithms_for(table["device"], table["cublaslt"])
    assert algorithms
    assert all(m > OWN_ROWS for m, _, _ in algorithms)
    assert all(word <= LAST for words in algorithms.values() for word in words)


@pytest.mark.parametrize("m", [OWN_ROWS + 1, 128])
def test_without_a_table_the_product_is_torchs(m):
    x, w = noise(m, 256), noise(384, 256, seed=1)
    assert torch.equal(product(x, w), F.linear(x, w))
    assert torch.equal(product(x, w, w[:, 0]), F.linear(x, w, w[:, 0]))
    assert torch.equal(gated_product(x, w), swiglu(F.linear(x, w)))
