"""A small form of `benchmarks.slow_clients`: every slow connection is cut, others are answered."""

from __future__ import annotations

import asyncio
from pathlib import Path

from benchmarks.slow_clients import KINDS, measure
from tests.fault.router_doubles import HANG_S, DecodeDouble, make_model, serving, speak

NUM = 8 * len(KINDS)
LIMITS = {"header_timeout_s": 0.5, "body_timeout_s": 0.5}


def test_slow_connections_are_cut_and_others_are_answered(tmp_path: Path) -> None:
    double = DecodeDouble(script=speak([5]))
    with serving(make_model(tmp_path), double, **LIMITS) as (_, url):
        measured = measure(url, NUM, 2.0, beside_s=0.5, every_s=0.05)
        figures = asyncio.run(asyncio.wait_for(measured, HANG_S))
    assert figures["never_cut"] == figures["refused"] == 0
    for kind, slow in figures["slow"].items():
        assert slow["cut"] >= NUM / len(KINDS), kind
        assert slow["lived_s"]["min"] >= slow["limit_s"], f"{kind} was cut early"
    for phase in ("before", "during", "after"):
        assert figures[phase]["failed"] == []
        assert figures[phase]["requests"] > 0
