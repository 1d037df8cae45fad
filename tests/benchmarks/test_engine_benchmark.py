"""benchmarks.engine on the CPU: every step of a batch, and the tables that it writes."""

from __future__ import annotations

import json
import math
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import engine
from tests.support.counted import value
from tests.support.prompts import TINY
from worker.api import Sampling


def test_a_batch_takes_a_prefill_step_and_a_decode_step_a_token() -> None:
    options = Namespace(
        model_config=TINY / "config.json", prompt_len=20, output_len=12, page_size=16, chunk=64,
        dtype="", load_format="dummy", eager=False, graph="", attention="auto",
        phase="decode", cached=False, widths=[1], drafter=None, tp=1, collective="auto",
    )  # fmt: skip
    bench = engine.Bench(engine.build(options, 3))
    counter = bench.engine.metrics.steps
    assert bench.generate(3, 20, 12, Sampling(12, ignore_eos=True, temperature=0.0), 1) > 0
    taken = [value(counter(kind, "eager")) for kind in ("prefill", "decode")]
    assert taken == [1, 11], "the prompts' step draws the first tokens"
    assert bench.engine.book.num_holds == 0
    bench.engine.close()


@pytest.mark.parametrize(
    ("phase", "asked"),
    [
        ("decode", ["--batch", "1,2x24", "--also", "top_p@2,all", "--cached"]),
        ("prefill", ["--tokens", "8,16", "--batch", "1"]),
    ],
)
def test_a_row_is_written_for_every_case(
    phase: str, asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.json"
    arguments = [
        "--model-config", str(TINY / "config.json"), "--phase", phase, "--prompt-len", "16",
        "--output-len", "12", "--page-size", "16", "--repeat", "1", "--json", str(path), *asked,
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["engine", *arguments])
    engine.main()
    rows: list[dict[str, Any]] = json.loads(path.read_text())["steps"]
    if phase == "decode":
        cases = [(row["batch"], row["prompt_len"], row["sampling"]) for row in rows]
        assert cases == [
            (1, 16, "greedy"),
            (2, 24, "greedy"),
            (2, 16, "top_p"),
            (1, 16, "all"),
            (2, 24, "all"),
        ]
        assert {row["tail_mib"] for row in rows} == {0.0}, "a CPU's allocator counts nothing"
    else:
        assert [(row["batch"], row["tokens"]) for row in rows] == [(1, 8), (1, 16)]
        assert all("eager" in row["graphs"] for row in rows)
    assert all(row["floor_ms"] > 0 for row in rows)


def test_steps_with_a_drafter_have_rows_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, models = tmp_path / "out.json", Path(engine.__file__).parent / "models"
    arguments = [
        "--model-config", str(models / "small.json"),
        "--drafter", str(models / "small-eagle3.json"),
        "--widths", "1,3", "--batch", "2", "--prompt-len", "16", "--output-len", "12",
        "--page-size", "16", "--repeat", "1", "--json", str(path),
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["engine", *arguments])
    engine.main()
    rows: list[dict[str, Any]] = json.loads(path.read_text())["steps"]
    assert [(row["batch"], row["width"]) for row in rows] == [(2, 1), (2, 3)]
    assert all(math.isfinite(row["median_ms"]) for row in rows)  # a slope: it may fall
