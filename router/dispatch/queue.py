"""Requests on their way to a decode worker: the queue, and who is sent next.

Whose turn it is, `Turns` knows. A worker that has refused a request gets none for a pause
(`Members.refused`). While no worker is open the whole queue waits: until a worker reports room, one
of this router's requests leaves it, a new worker comes, or the pause is over.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from router.dispatch.mailbox import Mailbox
from router.dispatch.members import WORKERS, Known, Proposed
from router.dispatch.policy import Fleet, Route
from router.dispatch.sessions import Sessions, Where
from router.dispatch.suspect import Suspect
from router.dispatch.turns import OUTPUT_WEIGHT, Turns
from router.observe.stages import StageTimes, stage_times
from router.text.output import OutputText
from worker.api import (
    Abort,
    ForgetPrefixes,
    Generate,
    PeerId,
    Sampling,
    Stages,
    TokenLogprob,
    Window,
)
from worker.config.said import LastSaid

if TYPE_CHECKING:
    from worker.observe.spans import Trace

log = logging.getLogger("kvlane.router")

MAX_JITTER = 0.5  # of retry_after_s
SURE = 0.5  # of the queue timeout: another client that comes may halve the turns of this one
TOKEN_BYTES = 4  # in a message
PLACE_S = 0.005  # of a turn of the loop; a prompt of 128k tokens takes 10 ms
ROOM_S = 0.01  # until a link is looked at again that had no room for a long message
MIN_PAUSE_S = 0.05  # even if retry_after_s is 0: never a busy loop


@dataclass(slots=True, eq=False)
class Req:
    """One choice of an HTTP request, with all that is needed to send it again."""

    index: int
    prompt: tuple[int, ...]
    sampling: Sampling
    output: OutputText
    leader: Req | None = None  # another choice with the same prompt, submitted before this one
    salt: str = ""  # `Generate.salt`
    leads: bool = False  # it is the leader of others
    session: str = ""  # "owner/name", digests, of whose turn it is: `http/identity.py`
    keep_s: float | None = None  # `cache_ttl`; None: for its owner's usual pause
    went: Where | None = None  # as it was sent last
    # Set when it is submitted.
    req_id: str = ""  # unique in the cluster: workers know it by this
    client: str = ""  # whom it counts for in turns: `http/source.py`
    priority: int = 0  # among the requests of its client; the least is first
    mailbox: Mailbox = field(init=False)
    arrived_at: float = 0.0  # monotonic
    deadline: float = 0.0
    tokens: list[int] = field(default_factory=list[int])  # output so far
    dispatch: int = 0  # how often it was sent to a worker
    route: Route | None = None  # the workers it was sent to; None while it waits
    proposed: Proposed | None = None  # of its prompt, until that is computed
    num_cached_tokens: int = 0
    digest: str = ""  # of the model that has drawn its output; no other may go on with it
    key: str = ""  # by which it can be claimed; "": it ends with its connection
    was_claimed: bool = False  # a worker had it from before
    avoid: PeerId = ""  # the worker that was lost last with it: another one is preferred
    suspect: Suspect = field(default_factory=Suspect)  # whether it kills workers
    queued_at: float = 0.0  # when it last came into the queue
    queued_s: float = 0.0  # all its time in the queue
    queued_first_s: float = 0.0  # of it, before its first token
    waiting_since: float | None = None  # start of the queue timeout; a refusal does not restart it
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    stages: Stages | None = None  # measured by the workers, until the first token
    decoded_by: PeerId = ""
    scored: list[TokenLogprob] = field(default_factory=list[TokenLogprob])  # of its prompt
    windows: list[Window] = field(default_factory=list[Window])  # its trace, if it is asked for
    timers: list[asyncio.TimerHandle] = field(default_factory=list[asyncio.TimerHandle])
    trace: Trace | None = None  # its stages here; None = not traced
    trace_id: str = ""  # for exemplars
    outcome: str = ""  # set by `_end`

    @property
    def position(self) -> int:
        """The position of the next token in prompt + output."""
        return len(self.prompt) + len(self.tokens)

    def num_bytes(self, said: LastSaid) -> int:
        """Of the message that sends it, at most or so, where this was said before."""
        grammar = self.sampling.grammar
        return TOKEN_BYTES * self.position + (0 if grammar in said.texts else len(grammar))

    def is_at(self, peer: PeerId) -> bool:
        """Whether this worker has it."""
        return self.route is not None and self.route.decode == peer

    def computed(self) -> None:
        """Its prompt waits nowhere any more."""
        if (proposed := self.proposed) is not None:
            self.proposed = None
            proposed.computed()

    def begun(self) -> None:
        """Its decode worker has a row for it, or tokens."""
        self.suspect.has_row = True
        if self.proposed is not None:  # of its first chunk alone
            self.computed()

    @property
    def computes_prompt(self) -> bool:
        """Whether its prompt is computed for it alone: what another has computed has no logits."""
        return self.leader is None or self.sampling.prompt_logprobs >= 0

    @property
    def was_sent(self) -> bool:
        """Whether a worker was asked to compute it; of one with a key, dispatch 1 is a claim."""
        return self.dispatch > bool(self.key)

    def take_scored(self) -> tuple[tuple[int, TokenLogprob], ...]:
        """The prompt's tokens but its first with their logprobs; nothing later on."""
        scored = tuple(zip(self.prompt[1:], self.scored, strict=False))
        self.scored.clear()
        return scored

    @property
    def spent(self) -> StageTimes | None:
        """Where its time went; None before the first token."""
        if self.stages is None:
            return None
        first_token_s = self.first_token_at - self.arrived_at
        decode_s = self.last_token_at - self.first_token_at
        by = self.decoded_by
        return stage_times(self.stages, by, self.queued_first_s, first_token_s, decode_s)


def counted(reqs: Sequence[Req]) -> tuple[int, int, int]:
    """Prompt, output and cached tokens of all choices together; a prompt counts once."""
    leaders = [req for req in reqs if req.leader is None]
    return (
        sum(len(req.prompt) for req in leaders),
        sum(len(req.tokens) for req in reqs),
        sum(req.num_cached_tokens for req in leaders),
    )


class Queue:
    """The requests that wait.

    Only this class changes where a request is: in the queue (its route is None) or at a worker.
    `expired` is called with a request that will not be sent, and with the seconds by which its wait
    would exceed the queue timeout. A request expires when it has waited for `queue_timeout_s` at a
    stretch (0 s), when its client's last turns and waiting requests say that it would, when it
    has output and all decode workers have another model (0 s), or when no decode worker is expected
    any more (0 s).
    """

    def __init__(
        self, fleet: Fleet, queue_timeout_s: float, expired: Callable[[Req, float], None]
    ) -> None:
        self._wire, self._members, self._policy = fleet.wire, fleet.members, fleet.policy
        self._queue_timeout_s = queue_timeout_s
        self._expired = expired
        self._loop = asyncio.get_running_loop()
        self._waiting: Turns[Req] = Turns()
        self.sessions = Sessions()
        self.num_of = self._waiting.num_of
        self._begun: list[Req] = []  # have output, and go before all others
        self._goes_on = False  # `place` has stopped in between, and is to come again
        self._lacks_room = False  # a worker has, at its link, for one of those that wait
        self._looks_at = 0.0  # for that again, and not before

    def __len__(self) -> int:
        return len(self._waiting) + len(self._begun)

    def add(self, req: Req, *, first: bool = False) -> None:
        """Queue `req`, or in front of all if it comes back from a worker; then `place`.

        One that a worker has refused expires at once if its queue timeout has passed meanwhile. One
        whose client has text already waits until its deadline.
        """
        assert req.route is None
        now = req.queued_at = time.monotonic()
        if req.trace is not None:
            req.trace.enter("router_queue", now)
        if req.tokens:
            self._begun.append(req)
            self.place()
            return
        if req.waiting_since is not None and now - req.waiting_since >= self._queue_timeout_s:
            self._expired(req, 0.0)
            return
        if not self._members.expects_decode:
            self._expired(req, 0.0)
            return
        late_s = 0.0 if first else self._waiting.wait_s(req.client) - SURE * self._queue_timeout_s
        if late_s > 0:
            self._expired(req, late_s)
            return
        self._waiting.add(req, first=first)
        self.place()
        if req.waiting_since is None and (first or req.route is None):
            req.waiting_since = now
            req.timers.append(self._loop.call_later(self._queue_timeout_s, self._late, req, now))

    def place(self, *, goes_on: bool = False) -> None:
        """Send as many as workers may take now; those that nobody can go on with expire.

        What takes longer than PLACE_S `goes_on` in a later turn of the loop.
        """
        if self._goes_on and not goes_on:
            return
        self._goes_on, until = False, time.monotonic() + PLACE_S
        self._lacks_room = False
        while self._begun or self._waiting:
            now = time.monotonic()
            if now > until:
                self._goes_on = True
                self._loop.call_soon(partial(self.place, goes_on=True))
                return
            req, decode = self._next(self._members.open_decode(now))
            if req is None:
                if self._lacks_room and now > self._looks_at:
                    self._looks_at = now + ROOM_S / 2
                    self._loop.call_later(ROOM_S, self.place)
                break
            preferred = [known for known in decode if known.peer != req.avoid]
            prefill = [k for k in self._members.live("prefill") if not k.stats.draining]
            with_leader, after = _follow(req, decode)
            among = with_leader or preferred or decode
            if req.session and self._policy.follows_sessions:
                at = self.sessions.choose(req.session, among, len(req.prompt))
                among = among if at is None else [at]
            route = self._policy.choose(req.prompt, among, prefill, req.salt)
            self._send(req, route, after)
        doomed: list[Req] = []
        if not self._members.expects_decode:
            doomed, self._begun = [*self._begun, *self._waiting.all()], []
        elif self._begun and self._members.live("decode"):
            listed = [known.member for known in self._members.all()]
            digests = {member.digest for member in listed if member.role == "decode"}
            doomed = [req for req in self._begun if req.digest not in digests]
            self._begun = [req for req in self._begun if req.digest in digests]
        for req in doomed:  # not at once: to end a request is to `place` others
            self._waiting.remove(req)
            self._loop.call_soon(self._expired, req, 0.0)

    def claimed(self, req: Req, decode: PeerId) -> None:
        """A worker had it already, and goes on with it."""
        req.was_claimed = True
        self._at(req, Route(decode, ()), time.monotonic())

    def leave(self, req: Req, *, served: bool) -> None:
        """Take `req` out of the queue or from its worker: it has ended, or was refused or lost."""
        if served and req.session:
            self.sessions.end(req.session)
        self._waiting.remove(req)
        self._begun = [other for other in self._begun if other is not req]
        route, req.route = req.route, None
        if route is None:
            req.queued_s += time.monotonic() - req.queued_at
            return
        req.computed()
        self._members.left(route.decode, allows_one=served)
        self._waiting.runs(req.client, -1)

    def pause(self, peer: PeerId, retry_after_s: float) -> None:
        """A worker has refused: send it nothing for a while, then `place` again."""
        pause_s = max(MIN_PAUSE_S, retry_after_s) * (1 + MAX_JITTER * random.random())
        self._members.refused(peer, time.monotonic() + pause_s)
        self._loop.call_later(pause_s, self.place)

    def found(self, req: Req, num_cached: int, stages: Stages | None) -> None:
        """Its decode worker has said how many of its prompt's tokens were there, and by whom."""
        if req.route is not None:
            self._policy.found(req.route, num_cached, "" if stages is None else stages.prefilled_by)

    def drew(self, req: Req, num_tokens: int) -> None:
        """So many output tokens more have come."""
        self._waiting.charge(req.client, OUTPUT_WEIGHT * num_tokens)

    def forget_prefixes(self) -> None:
        """Have every worker empty its prefix tree of what no request uses."""
        for known in self._members.all():
            if known.member.role in WORKERS:
                self._wire.send(known.peer, ForgetPrefixes())

    def abort(self, req: Req, *, keep: bool = False) -> None:
        """Tell the worker that has `req`, if one has, to drop it, or to keep what has a key."""
        if req.route is not None:
            self._wire.send(req.route.decode, Abort(req.req_id, req.dispatch, keep))

    def _next(self, decode: list[Known]) -> tuple[Req | None, list[Known]]:
        """Who is sent now, and to which of the workers that are open; nobody: to none.

        One that has more to read than it has granted (`Wire`) gets the rest when it has.
        """

        found: list[Known] = []

        def fits(req: Req) -> bool:
            found[:] = (k for k in decode if self._wire.has_room(k.peer, req.num_bytes(k.said)))
            self._lacks_room |= len(found) < len(decode)
            return bool(found)

        for req in self._begun:
            if fits(req) and (same := [k for k in found if k.member.digest == req.digest]):
                self._begun.remove(req)
                return req, same
        if not decode or not self._waiting:
            return None, []
        req = self._waiting.pop(self._members.num_rows, fits)  # `found` is of the one that it took
        return req, [] if req is None else found

    def _late(self, req: Req, since: float) -> None:
        if not req.outcome and req.route is None and req.waiting_since == since:
            self._expired(req, 0.0)

    def _send(self, req: Req, route: Route, after: str) -> None:
        now = time.monotonic()
        if not req.was_sent and (req.computes_prompt or not after):
            self._waiting.charge(req.client, len(req.prompt))
        req.scored.clear()  # another worker begins anew
        req.dispatch += 1
        req.queued_s += now - req.queued_at
        self._at(req, route, now)
        if req.session:
            req.went = self.sessions.sent(req.session, route.decode)
        trace = ""
        if req.trace is not None:
            req.trace.enter("dispatch", now, {"kvlane.worker": route.decode}, asks=True)
            trace = req.trace.carried
        sampling, known, age = req.sampling, self._members.get(route.decode), 0
        if sampling.grammar and known is not None:
            age = known.said.age(sampling.grammar)
            sampling = replace(sampling, grammar="") if age else sampling
        generate = Generate(
            req_id=req.req_id,
            dispatch=req.dispatch,
            tokens=(*req.prompt, *req.tokens),
            num_prompt_tokens=len(req.prompt),
            sampling=sampling,
            timeout_s=max(0.001, req.deadline - now),
            candidates=route.candidates,
            after=after,
            trace=trace,
            key=req.key,
            salt=req.salt,
            leads=req.leads,
            session=req.session,
            keep_s=self.sessions.pause_s(req.session) if req.keep_s is None else req.keep_s,
            grammar_age=age,
        )
        log.debug("req_id=%s dispatch %d to %s", req.req_id, req.dispatch, route.decode)
        self._wire.send(route.decode, generate)

    def _at(self, req: Req, route: Route, now: float) -> None:
        """It is at these workers from now on."""
        req.route, req.suspect.has_row = route, False
        if not req.tokens and (known := self._members.get(route.decode)) is not None:
            req.digest = known.member.digest
        first, num = None, 0
        if route.candidates and req.computes_prompt:
            first, num = route.candidates[0].peer, route.candidates[0].num_cached_tokens
        req.proposed = self._members.sent(route.decode, first, max(0, req.position - num), now)
        self._waiting.runs(req.client, +1)


def _follow(req: Req, decode: Sequence[Known]) -> tuple[list[Known], str]:
    """The worker where this choice can share its leader's prompt, and the leader's req_id.

    Neither if the leader is at none of these workers, or if this choice was sent before: after a
    refusal or loss it no longer follows.
    """
    leader = req.leader
    if leader is None or leader.route is None or req.was_sent:
        return [], ""
    at = [known for known in decode if known.peer == leader.route.decode]
    return at, leader.req_id if at else ""
