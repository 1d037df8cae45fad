"""benchmarks.gemm on the CPU: rows of all kinds, and a sweep of tiles."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gemm, gemm_sweep
from benchmarks.gemm_step import MODELS, Product
from worker.kernels.gemm.skinny_gemm import SkinnyTile

QWEN3 = MODELS["qwen3-8b"]


def report(monkeypatch: pytest.MonkeyPatch, path: Path, *args: str) -> dict[str, Any]:
    argv = ["gemm", "--model", "tiny", "--device", "cpu", "--json", str(path), *args]
    monkeypatch.setattr(sys, "argv", argv)
    gemm.main()
    return json.loads(path.read_text())


def test_few_rows_are_computed_by_both_and_many_by_the_libraries_alone(monkeypatch, tmp_path):
    found = report(
        monkeypatch, tmp_path / "a.json", "--m", "4,300", "--libraries", "cublas,cublaslt"
    )
    few, many = found["rows"]
    assert few["step"].keys() == few["layers"].keys() == {"cublas", "cublaslt", "skinny"}
    assert many["step"].keys() == {"cublas", "cublaslt"}
    assert few["errors"]["skinny"] < 1e-2
    assert few["tiles"].keys() == few["products"].keys() == {each.name for each in QWEN3}


def test_a_sweep_names_a_tile_for_every_product(monkeypatch, tmp_path):
    found = report(monkeypatch, tmp_path / "b.json", "--sweep", "--m", "96,48")
    assert [row["m"] for row in found["rows"]] == [96, 48]
    for row in found["rows"]:
        assert row["step"]["error_to_cublas"] < 1e-2
        for name, product in row["products"].items():
            tiles = [SkinnyTile(**one["tile"]) for one in product["candidates"]]
            assert not any(one.get("failed") for one in product["candidates"]), name
            assert SkinnyTile(**row["tiles"][name]) in tiles
            assert row["m"] <= tiles[0].block_m


def test_a_sweep_of_more_rows_is_refused(monkeypatch, tmp_path):
    with pytest.raises(SystemExit):
        report(monkeypatch, tmp_path / "c.json", "--sweep", "--m", "64,129")


@pytest.mark.parametrize("m", [1, 40, 100])
@pytest.mark.parametrize("each", QWEN3, ids=[each.name for each in QWEN3])
def test_candidates_fit_an_h200(m: int, each: Product):
    tiles = gemm_sweep.candidates(each, m)
    assert len(set(tiles)) == len(tiles) >= 5
    for tile in tiles:
        ring = (tile.block_n + tile.block_m) * tile.block_k * 2 * tile.num_stages
        assert ring <= 227 * 1024
        assert m <= tile.block_m
        assert each.k % (tile.block_k * tile.split) == 0


def test_a_wrong_result_is_no_candidate(monkeypatch):
    step = gemm.Step(MODELS["tiny"], "cpu", torch.bfloat16)
    each = step.products[0]
    monkeypatch.setattr(gemm_sweep, "ours", lambda *_: lambda _x, _w, out: out.normal_())
    tiles = gemm_sweep.candidates(each, 40)[:2]
    _, timed = gemm_sweep.Sweep(step, 40, 1).time_product(each, tiles)
    assert all(one.failed.startswith("error") for one in timed)
