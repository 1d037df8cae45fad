"""How soon decode looks again at pulls that run: soon after they began, then by their age."""

import math
import time

import pytest

from tests.support.pulls import OK, PAGE_SIZE, RUNNING, DecodeSide, ScriptedSource
from worker.api import Error, KVReady, PrefillRefused
from worker.transfer.fetch import Fetch
from worker.transfer.inbound import LONGEST_POLL_S, YOUNG_S, poll_after_s

PEERS = "prefill-0/p", "prefill-1/q"


def test_any_refusal_leads_to_the_next_candidate_and_then_to_no_kv() -> None:
    """Even one that blames the request: this worker may still prefill it by itself."""
    decode = DecodeSide()
    req, now = decode.request(PAGE_SIZE + 1), time.monotonic()
    decode.start(req, PEERS, now)
    ended: list[Fetch] = []
    for code, prefill in (("invalid_value", "p"), ("busy", "q")):
        assert not ended
        assert decode.asked.xfer.prefill == prefill
        decode.inbound.on_refused(PrefillRefused(decode.asked.xfer, Error(code, "")))
        ended = decode.inbound.poll(now)
    assert [(fetch.req, fetch.landed, fetch.ending) for fetch in ended] == [(req, False, None)]
    assert not decode.inbound.fetches
    assert not decode.source.pulls


def test_the_wait_is_an_eighth_of_the_youngest_pull_s_age() -> None:
    decode = DecodeSide(source=ScriptedSource(RUNNING))
    began_at = time.monotonic()  # pulls that are too old are given up by the same clock

    def ready(number: int, at: float) -> None:
        decode.start(decode.request(PAGE_SIZE + 1, number=number), PEERS, at)
        decode.inbound.on_ready(KVReady(decode.asked.xfer, 0, (1 + number,), 0, 1, True))
        assert not decode.inbound.poll(at)

    def after_s(seconds: float) -> float:
        return poll_after_s(decode.inbound.pulls_began_at, began_at + seconds)

    def lands(number: int) -> None:
        decode.source.pulls[number].state = OK
        assert [fetch.landed for fetch in decode.inbound.poll(began_at + 1)] == [True]

    assert after_s(0) == math.inf
    ready(0, began_at)
    assert after_s(0) == after_s(0.9 * YOUNG_S) == 0
    assert after_s(0.002) == pytest.approx(0.00025)
    assert after_s(1) == LONGEST_POLL_S
    ready(1, began_at + 1)
    assert after_s(1) == 0
    lands(1)
    assert after_s(1) == LONGEST_POLL_S  # the first one still runs
    lands(0)
    assert after_s(1) == math.inf
