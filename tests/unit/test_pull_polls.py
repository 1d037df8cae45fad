"""How soon decode looks again at pulls that run: soon after they began, then by their age."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from worker.api import Candidate, KVReady, Sampling
from worker.cache.book import PageBook
from worker.cache.layout import KVLayout, KVRegion
from worker.config import LeaseConfig, TransportConfig
from worker.decode import LONGEST_POLL_S, SWEEP_S, YOUNG_S, poll_after_s
from worker.metrics import WorkerMetrics
from worker.pull.fetch import FetchContext
from worker.pull.inbound import Inbound
from worker.schedule.req import Req
from worker.transfer.base import PullState
from worker.transfer.layout import PoolPages

PEER, PAGE_SIZE = "prefill-0/p", 16


def test_the_wait_is_an_eighth_of_the_youngest_pull_s_age() -> None:
    layout = KVLayout((KVRegion("target", 12, 2, 8, 1, PAGE_SIZE, "float32"),), "m")
    book, sent = PageBook(64, PAGE_SIZE), list[Any]()
    parts = FetchContext(
        book, layout, lambda _, message: sent.append(message), LeaseConfig(),
        TransportConfig(name="shm", kind="shm"),
        WorkerMetrics(model="m", role="decode", worker="w"),
    )  # fmt: skip
    states: list[PullState] = []

    def pull(_: object) -> object:
        number = len(states)
        states.append(PullState.RUNNING)
        return SimpleNamespace(poll=lambda: states[number], num_bytes=1, error=None)

    link = SimpleNamespace(pull=pull)
    peers = SimpleNamespace(
        link=lambda _: link,
        pool_pages=lambda _: PoolPages(64, 64),
        link_bytes_per_s=lambda _: 0.0,
    )
    inbound = Inbound("d", parts, cast("Any", peers))
    began_at = time.monotonic()  # pulls that are too old are given up by the same clock

    def ready(number: int, at: float) -> None:
        tokens = list(range(PAGE_SIZE + 1))
        hold = book.open(tokens, len(tokens), max_matched=0)
        assert hold is not None
        req = Req(str(number), 1, "r", tokens, len(tokens), Sampling(1), float("inf"), hold=hold)
        assert inbound.start(req, [Candidate(PEER)], at)
        inbound.on_ready(KVReady(sent[-1].xfer, 0, (1 + number,), 0, 1, True))
        assert not inbound.poll(at)

    def after_s(seconds: float) -> float:
        return poll_after_s(inbound.pulls_began_at, began_at + seconds)

    assert after_s(0) == SWEEP_S
    ready(0, began_at)
    assert after_s(0) == after_s(0.9 * YOUNG_S) == 0
    assert after_s(0.002) == pytest.approx(0.00025)
    assert after_s(1) == LONGEST_POLL_S
    ready(1, began_at + 1)
    assert after_s(1) == 0
    states[1] = PullState.OK
    assert [each.landed for each in inbound.poll(began_at + 1)] == [True]
    assert after_s(1) == LONGEST_POLL_S  # the first one still runs
    states[0] = PullState.OK
    assert [each.landed for each in inbound.poll(began_at + 1)] == [True]
    assert after_s(1) == SWEEP_S
