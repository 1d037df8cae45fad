"""What the router knows of the cluster's members: the controller's list, Pongs, its own counts.

Loop thread only. A Pong may be as old as the ping interval. So the requests that this router has
sent since then are added to the figures of the Pong.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from msgspec.structs import replace

from router.observe.board import Change, Start
from worker.api import Member, PeerId, Role, WorkerStats
from worker.config.said import LastSaid

WORKERS = ("prefill", "decode")
NONE_EXPECTED = "every decode worker was drained, and none is to come"
MIN_AHEAD = 4  # requests at a decode worker beside those that have rows
IDENTITY = attrgetter("name", "incarnation", "state")  # of a Change


@dataclass(slots=True, eq=False)
class Known:
    """One member, and what is known of its load."""

    member: Member
    stats: WorkerStats = field(default_factory=WorkerStats)
    live: bool = False  # has sent a Pong, and was not lost since
    heard_at: float = 0.0  # monotonic, of the last Pong; 0: there was none
    num_sent: int = 0  # requests of this router that are there now
    num_sent_at_pong: int = 0
    # Tokens of prompts for which it became first candidate since the Pong.
    proposed: list[int] = field(default_factory=list[int])
    busy_until: float = 0.0  # monotonic; it has refused, and gets nothing before but `num_allowed`
    num_allowed: int = 0  # requests that may be sent although it is busy
    said: LastSaid = field(default_factory=LastSaid)  # on its link
    last_turn: int = 0  # of a session, by number, that it has told of

    @property
    def peer(self) -> PeerId:
        """The name under which the wire addresses it."""
        return self.member.peer

    @property
    def num_requests(self) -> int:
        """Requests there: other routers' as of the last Pong, ours as of now."""
        of_others = self.stats.num_running + self.stats.num_waiting - self.num_sent_at_pong
        return max(0, of_others) + self.num_sent

    @property
    def load(self) -> float:
        """Requests per row; above 1 means that some wait."""
        return self.num_requests / max(1, self.stats.max_num_reqs)

    @property
    def is_full(self) -> bool:
        """Whether enough wait there for rows; more wait here, where turns are fair."""
        rows = self.stats.max_num_reqs
        return self.num_requests >= rows + max(MIN_AHEAD, rows // 4)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that wait there, as far as this router can know."""
        return self.stats.num_queued_tokens + sum(self.proposed)

    def num_before(self, num_tokens: int) -> int:
        """How many of those it computes before a prompt of so many, at most: of none longer."""
        there = min(self.stats.num_queued_tokens, self.stats.num_waiting * num_tokens)
        return there + sum(num for num in self.proposed if num <= num_tokens)


class Proposed(NamedTuple):
    """Tokens of a prompt that a prefill worker will probably compute."""

    prefill: Known
    num_tokens: int
    heard_at: float  # of the worker's last Pong: the next one counts them itself

    def computed(self) -> None:
        """They do not wait there any more."""
        if self.prefill.heard_at == self.heard_at:
            self.prefill.proposed.remove(self.num_tokens)


class Members:
    """The table of members. `update` takes the controller's list, the others what was observed."""

    def __init__(self) -> None:
        self._known: dict[PeerId, Known] = {}
        self._changes: Sequence[Change] = ()
        self._starting: Sequence[Start] = ()
        self._noted_at = 0.0
        self.expects_decode = True  # some decode worker lives, starts or will; False: all drained

    def note_changes(
        self,
        changes: Sequence[Change],
        starting: Sequence[Start] = (),
        roles: Sequence[Role] | None = None,
    ) -> list[Change]:
        """Take the controller's whole list of changes, the oldest first, and of who starts.

        roles: of all names that stay, whether their processes live or not; None: not known.

        Returns the deaths of workers that the list before did not have; none for the first list.
        """
        known = set(map(IDENTITY, self._changes))
        self._changes, self._starting, self._noted_at = changes, starting, time.monotonic()
        self.expects_decode = roles is None or "decode" in roles
        deaths = [c for c in changes if c.state == "lost" and c.role in WORKERS]
        return [death for death in deaths if IDENTITY(death) not in known] if known else []

    def changes(self) -> list[Change]:
        """What has happened, as of now, the last first."""
        age_s = time.monotonic() - self._noted_at
        return [replace(c, ago_s=c.ago_s + age_s) for c in reversed(self._changes)]

    def starting(self) -> list[Start]:
        """Who is not ready yet, as of now."""
        age_s = time.monotonic() - self._noted_at
        return [replace(start, since_s=start.since_s + age_s) for start in self._starting]

    def update(self, members: Sequence[Member]) -> tuple[list[Member], list[Known]]:
        """Take the whole new list; returns the workers that came, and those that went."""
        now = {member.peer: member for member in members}
        added = [member for peer, member in now.items() if peer not in self._known]
        removed = [known for peer, known in self._known.items() if peer not in now]
        for known in removed:
            del self._known[known.peer]
        for member in added:
            self._known[member.peer] = Known(member)
        came = [member for member in added if member.role in WORKERS]
        return came, [known for known in removed if known.member.role in WORKERS]

    def get(self, peer: PeerId) -> Known | None:
        """The member of this address, while the controller lists it."""
        return self._known.get(peer)

    def pong(self, peer: PeerId, stats: WorkerStats | None) -> None:
        """A member has answered a ping."""
        known = self._known.get(peer)
        if known is None:
            return
        known.live, known.heard_at = True, time.monotonic()
        if stats is not None:
            known.stats = stats
            known.num_sent_at_pong = known.num_sent
            known.proposed.clear()
        free_rows = known.stats.max_num_reqs - known.stats.num_running - known.stats.num_waiting
        if not known.stats.draining and free_rows > 0 and known.stats.num_free_pages > 0:
            known.num_allowed = max(known.num_allowed, free_rows)

    def lost(self, peer: PeerId) -> None:
        """A member has stopped answering; it counts again from its next Pong on."""
        known = self._known.get(peer)
        if known is not None:
            stats = WorkerStats(draining=known.stats.draining)
            lost = Known(known.member, stats, heard_at=known.heard_at, last_turn=known.last_turn)
            self._known[peer] = lost

    def refused(self, peer: PeerId, until: float) -> None:
        """A decode worker had no room: it gets no request until then, or until it has room."""
        known = self._known.get(peer)
        if known is not None:
            known.busy_until, known.num_allowed = max(known.busy_until, until), 0

    def sent(
        self, peer: PeerId, candidate: PeerId | None, num_tokens: int, now: float
    ) -> Proposed | None:
        """A request goes to `peer`, which will probably let `candidate` compute so many tokens."""
        known = self._known[peer]
        known.num_sent += 1
        if known.busy_until > now:
            known.num_allowed -= 1
        prefill = self._known.get(candidate) if candidate is not None else None
        if prefill is None:
            return None
        prefill.proposed.append(num_tokens)
        return Proposed(prefill, num_tokens, prefill.heard_at)

    def left(self, peer: PeerId, *, allows_one: bool) -> None:
        """A request is no longer at `peer`; with `allows_one` another may be sent there."""
        known = self._known.get(peer)
        if known is not None and known.num_sent > 0:
            known.num_sent -= 1
            known.num_allowed += allows_one and known.busy_until > 0

    def live(self, role: Role) -> list[Known]:
        """Members of a role that answer."""
        return [k for k in self._known.values() if k.live and k.member.role == role]

    @property
    def num_rows(self) -> int:
        """Of the rows of all decode workers: this router's part, or what others leave if more."""
        decode = self.live("decode")
        num_routers = sum(known.member.role == "router" for known in self._known.values())
        part = sum(known.stats.max_num_reqs for known in decode) // max(1, num_routers)
        left = (known.stats.max_num_reqs - known.num_requests + known.num_sent for known in decode)
        return max(part, sum(max(0, rows) for rows in left))

    def open_decode(self, now: float) -> list[Known]:
        """Decode workers to which a request may be sent now."""
        return [
            known
            for known in self.live("decode")
            if not known.stats.draining
            and not known.is_full
            and (known.busy_until <= now or known.num_allowed > 0)
        ]

    def all(self) -> list[Known]:
        """Every member that the controller lists."""
        return list(self._known.values())


def drafting(members: Members, router: str) -> dict[str, WorkerStats]:
    """The latest stats of decode workers that verify drafts, by name, if `router` exports them.

    Only the first router by name exports them, since all routers know the same.
    """
    names = (known.member.name for known in members.all() if known.member.role == "router")
    if any(name < router for name in names):
        return {}
    live = members.live("decode")
    return {known.member.name: known.stats for known in live if known.stats.drafted}
