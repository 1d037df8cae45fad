"""Requests that clients ask for again: what another router, or a connection before, has begun.

A client that sends an idempotency key may have asked before. All decode workers are asked for the
request of that key before it is computed: who has it sends all its tokens again, and goes on.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from router.dispatch.policy import Fleet
from router.dispatch.queue import Req
from worker.api import Abort, Claim, Claimed, PeerId

log = logging.getLogger("kvlane.router")

CLAIM_S = 3.0  # for a worker's answer; its pings find one that hangs in about that time


def give_keys(reqs: Sequence[Req], client: str, given: str, raw: bytes, *, seeded: bool) -> None:
    """Give the choices of a request what only the same request has: client, key, body, prompt.

    The prompt counts beside the body, since a template may write today's date. Without a seed of
    its own a request gets one of its key, so that it has the same answer where none is found.
    """
    about = _digest(repr((client, given)).encode() + raw)
    for req in reqs:
        key = _digest(about + repr((req.index, req.prompt)).encode())
        req.key = key.hex()
        if not seeded:
            req.sampling = replace(req.sampling, seed=int.from_bytes(key[:8], "big") >> 1)


def _digest(parts: bytes) -> bytes:
    return hashlib.blake2b(parts, digest_size=16).digest()


@dataclass(slots=True)
class _Asked:
    """A request for which workers are asked."""

    req: Req
    peers: set[PeerId]  # who has not answered
    timer: asyncio.TimerHandle


class Claims:
    """Asks decode workers for requests; those that nobody has go to `new`.

    found: called with a request and the worker that has it.
    """

    def __init__(
        self, fleet: Fleet, new: Callable[[Req], None], found: Callable[[Req, PeerId], None]
    ) -> None:
        self._wire, self._members = fleet.wire, fleet.members
        self._new, self._found = new, found
        self._asked: dict[str, _Asked] = {}  # by req_id

    def ask(self, req: Req, timeout_s: float) -> None:
        """Ask for a request that was submitted now."""
        peers = {known.peer for known in self._members.live("decode")}
        if not peers:
            self._new(req)
            return
        req.dispatch = 1
        timer = asyncio.get_running_loop().call_later(CLAIM_S, self._over, req.req_id)
        self._asked[req.req_id] = _Asked(req, peers, timer)
        for peer in peers:
            self._wire.send(peer, Claim(req.req_id, req.dispatch, req.key, timeout_s))

    def answered(self, peer: PeerId, message: Claimed) -> None:
        """A worker has said whether it has a request."""
        asked = self._asked.get(message.req_id)
        if asked is not None and peer not in asked.peers:
            self._wire.refusals.foreign(peer, message)
            asked = None
        if asked is None and message.found:  # another one was faster, or this one too slow
            self._wire.send(peer, Abort(message.req_id, message.dispatch, keep=True))
        elif asked is not None and message.found:
            self.forget(asked.req)
            log.info("req_id=%s goes on at %s", asked.req.req_id, peer)
            self._found(asked.req, peer)
        elif asked is not None:
            self._without(asked, peer)

    def lost(self, peer: PeerId) -> None:
        """A worker will not answer."""
        for asked in list(self._asked.values()):
            self._without(asked, peer)

    def forget(self, req: Req) -> None:
        """It has ended, or was found."""
        if (asked := self._asked.pop(req.req_id, None)) is not None:
            asked.timer.cancel()

    def _without(self, asked: _Asked, peer: PeerId) -> None:
        asked.peers.discard(peer)
        if not asked.peers:
            self._over(asked.req.req_id)

    def _over(self, req_id: str) -> None:
        asked = self._asked.pop(req_id)
        asked.timer.cancel()
        self._new(asked.req)
