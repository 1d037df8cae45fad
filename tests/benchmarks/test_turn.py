"""The benchmark of a decode loop's turn runs the real loop."""

from __future__ import annotations

import pytest

from benchmarks import turn


def test_every_part_of_a_turn_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    turn.main(["--rows", "1,5", "--steps", "20"])
    _, titles, *rows = capsys.readouterr().out.splitlines()
    assert titles.split()[:5] == ["rows", "plan", "settle", "replies", "turn"]
    found = [[float(cell) for cell in row.split()] for row in rows]
    assert [row[0] for row in found] == [1, 5]
    assert all(min(row) > 0 for row in found)
