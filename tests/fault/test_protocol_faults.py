"""Messages between decode and prefill lost, doubled, late or overtaken; loops stopped; links cut.

Workers and a client in this process, real sockets, short leases. The laws: every request ends
once, its text is the undisturbed one, all counters are back at zero within lease and sweep, and
bytes that were read after prefill gave their pages away are never used.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest

import worker.loop
from tests.support.books import check_book
from tests.support.engines import Running, running, value
from tests.support.laws import sections
from tests.support.pairwise import in_whole, more
from tests.support.patience import until
from tests.support.prompts import problem_ids
from tests.support.pulls import RUNNING, WrappedPull
from worker import api
from worker.api import Sampling
from worker.cache.book import Hold
from worker.config import PingConfig
from worker.observe.metrics import RETRY_CAUSES
from worker.prefill import PrefillLoop
from worker.transfer.base import PullState, Run
from worker.transfer.mooncake import MooncakePeer, MooncakePull
from worker.transfer.shm import ShmPeer, ShmPull
from worker.wire import Wire
from worker.worker import Worker

GREEDY = Sampling(max_tokens=16, temperature=0.0)  # the prefill worker draws its first token
LOGGED = Sampling(max_tokens=16, temperature=0.0, logprobs=0)  # decode draws it
NUM = 6
TERM_S = 2.0  # of prefill's leases
LEASE = {"decode_window_s": 1.5, "prefill_window_s": TERM_S, "renew_s": 0.3, "final_resend_s": 0.3}
NUM_TRIES = 5
Texts = list[list[int]]


class Faults:
    """What happens to messages and pulls of workers in this process; reset after every test."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.turns = threading.Event()  # prefill loops stop before a turn, messages in hand, if not
        self.turns.set()
        self.reset()

    def reset(self) -> None:
        self.pull_s = 0.0  # that a pull takes
        self.hold = False  # while true no pull ends, however slow the machine
        self.kind: type | None = None
        self.act: Callable[[Callable[[], None]], None] = lambda send: send()
        self.every = 1
        self.num_seen = 0
        self.num_hit = 0
        self.held: list[Callable[[], None]] = []

    def inflict(self, kind: type, act: str, *, every: int = 1) -> None:
        """Do `act` to every n-th message of `kind`."""
        self.kind, self.every = kind, every
        self.act = {
            "lost": lambda send: None,
            "doubled": lambda send: (send(), self._later(send, 0.4)),
            "late": lambda send: self._later(send, 0.4),
            "overtaken": lambda send: self.held.append(send),
        }[act]  # type: ignore[assignment]

    def pass_on(self, message: api.AnyMessage, send: Callable[[], None]) -> None:
        with self._lock:
            held, self.held = self.held, []
            if self.kind is not None and isinstance(message, self.kind):
                self.num_seen += 1
                if self.num_seen % self.every == 0:
                    self.num_hit += 1
                    self.act(send)
                    send = lambda: None  # noqa: E731
            send()
            for each in held:
                each()

    def _later(self, send: Callable[[], None], after_s: float) -> None:
        timer = threading.Timer(after_s, send)
        timer.daemon = True
        timer.start()


FAULTS = Faults()


class FaultyWire(Wire):
    """The wire of a worker, with FAULTS on its way out."""

    def send(self, peer: api.PeerId, message: api.AnyMessage) -> None:
        inner = super().send
        FAULTS.pass_on(message, lambda: inner(peer, message))


class SlowPull(WrappedPull):
    """Asks for nothing before `delay_s` has passed, then all at once: the latest possible read.

    What mooncake has begun at once ends at once, and is told of later.
    """

    def __init__(self, inner: ShmPull | MooncakePull, delay_s: float) -> None:
        super().__init__(inner)
        self._own = inner
        self._ready_at = time.monotonic() + delay_s

    def poll(self) -> PullState:
        waits = FAULTS.hold or time.monotonic() < self._ready_at
        if waits and self._own.state is RUNNING:
            return RUNNING
        while super().poll() is RUNNING:
            pass
        return super().poll()

    def cancel(self) -> None:
        """What is under way is not stopped by it, as with a network card."""


@pytest.fixture(scope="module")
def patched() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker.loop, "Wire", FaultyWire)
        for peer in (ShmPeer, MooncakePeer):

            def slow(self: Any, runs: Sequence[Run], pull: Any = peer.pull) -> SlowPull:
                return SlowPull(pull(self, runs), FAULTS.pull_s)

            patch.setattr(peer, "pull", slow)
        turn = PrefillLoop.turn

        def gated(self: PrefillLoop, events: list) -> float:
            FAULTS.turns.wait()
            return turn(self, events)

        patch.setattr(PrefillLoop, "turn", gated)
        yield


def spoil_what_is_given_away(prefill: Worker) -> None:
    """Overwrite pages as soon as nobody holds them: whoever still reads them reads nonsense."""
    book, pool = prefill.engine.book, prefill.engine.pool
    close = book.close

    def spoil(hold: Hold) -> None:
        for page in hold.private:
            for layer in range(pool.region().num_layers):
                for side in pool.layer(layer):
                    side[page].fill_(1e4)
        close(hold)

    book.close = spoil  # type: ignore[method-assign]


@contextmanager
def faulty(transport: str, num_decode: int) -> Iterator[Running]:
    """Workers with short leases, of which what prefill gives away is spoilt at once."""
    config = sections("always", max_prefill_tokens=40, prefix_cache=False) | {
        "lease": LEASE, "transport": {"name": transport},
    }  # fmt: skip
    with running(config, num_prefill=2, num_decode=num_decode) as made:
        for name, each in made.workers.items():
            if name.startswith("prefill"):
                spoil_what_is_given_away(each)
        yield made


@pytest.fixture(scope="module", params=["shm", *more("mooncake")])
def cluster(patched: None, request: pytest.FixtureRequest) -> Iterator[Running]:
    with faulty(request.param, num_decode=1) as made:
        yield made


@pytest.fixture(scope="module")
def texts(cluster: Running) -> Texts:
    """Undisturbed, prefilled by decode itself."""
    return [a.tokens for a in cluster.client.generate(problem_ids(NUM), GREEDY, prefills=[])]


@pytest.fixture(autouse=True)
def undisturbed() -> Iterator[None]:
    yield
    FAULTS.reset()


def lose(side: Any, peer: api.PeerId) -> None:
    """`side` finds `peer` silent, which is alive and knows nothing of it."""
    wire = side._wire if hasattr(side, "_wire") else side._thread._wire
    wire.lose(peer, "a test")


def wait_for_peers(decode: Worker) -> None:
    """Until both prefill workers can be pulled from."""
    until(lambda: decode.loop.peers.num_connected == 2, "the prefill worker stays forgotten")


def num_ended(
    cluster: Running, reasons: Sequence[str] = ("stop", "length", "abort", "error")
) -> float:
    family = cluster.workers["decode-0"].engine.metrics.requests
    return sum(value(family(reason)) for reason in reasons)


def num_retries(decode: Worker) -> float:
    family = decode.engine.metrics.fetch_retries
    return sum(value(family(cause)) for cause in RETRY_CAUSES)


def ask(
    cluster: Running, samplings: Sequence[Sampling] = (GREEDY, LOGGED, LOGGED, GREEDY)
) -> list[str]:
    """With two prefill workers, each gets some of both."""
    return [
        cluster.client.submit(prompt, samplings[number % len(samplings)])
        for number, prompt in enumerate(problem_ids(NUM))
    ]


def check(cluster: Running, sent: list[str], texts: Texts, before: float) -> None:
    """The laws."""
    answers = cluster.client.wait(sent)
    assert [answer.error for answer in answers] == [None] * len(sent)
    assert [answer.tokens for answer in answers] == texts
    cluster.wait_idle()
    assert num_ended(cluster) - before == len(sent)
    for each in cluster.workers.values():
        check_book(each.engine.book, [])


KINDS = api.Prefill, api.KVReady, api.Release, api.Renew, api.RenewAck
ACTS = "lost", "doubled", "late", "overtaken"
SHORT = [*zip(KINDS, ACTS * 2, strict=False), *((kind, "lost") for kind in KINDS[1:4])]


@pytest.mark.parametrize(
    ("kind", "act"),
    [*SHORT, *in_whole(*(each for each in product(KINDS, ACTS) if each not in SHORT))],
)
def test_messages(kind: type, act: str, cluster: Running, texts: Texts) -> None:
    if kind in (api.Renew, api.RenewAck):
        FAULTS.pull_s = 0.8
    FAULTS.inflict(kind, act, every=2)
    before = num_ended(cluster)
    check(cluster, ask(cluster), texts, before)
    assert FAULTS.num_hit > 0


def test_prefill_loops_that_stop_for_longer_than_a_lease(cluster: Running, texts: Texts) -> None:
    before = num_ended(cluster)
    FAULTS.pull_s = 0.5
    sent = ask(cluster)
    time.sleep(0.3)  # some are announced, some are not
    FAULTS.turns.clear()
    time.sleep(TERM_S + 1.0)
    FAULTS.turns.set()
    check(cluster, sent, texts, before)


def test_bytes_read_after_the_lease_are_never_used(cluster: Running, texts: Texts) -> None:
    """Decode goes on renewing, nobody acknowledges, prefill gives away and the pull still ends."""
    before = num_ended(cluster)
    FAULTS.pull_s = TERM_S + 0.5
    FAULTS.inflict(api.Renew, "lost")
    check(cluster, ask(cluster), texts, before)
    assert FAULTS.num_hit > 0


def test_pulls_that_outlive_many_renewals_land(cluster: Running, texts: Texts) -> None:
    """Unless the machine stands still for longer than a lease, so it has several tries."""
    FAULTS.pull_s = 2 * TERM_S
    revoked = cluster.workers["decode-0"].engine.metrics.fetch_retries("revoked")
    for _ in range(NUM_TRIES):
        before, num_revoked = num_ended(cluster), value(revoked)
        check(cluster, ask(cluster), texts, before)
        if value(revoked) == num_revoked:
            return
    pytest.fail(f"leases were revoked in each of {NUM_TRIES} tries")


@pytest.mark.parametrize("when_s", [0.02, *more(0.0, 0.3)])
def test_a_prefill_worker_that_is_lost_is_asked_again_later(when_s, cluster, texts) -> None:
    before = num_ended(cluster)
    FAULTS.pull_s = 0.2
    decode = cluster.workers["decode-0"]
    sent = ask(cluster)
    time.sleep(when_s)
    lose(decode, "prefill-0/i0")
    check(cluster, sent, texts, before)
    wait_for_peers(decode)


@pytest.mark.parametrize("loser", ["decode-0", "client"])
def test_a_link_that_router_or_decode_lost_ends_its_requests_on_both_sides(
    loser: str, cluster: Running, texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, decode = cluster.client, cluster.workers["decode-0"]
    monkeypatch.setattr(client._wire._links, "_ping", PingConfig())
    decode_peer = client.decodes[0]
    FAULTS.pull_s = 0.5
    sent = ask(cluster)
    time.sleep(0.2)
    if loser == "client":
        lose(client, decode_peer)
    else:
        lose(decode, "client/1")
    assert {each.error.code for each in client.wait(sent)} == {"worker_lost"}
    member = next(each for each in cluster.members if each.peer == decode_peer)
    client._wire.connect(decode_peer, member.address, member.wire_key)
    cluster.wait_idle()
    before = num_ended(cluster)
    check(cluster, ask(cluster), texts, before)


def test_aborts_while_pulls_run_give_pages_back_only_after_them(cluster, texts) -> None:
    FAULTS.hold = True
    sent, decode = ask(cluster), cluster.workers["decode-0"]
    until(lambda: decode.counters()["pulls"] > 0, "no pull begins")
    for each in sent:
        cluster.client.abort(each)
    time.sleep(0.1)
    assert decode.counters()["private_pages"] > 0
    FAULTS.hold = False
    cluster.wait_idle()
    check(cluster, ask(cluster), texts, num_ended(cluster))


def until_first_tokens(cluster: Running, sent: list[str]) -> None:
    """Everybody has one, and nobody's KV has landed."""
    client = cluster.client
    until(
        lambda: all(client.answers[each].tokens for each in sent),
        "a first token waits for KV",
        lambda: client.pump(0.01),
    )
    assert cluster.workers["decode-0"].counters()["fetches"] == len(sent)
    assert {len(client.answers[each].tokens) for each in sent} == {1}


@pytest.mark.parametrize("lost", [["prefill-0", "prefill-1"], *more(["prefill-0"])])
def test_a_prefill_worker_that_is_lost_between_token_and_kv(lost, cluster, texts) -> None:
    """The token that was passed on stays, and comes once: the rest goes on from it."""
    before = num_ended(cluster)
    decode = cluster.workers["decode-0"]
    computed = [each.engine.metrics.prompt_tokens for each in cluster.workers.values()]
    num_computed = sum(value(each) for each in computed)
    retries = num_retries(decode)
    FAULTS.hold = True
    sent = ask(cluster, [GREEDY])
    until_first_tokens(cluster, sent)
    for name in lost:
        lose(decode, next(peer for peer in cluster.client.prefills if peer.startswith(name)))
    until(lambda: num_retries(decode) - retries >= NUM // 2 * len(lost), "nobody notices")
    FAULTS.hold = False
    check(cluster, sent, texts, before)
    num_computed = sum(value(each) for each in computed) - num_computed
    assert num_computed > 1.3 * sum(len(prompt) for prompt in problem_ids(NUM)), "nothing was lost"
    wait_for_peers(decode)


@pytest.mark.parametrize("how", ["stop", *more("abort")])
def test_requests_that_end_between_token_and_kv(how: str, cluster: Running, texts: Texts) -> None:
    """The client goes, or the router finds a stop string in the first token."""
    reasons = (how,)
    before = num_ended(cluster, reasons)
    FAULTS.hold = True
    sent, client = ask(cluster, [GREEDY]), cluster.client
    until_first_tokens(cluster, sent)
    for each, prompt in zip(sent, problem_ids(NUM), strict=True):
        if how == "abort":
            client.abort(each)
        else:
            client._wire.send(client.decodes[0], api.Stop(each, 1, len(prompt)))
    time.sleep(0.1)
    assert cluster.workers["decode-0"].counters()["private_pages"] > 0, "pulls still write there"
    FAULTS.hold = False
    cluster.wait_idle()
    assert num_ended(cluster, reasons) - before == NUM
    assert {client.answers[each].num_finals for each in sent} == {0}
    before = num_ended(cluster)
    check(cluster, ask(cluster), texts, before)


def test_a_prefill_worker_without_room_refuses_and_nothing_is_lost(cluster, texts, monkeypatch):
    for name in ("prefill-0", "prefill-1"):
        monkeypatch.setattr(cluster.workers[name].loop._outbound, "draining", True)
    for act in ("lost", "doubled", "late"):
        FAULTS.reset()
        FAULTS.inflict(api.PrefillRefused, act, every=2)
        before = num_ended(cluster)
        check(cluster, ask(cluster), texts, before)
        assert FAULTS.num_hit > 0
