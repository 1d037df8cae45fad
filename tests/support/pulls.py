"""Doubles for pulls, and decode's side of the pull protocol without prefill workers."""

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

from tests.support.patience import until
from worker.api import Candidate, KVReady, PeerId, Prefill, Sampling
from worker.cache.book import PageBook
from worker.cache.layout import KVLayout, KVRegion
from worker.config import LeaseConfig, TransportConfig
from worker.keyring import Refusals
from worker.observe.metrics import WorkerMetrics
from worker.schedule.req import Req
from worker.transfer.base import Peer, Pull, PullState, Run
from worker.transfer.fetch import FetchContext
from worker.transfer.inbound import Inbound
from worker.transfer.layout import Pages
from worker.transfer.seal import sealed
from worker.transfer.sources import Link

PAGE_SIZE = 16
VOCAB = 1024
OK, FAILED, RUNNING = PullState.OK, PullState.FAILED, PullState.RUNNING


def ended(pull: Pull) -> PullState:
    """Polls until the pull is over."""
    until(lambda: pull.poll() is not RUNNING, "the pull hangs", lambda: time.sleep(0.0002))
    state = pull.poll()
    assert (pull.error is None) == (state is OK)
    return state


class ScriptedPull:
    """A pull whose states the test chooses."""

    def __init__(self, num_bytes: int = 1, state: PullState = RUNNING) -> None:
        self.num_bytes, self.state = num_bytes, state
        self.error: str | None = None
        self.num_cancels = 0

    def poll(self) -> PullState:
        return self.state

    def cancel(self) -> None:
        self.num_cancels += 1

    def fail(self, error: str) -> None:
        self.state, self.error = FAILED, error


class WrappedPull:
    """A pull as it is; tests override what they disturb."""

    def __init__(self, pull: Pull) -> None:
        self.inner, self.num_bytes, self.error = pull, pull.num_bytes, pull.error

    def poll(self) -> PullState:
        state = self.inner.poll()
        self.error = self.inner.error
        return state

    def cancel(self) -> None:
        self.inner.cancel()


class WrappedPeer:
    def __init__(self, peer: Peer, wrap: Callable[[Pull], Pull]) -> None:
        self._peer, self._wrap, self.transport = peer, wrap, peer.transport

    def pull(self, runs: Sequence[Run]) -> Pull:
        return self._wrap(self._peer.pull(runs))

    def close(self) -> None:
        self._peer.close()


class ScriptedSource:
    """A prefill worker as pages are pulled from it: every pull begins in `state`."""

    def __init__(self, state: PullState = OK) -> None:
        self.state, self.transport = state, "shm/shm"
        self.pulls: list[ScriptedPull] = []
        self.pulled: list[tuple[int, int, int]] = []  # (local page, remote page, layer group)
        self.states: list[tuple[int, int]] = []  # (local slot, remote slot)

    def pull(self, pairs: Pages, groups: range, states: Pages = ()) -> ScriptedPull:
        self.pulled += [(*pair, group) for pair in pairs for group in groups]
        self.states += states
        self.pulls.append(ScriptedPull(state=self.state))
        return self.pulls[-1]

    def close(self) -> None:
        pass


class DecodeSide:
    """All fetches of a decode worker; every prefill worker is the test, and `source` its pages."""

    def __init__(
        self,
        num_groups: int = 1,
        source: ScriptedSource | None = None,
        *,
        draws: bool = False,
        num_slots: int = 0,
        span: int = 0,
    ) -> None:
        self.sent: list[Any] = []
        self.peer: PeerId = ""  # who was asked last
        self.refusals = Refusals()
        self.source = source or ScriptedSource()
        self.book = PageBook(64, PAGE_SIZE, num_slots=num_slots, span=span)
        layout = KVLayout((KVRegion("target", 12, 2, 8, num_groups, PAGE_SIZE, "float32"),))
        self.context = FetchContext(
            self.book, layout, self._send, LeaseConfig(),
            TransportConfig(name="shm", kind="shm"),
            WorkerMetrics(model="m", role="decode", worker="w"), self.refusals, vocab_size=VOCAB,
            prefill_draws=draws,
        )  # fmt: skip
        self.inbound = Inbound("d", self.context, cast("Any", SimpleNamespace(link=self.link)))

    def _send(self, peer: PeerId, message: Any) -> None:
        self.peer = peer
        self.sent.append(message)

    def link(self, peer: str) -> Link:
        return Link(peer, self.source, 0.0)

    def request(self, num_tokens: int, sampling: Sampling | None = None, number: int = 0) -> Req:
        """An admitted request, no page of which is matched."""
        tokens = list(range(num_tokens))
        hold = self.book.open(tokens, num_tokens + 1, max_matched=0)
        assert hold is not None
        asked = sampling or Sampling(1)
        return Req(str(number), 1, "r", tokens, num_tokens, asked, float("inf"), hold=hold)

    def start(self, req: Req, peers: Sequence[str], now: float | None = None) -> None:
        now = time.monotonic() if now is None else now
        assert self.inbound.start(req, [Candidate(peer) for peer in peers], now)

    def hears(self, message: KVReady, peer: PeerId = "") -> Req | None:
        """An announcement, with the seal of who was asked last."""
        return self.inbound.on_ready(peer or self.peer, sealed(message, self.asked.key))

    @property
    def asked(self) -> Prefill:
        """What the last attempt has asked for."""
        return [message for message in self.sent if isinstance(message, Prefill)][-1]
