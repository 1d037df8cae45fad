"""What a member gone bad may ask of a worker: it is told no, and nobody else notices.

Most of it was found by tests.fault.fuzz_wire. A worker whose engine thread raises ends its process,
so that here the whole test would end.
"""

import logging
import math
import queue
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TypeVar

import pytest
from msgspec.structs import replace

from tests.support.engines import Running, running
from tests.support.laws import sections
from tests.support.meeting import introduce
from tests.support.patience import HANG_S, until
from tests.support.prompts import problem_ids
from worker import api
from worker.api import Generate, Member, Prefill, Sampling, Xfer
from worker.config import PingConfig
from worker.keyring import Keyring
from worker.schedule.shares import Shares
from worker.wire import Event, Wire

Kind = TypeVar("Kind")
GREEDY = Sampling(max_tokens=8, temperature=0.0)
PROMPT = problem_ids(1)[0]
XFER = Xfer("x", 1, "bad", "i0")
FAIR = Prefill(XFER, PROMPT, 0, 0.0, GREEDY, len(PROMPT))


class Rogue:
    """A member with a wire of its own to every worker."""

    def __init__(self, cluster: Running) -> None:
        self.events: queue.SimpleQueue[Sequence[Event]] = queue.SimpleQueue()
        self._come = deque[object]()
        self._wire = Wire(
            "rogue/bad", PingConfig(), lambda events: self.events.put(events), keyring=Keyring()
        )
        self._wire.start()
        introduce(Member("rogue", "decode", "bad", "", wire_key=self._wire.key))
        for member in cluster.members:
            self._wire.connect(member.peer, member.address, member.wire_key)
        self.send, self.close = self._wire.send, self._wire.close

    def answer(self, kind: type[Kind]) -> Kind:
        """The next message of a kind."""
        while True:
            while self._come:
                if isinstance(message := self._come.popleft(), kind):
                    return message
            self._come += [message for _, message in self.events.get(timeout=HANG_S)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Running]:
    with running(sections()) as found:
        yield found


@pytest.fixture
def rogue(cluster: Running) -> Iterator[Rogue]:
    """Beside it a client's request has the text that it had before."""
    (before,) = cluster.answers([PROMPT], GREEDY)
    made = Rogue(cluster)
    yield made
    (after,) = cluster.answers([PROMPT], GREEDY)
    assert after.tokens == before.tokens
    made.close()
    cluster.wait_idle()


@pytest.mark.parametrize(
    "asked",
    [
        replace(FAIR, tokens=(*PROMPT, 2**31)),
        replace(FAIR, tokens=(*PROMPT, -1)),
        replace(FAIR, link_bytes_per_s=math.nan),
        replace(FAIR, num_prompt_tokens=2**40),
        replace(FAIR, num_prompt_tokens=0),
        replace(FAIR, sampling=replace(GREEDY, min_tokens=2**31 - 1)),
        replace(FAIR, sampling=replace(GREEDY, seed=2**63)),
        replace(FAIR, sampling=replace(GREEDY, temperature=math.inf)),
        replace(FAIR, sampling=replace(GREEDY, grammar="start: /a/")),
        replace(FAIR, sampling=replace(GREEDY, stop_ids=(5,) * 100)),
    ],
)
def test_a_prompt_that_no_device_can_compute_is_refused(rogue: Rogue, asked: Prefill) -> None:
    rogue.send("prefill-0/i0", asked)
    refused = rogue.answer(api.PrefillRefused)
    assert (refused.xfer, refused.error.code) == (XFER, "invalid_value")


def test_a_count_that_no_device_can_hold_is_refused(rogue: Rogue) -> None:
    endless = replace(GREEDY, min_tokens=2**31 - 1)
    rogue.send("decode-0/i0", Generate("r", 1, PROMPT, len(PROMPT), endless, 9.0))
    refused = rogue.answer(api.Refused)
    assert refused.error.code == "invalid_value"


def test_a_grammar_that_was_not_said_is_nobody_s(cluster: Running, rogue: Rogue) -> None:
    before = cluster.workers["decode-0"]._thread.refusals.num_messages
    asked = Generate("r", 1, PROMPT, len(PROMPT), GREEDY, 9.0)
    rogue.send("decode-0/i0", replace(asked, grammar_age=3))
    endless = replace(GREEDY, min_tokens=2**31 - 1)
    rogue.send("decode-0/i0", replace(asked, req_id="s", sampling=endless))
    assert rogue.answer(api.Refused).req_id == "s"
    assert cluster.workers["decode-0"]._thread.refusals.num_messages == before + 1


def test_a_claim_by_an_id_that_is_taken_finds_nothing(cluster: Running, rogue: Rogue) -> None:
    """Else two requests would have one id, and the end of the second would be the worker's."""
    long = replace(GREEDY, max_tokens=200, ignore_eos=True)
    for req_id in ("a", "b"):
        rogue.send(
            "decode-0/i0", Generate(req_id, 1, PROMPT, len(PROMPT), long, 99.0, key=f"key {req_id}")
        )
    requests = cluster.workers["decode-0"].loop.requests.reqs
    until(lambda: {("a", 1), ("b", 1)} <= set(requests))
    rogue.send("decode-0/i0", api.Claim("a", 1, "key b", 99.0))
    assert rogue.answer(api.Claimed) == api.Claimed("a", 1, found=False)
    for req_id in ("a", "b"):
        rogue.send("decode-0/i0", api.Abort(req_id, 1))
    until(lambda: not requests)


def test_what_is_another_s_stays_as_it_is(
    cluster: Running, rogue: Rogue, caplog: pytest.LogCaptureFixture
) -> None:
    """A router gone bad ends nobody else's request, and takes nobody's id."""
    long = replace(GREEDY, max_tokens=200, ignore_eos=True)
    (expected,) = cluster.answers([PROMPT], long)
    refusals = cluster.workers["decode-0"]._thread.refusals
    before = refusals.num_messages
    req_id = cluster.client.submit(PROMPT, long)
    requests = cluster.workers["decode-0"].loop.requests.reqs
    until(lambda: (req_id, 1) in requests, act=cluster.client.pump)
    with caplog.at_level(logging.WARNING, "kvlane.wire"):
        for _ in range(3):
            rogue.send("decode-0/i0", api.Stop(req_id, 1, len(PROMPT)))
            rogue.send("decode-0/i0", api.Abort(req_id, 1))
        rogue.send("decode-0/i0", Generate(req_id, 1, PROMPT, len(PROMPT), long, 9.0))
        refused = rogue.answer(api.Refused)
        assert refused.error.code == "busy"
        (after,) = cluster.client.wait([req_id])
    assert after.tokens == expected.tokens
    assert refusals.num_messages - before == 7
    told = [each.getMessage() for each in caplog.records if "rogue/bad" in each.getMessage()]
    assert told == [
        f"rogue/bad has sent a {kind} for what is another's"
        for kind in ("Stop", "Abort", "Generate")
    ]


def test_a_router_gone_bad_leaves_room_for_another(cluster: Running, rogue: Rogue) -> None:
    """It asks for more than there is, and what it gets outlasts what the other asks for."""
    worker, long = cluster.workers["decode-0"], replace(GREEDY, max_tokens=200, ignore_eos=True)
    admission, reqs = worker.loop.requests.admission, worker.loop.requests.reqs
    assert "client/1" in admission.shares.members
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Shares, "update", lambda *_: None)  # a list without it may be on its way
        patch.setattr(admission.shares, "members", frozenset({"client/1", "rogue/bad"}))
        patch.setattr(admission, "max_reqs", 32)
        for i in range(80):
            asked = Generate(f"r{i}", 1, PROMPT, len(PROMPT), long, 99.0)
            rogue.send("decode-0/i0", asked)
        refused = rogue.answer(api.Refused)
        assert refused.error.code == "busy"
        (mine,) = cluster.client.generate([PROMPT], GREEDY)
        assert mine.error is None
        for i in range(80):
            rogue.send("decode-0/i0", api.Abort(f"r{i}", 1))
        until(lambda: not reqs)
    assert cluster.client.num_refused == 0


def test_requests_that_wait_for_others_are_bounded(cluster: Running, rogue: Rogue) -> None:
    """Further choices wait for the first one's prompt, and hold no pages that would run out."""
    requests = cluster.workers["decode-0"].loop.requests
    long = replace(GREEDY, max_tokens=200, ignore_eos=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(requests.admission, "max_reqs", 3)
        patch.setattr(requests.deferred, "_waits", lambda _, message: bool(message.after))
        for number in range(5):
            rogue.send(
                "decode-0/i0", Generate(f"s{number}", 1, PROMPT, len(PROMPT), long, 99.0, after="s")
            )
        for number in (3, 4):
            refused = rogue.answer(api.Refused)
            assert (refused.req_id, refused.error.code) == (f"s{number}", "busy")
        assert requests.deferred.num("sibling") == 3
        for number in range(3):
            rogue.send("decode-0/i0", api.Abort(f"s{number}", 1))
        until(lambda: not requests.deferred.waiting)
