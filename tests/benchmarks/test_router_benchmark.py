"""A small form of `benchmarks.router`: every figure is there, and every stream gets its tokens."""

from __future__ import annotations

from benchmarks.router import PARTS, parties, run


def test_every_part_has_its_figures() -> None:
    with parties() as bench:
        found = {part: dict(run(bench, part, 0.4, num=64)) for part in PARTS}
    assert [len(found[part]) for part in PARTS] == [5, 6, 6, 6, 1]
    figures = [figure for part in PARTS for figure in found[part].values()]
    assert all(figure > 0 for figure in figures), found
