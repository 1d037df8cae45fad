"""How soon decode looks again at pulls that run: soon after they began, then by their age."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from worker.api import Candidate, Error, KVReady, Prefill, PrefillRefused, Sampling
from worker.cache.book import PageBook
from worker.cache.layout import KVLayout, KVRegion
from worker.config import LeaseConfig, TransportConfig
from worker.observe.metrics import WorkerMetrics
from worker.schedule.req import Req
from worker.transfer.base import PullState
from worker.transfer.fetch import Fetch, FetchContext
from worker.transfer.inbound import LONGEST_POLL_S, YOUNG_S, Inbound, poll_after_s
from worker.transfer.peers import Link

PEER, PAGE_SIZE = "prefill-0/p", 16


def inbound_of(book: PageBook, sent: list[Any], link: Callable[[str], object | None]) -> Inbound:
    """Decode's side alone; it sends into `sent`."""
    layout = KVLayout((KVRegion("target", 12, 2, 8, 1, PAGE_SIZE, "float32"),))
    context = FetchContext(
        book, layout, lambda _, message: sent.append(message), LeaseConfig(),
        TransportConfig(name="shm", kind="shm"),
        WorkerMetrics(model="m", role="decode", worker="w"), prefill_draws=False,
    )  # fmt: skip
    return Inbound("d", context, cast("Any", SimpleNamespace(link=link)))


def request(book: PageBook, number: int) -> Req:
    tokens = list(range(PAGE_SIZE + 1))
    hold = book.open(tokens, len(tokens), max_matched=0)
    assert hold is not None
    return Req(str(number), 1, "r", tokens, len(tokens), Sampling(1), float("inf"), hold=hold)


def test_any_refusal_leads_to_the_next_candidate_and_then_to_no_kv() -> None:
    """Even one that blames the request: this worker may still prefill it by itself."""
    book, sent = PageBook(64, PAGE_SIZE), list[Any]()
    nothing: Any = None  # no pull begins
    inbound = inbound_of(book, sent, lambda peer: Link(peer, nothing, 0.0))
    req, now = request(book, 0), time.monotonic()
    assert inbound.start(req, [Candidate("prefill-0/p"), Candidate("prefill-1/q")], now)
    ended: list[Fetch] = []
    for code, prefill in (("invalid_value", "p"), ("busy", "q")):
        assert not ended
        xfer = [message.xfer for message in sent if isinstance(message, Prefill)][-1]
        assert xfer.prefill == prefill
        inbound.on_refused(PrefillRefused(xfer, Error(code, "")))
        ended = inbound.poll(now)
    assert [(each.req, each.landed, each.ending) for each in ended] == [(req, False, None)]
    assert inbound.num_fetches == 0


def test_the_wait_is_an_eighth_of_the_youngest_pull_s_age() -> None:
    book, sent = PageBook(64, PAGE_SIZE), list[Any]()
    states: list[PullState] = []

    def pull(*_: object) -> object:
        number = len(states)
        states.append(PullState.RUNNING)
        return SimpleNamespace(poll=lambda: states[number], num_bytes=1, error=None)

    link = Link(PEER, cast("Any", SimpleNamespace(pull=pull)), 0.0)
    inbound = inbound_of(book, sent, lambda _: link)
    began_at = time.monotonic()  # pulls that are too old are given up by the same clock

    def ready(number: int, at: float) -> None:
        assert inbound.start(request(book, number), [Candidate(PEER)], at)
        inbound.on_ready(KVReady(sent[-1].xfer, 0, (1 + number,), 0, 1, True))
        assert not inbound.poll(at)

    def after_s(seconds: float) -> float:
        return poll_after_s(inbound.pulls_began_at, began_at + seconds)

    assert after_s(0) == math.inf
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
    assert after_s(1) == math.inf
