"""Announcements that decode may not believe: of others, forged, or of what cannot be.

Decode's side of the pull protocol alone; the test is every prefill worker, and pulls end at once.
"""

import math
import time
from typing import Any

import msgspec
import pytest

from tests.support.pulls import PAGE_SIZE, VOCAB, DecodeSide
from worker.api import Error, KVReady, PrefillRefused, Sampling
from worker.transfer.fetch import Fetch
from worker.transfer.seal import sealed

TOKEN = 700
PEERS = ("prefill-0/p", "prefill-1/q", "prefill-2/r")
PLAIN = Sampling(9, temperature=0.7, top_k=4, stop_ids=(3,), min_tokens=2)
GROUPS = 2


class Decode(DecodeSide):
    """One request that is fetched."""

    def __init__(self, num_tokens: int = 40, span: int = 0) -> None:
        super().__init__(GROUPS, draws=True, span=span)
        self.req = self.request(num_tokens, PLAIN)
        self.start(self.req, PEERS)

    def tell(self, first: int, num_pages: int, groups: range = range(GROUPS), **more: Any) -> bool:
        """An announcement of the present attempt; whether it brought the request its token."""
        pages = tuple(range(1 + first, 1 + first + num_pages))
        rest: dict[str, Any] = {"last": False} | more
        message = KVReady(self.asked.xfer, first, pages, groups.start, len(groups), **rest)
        return self.hears(message) is self.req

    def poll(self) -> list[Fetch]:
        return self.inbound.poll(time.monotonic())

    def landed(self) -> Fetch:
        (fetch,) = self.poll()
        assert fetch.landed
        return fetch


@pytest.mark.parametrize("landed", [0, 1])
def test_pages_that_nobody_will_read_are_not_pulled(landed: int) -> None:
    """The first attempt fails after some pages; so does the second, or all are here."""
    first = 8  # ten are whole: 160 tokens, and behind them 33 are read
    decode = Decode(165, span=2 * PAGE_SIZE + 1)
    book, hold = decode.book, decode.req.hold
    before = book.num_available
    assert decode.asked.num_matched == first * PAGE_SIZE
    for attempt in range(2):
        decode.tell(first + attempt * landed, landed)
        decode.poll()
        decode.inbound.on_refused(decode.peer, PrefillRefused(decode.asked.xfer, Error("", "")))
        decode.poll()
        assert decode.asked.num_matched == (first + (attempt + 1) * landed) * PAGE_SIZE
    decode.tell(0, 11, last=landed > 0, token=TOKEN if landed else None)
    if landed:
        decode.landed()
        assert decode.req.num_computed_tokens == 165
        assert (hold.num_trimmed, len(hold.private)) == (first, 11 - first)
        return
    decode.inbound.on_refused(decode.peer, PrefillRefused(decode.asked.xfer, Error("", "")))
    (fetch,) = decode.poll()
    assert not fetch.landed
    assert (decode.req.num_computed_tokens, hold.pages) == (0, []), "all is to be computed here"
    assert book.num_available == before
    book.bind(hold, 166)


def test_an_attempt_that_fails_later_leaves_the_token() -> None:
    """The next worker makes its KV's beginning, and draws nothing: the hold has no more pages."""
    decode = Decode()
    first = decode.asked.xfer
    assert decode.hears(KVReady(first, 0, (), 0, GROUPS, True, token=TOKEN)) is decode.req
    decode.inbound.on_lost(PEERS[0])
    assert not decode.poll()
    again = decode.asked
    assert (again.xfer.attempt, again.tokens) == (2, (*range(40), TOKEN))
    assert again.sampling is None
    assert decode.hears(KVReady(again.xfer, 0, (1, 2, 3), 0, GROUPS, True, token=6)) is None
    assert decode.req.tokens == [*range(40), TOKEN]
    decode.landed()


def test_only_who_was_asked_may_answer() -> None:
    decode = Decode()
    xfer = decode.asked.xfer
    ready = KVReady(xfer, 0, (1, 2, 3), 0, GROUPS, True, token=5)
    assert decode.hears(ready, PEERS[1]) is None
    decode.inbound.on_refused(PEERS[1], PrefillRefused(xfer, Error("busy", "")))
    assert not decode.poll()
    assert (decode.asked.xfer, decode.source.pulled) == (xfer, [])
    assert decode.refusals.num_messages == 2
    assert decode.hears(ready) is decode.req
    decode.landed()


@pytest.mark.parametrize(
    "how",
    [
        {"first_group": -1},
        {"num_groups": GROUPS + 1},
        {"num_groups": 2**40},
        {"num_groups": -1},
        {"token": VOCAB},
        {"token": -1},
        {"prefill_s": math.nan},
        {"num_cached_tokens": 2**40},
        {"state_slot": 1},
    ],
    ids=repr,
)
def test_an_announcement_that_cannot_be_ends_the_attempt(how: dict[str, Any]) -> None:
    """Its worker has gone bad; what it says must not raise here, and the next one is asked."""
    decode = Decode()
    ready = KVReady(decode.asked.xfer, 0, (1, 2, 3), 0, GROUPS, True)
    bad = msgspec.structs.replace(ready, **how)
    assert decode.hears(bad) is None
    decode.poll()
    assert decode.peer == PEERS[1]
    assert decode.req.tokens == [*range(40)]
    assert not decode.source.pulled
    assert decode.refusals.num_messages == 1


FORGED: dict[str, Any] = {
    "first_page": 1, "pages": (4, 5, 6), "first_group": 1, "num_groups": 1, "last": False,
    "num_cached_tokens": 16, "prefill_s": 0.5, "token": 6, "state_slot": 1, "seal": bytes(16),
}  # fmt: skip


@pytest.mark.parametrize("field", [*FORGED, "key", "no seal"])
def test_an_announcement_that_is_not_of_who_was_asked_is_dropped(field: str) -> None:
    """The attempt goes on: who was asked says it again."""
    assert {*FORGED, "xfer"} == set(KVReady.__struct_fields__)
    decode = Decode()
    ready = KVReady(decode.asked.xfer, 0, (1, 2, 3), 0, GROUPS, True, token=TOKEN)
    true = sealed(ready, decode.asked.key)
    forged = {"key": sealed(ready, bytes(32)), "no seal": ready}.get(field)
    if forged is None:
        forged = msgspec.structs.replace(true, **{field: FORGED[field]})
    assert decode.inbound.on_ready(decode.peer, forged) is None
    assert not decode.poll()
    assert (decode.peer, decode.source.pulled) == (PEERS[0], [])
    assert decode.refusals.num_messages == 1
    assert decode.inbound.on_ready(decode.peer, true) is decode.req
    decode.landed()


def test_a_seal_is_of_one_attempt() -> None:
    """Its key is new, and its transfer is in the seal."""
    decode = Decode()
    first = decode.asked
    decode.inbound.on_lost(PEERS[0])
    decode.poll()
    again = decode.asked
    assert again.key != first.key
    ready = KVReady(first.xfer, 0, (1, 2, 3), 0, GROUPS, True)
    seal = sealed(ready, again.key).seal
    late = KVReady(again.xfer, 0, (1, 2, 3), 0, GROUPS, True, seal=seal)
    assert decode.inbound.on_ready(decode.peer, late) is None
    assert decode.refusals.num_messages == 1
