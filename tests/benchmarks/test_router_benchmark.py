"""A small form of `benchmarks.router`: every figure is there, and every stream gets its tokens."""

from __future__ import annotations

from benchmarks.router import PARTS, parties, run
from tests.support.pairwise import whole


def test_every_part_has_its_figures() -> None:
    parts = PARTS if whole else ("cost", "arrivals", "full")  # the others are forms of arrivals
    with parties() as bench:
        found = {part: dict(run(bench, part, 0.4, num=64)) for part in parts}
    sizes = {"cost": 5, "steady": 6, "arrivals": 6, "fast": 6, "full": 1}
    assert {part: len(found[part]) for part in parts} == {part: sizes[part] for part in parts}
    figures = [figure for part in parts for figure in found[part].values()]
    assert all(figure > 0 for figure in figures), found
