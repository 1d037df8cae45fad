"""benchmarks.attention on the CPU: decode and prefill of a tiny model are written down."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import attention


@pytest.mark.parametrize(
    ("asked", "cases"),
    [
        (["--batch", "1,2", "--context", "40", "--query-len", "4"], [(2, 4, 40), (1, 4, 40)]),
        (["--batch", "3", "--lengths", "20-40,8"], [(3, 1, 32)]),
        (["--prefill", "24,32"], [(1, 32, 32), (1, 24, 24)]),
    ],
)
def test_a_row_for_every_case(
    asked: list[str],
    cases: list[tuple[int, int, int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "out.json"
    arguments = [
        "--model", "tiny", "--device", "cpu", "--dtype", "float32", "--page-size", "16",
        "--backends", "reference", "--replays", "1", "--json", str(path), *asked,
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["attention", *arguments])
    attention.main()
    found = json.loads(path.read_text())
    assert [(row["batch"], row["query_len"], row["context"]) for row in found["rows"]] == cases
    for row in found["rows"]:
        assert row["backends"]["reference"]["max_error"] == 0
        assert row["backends"]["reference"]["gb_s"] >= 0
