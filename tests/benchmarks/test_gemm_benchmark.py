"""benchmarks.gemm on the CPU: few rows and many, by every way to multiply."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import gemm


def test_every_way_multiplies_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    argv = ["gemm", "--model", "tiny", "--device", "cpu", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", [*argv, "--m", "4,300", "--libraries", "cublas,cublaslt"])
    gemm.main()
    rows = json.loads(path.read_text())["rows"]
    assert [row["m"] for row in rows] == [4, 300]
    ways = {"cublas", "cublaslt", "product", "cublas again"}
    for row in rows:
        for times in (row["step"], row["layers"], *row["products"].values()):
            assert times.keys() == ways
        assert row["errors"].keys() == ways
        assert max(row["errors"].values()) < 1e-2
