"""The benchmark of draws times every kind of sampling."""

from __future__ import annotations

import pytest

from benchmarks import draws


def test_every_kind_has_its_times(capsys: pytest.CaptureFixture[str]) -> None:
    draws.main(["--rows", "1,3", "--vocab", "300", "--repeat", "2"])
    _, _, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    assert [row[:2] for row in rows] == [[num, kind] for num in "13" for kind in draws.KINDS]
    assert all(0 < float(row[3]) <= float(row[2]) <= float(row[4]) for row in rows)
