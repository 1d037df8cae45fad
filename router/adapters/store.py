"""Responses that are kept, in memory and as JSON: bounded one by one, in sum, and in time.

    Shelf of a key ── name ─▶ Kept: head, and its conversation as parts, arrays of items
                   └─ part ─▶ how many of the shelf's conversations have it

A conversation shares its parts with those that it goes on with: a turn costs what is new of it. As
objects they would take five times the memory, and every full collection of garbage would walk
through them while all streams wait.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec import Raw
from msgspec.json import decode as from_json
from msgspec.structs import replace

from router.errors import ApiError, invalid

Item = Mapping[str, Any]

ENTRY_BYTES, PART_BYTES = 1024, 192  # of a response, or a part of one, beside its JSON
MAX_PARTS = 256  # of a conversation; beyond, those before become one
NOTHING = b"[]"
OPEN = "in_progress"


class MissingResponse(ApiError):
    """404: no response of this id is kept, or not for who asks. item: one of it is wanted."""

    def __init__(self, name: str, param: str | None = None, item: str = "") -> None:
        what = f"item {item[:80]!r}" if item else f"response {name[:80]!r}"
        message = f"there is no {what}: it was not stored, was deleted, or had to go "
        message += "(router.stored_response_ttl_s, router.stored_responses_mib; what a router "
        super().__init__("invalid_value", message + "keeps ends when it is killed)", param=param)
        self.status = 404


class Kept(msgspec.Struct, frozen=True):
    """A response. `parts` are its conversation: the last is its output, before it its input."""

    owner: str  # `owner_of` its API key
    name: str
    head: bytes  # an object: what is shown but its status and output
    parts: Sequence[bytes]
    status: str
    is_background: bool = False
    session: str = ""  # `Req.session`

    @property
    def is_open(self) -> bool:
        """Whether it is being made."""
        return self.status == OPEN

    @property
    def shown(self) -> bytes:
        """As its client gets it."""
        told = self.head[:-1], self.status.encode(), self.parts[-1]
        return b'%b,"status":"%b","output":%b}' % told

    @property
    def num_bytes(self) -> int:
        """All that it holds, by itself."""
        return cost_of(self) + sum(map(part_cost, self.parts))


def cost_of(kept: Kept) -> int:
    """Bytes in memory beside its parts."""
    return ENTRY_BYTES + len(kept.head) + 8 * len(kept.parts)


def part_cost(part: bytes) -> int:
    """Bytes in memory."""
    return PART_BYTES + len(part)


def exact(raw: bytes) -> bytes:
    """The same without what it may hold behind its end: of msgspec's JSON up to half of it."""
    return bytes(memoryview(raw))


def owner_of(client: str) -> str:
    """How a key's name stands in paths."""
    return blake2b(client.encode(), digest_size=8).hexdigest()


def tag_of(incarnation: str) -> str:
    """What ids of responses end with, which a router of this incarnation makes."""
    return blake2b(incarnation.encode(), digest_size=4).hexdigest()


def items_of(parts: Iterable[bytes]) -> Iterator[Item]:
    """One by one, so that other threads have their turn."""
    for part in parts:
        for raw in from_json(part, type=list[Raw]):
            yield from_json(raw)


def joined(parts: Iterable[bytes]) -> bytes:
    """One array of all items."""
    return b"[%b]" % b",".join(part[1:-1] for part in parts if part != NOTHING)


def fewer(parts: Sequence[bytes]) -> Sequence[bytes]:
    """The same conversation in at most MAX_PARTS."""
    return parts if len(parts) <= MAX_PARTS else (joined(parts),)


@dataclass(slots=True)
class _Shelf:
    """What one key has stored."""

    kept: dict[str, tuple[Kept, float]] = field(default_factory=dict[str, tuple[Kept, float]])
    parts: dict[bytes, tuple[bytes, int]] = field(default_factory=dict[bytes, tuple[bytes, int]])
    num_bytes: int = 0

    @property
    def oldest(self) -> str:
        """The name of one; "": there is none."""
        return next(iter(self.kept), "")

    def put(self, kept: Kept, until: float) -> int:
        """Keep it in place of one of its name, and share parts that are here; the bytes more."""
        before, old = self.num_bytes, self.kept.pop(kept.name, None)
        shared = tuple(
            self.parts[part][0] if part in self.parts else exact(part) for part in kept.parts
        )
        for part in shared:
            num = self.parts.get(part, (part, 0))[1]
            self.num_bytes += 0 if num else part_cost(part)
            self.parts[part] = part, num + 1
        kept = replace(kept, head=exact(kept.head), parts=shared)
        self.num_bytes += cost_of(kept)
        self.kept[kept.name] = kept, until
        if old is not None:
            self._release(old[0])
        return self.num_bytes - before

    def drop(self, name: str) -> int:
        """Let it go; the bytes that it gives back."""
        before = self.num_bytes
        self._release(self.kept.pop(name)[0])
        return before - self.num_bytes

    def _release(self, kept: Kept) -> None:
        self.num_bytes -= cost_of(kept)
        for part in kept.parts:
            same, num = self.parts.pop(part)
            if num > 1:
                self.parts[part] = same, num - 1
            else:
                self.num_bytes -= part_cost(part)


class ResponseStore:
    """Those of one router. The loop's alone. max_each: bytes of one, with its conversation."""

    def __init__(
        self,
        max_bytes: int,
        max_each: int,
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_bytes, self.max_each = max_bytes, min(max_bytes, max_each)
        self.num_bytes = 0  # of all that is kept
        self._ttl_s, self._clock = ttl_s, clock
        self._shelves: dict[str, _Shelf] = {}
        self._cancels: dict[str, Callable[[], None]] = {}  # of those that nobody waits for

    def check(self, head_bytes: int, parts: Sequence[bytes]) -> None:
        """Raise an ApiError, 400, if so much is too much for one response. Any thread's."""
        if 2 * ENTRY_BYTES + head_bytes + sum(map(part_cost, parts)) > self.max_each:
            bound = f"router.stored_response_mib ({self.max_each / (1 << 20):g})"
            message = f"input: with all before it, it is larger than {bound}: send store=false"
            raise invalid(message, "input")

    def put(self, kept: Kept, left_s: float | None = None) -> bool:
        """Keep it for so long, or the usual time; whether it is small enough.

        For it the oldest go of the keys that have stored most.
        """
        if kept.num_bytes > self.max_each:
            return False
        now = self._clock()
        shelf = self._shelves.setdefault(kept.owner, _Shelf())
        until = now + (self._ttl_s if left_s is None else min(left_s, self._ttl_s))
        self.num_bytes += shelf.put(kept, until)
        self._make_room(kept.name, now)
        return True

    def end(self, kept: Kept) -> bool:
        """It has been made, of which the output is given; whether it is small enough to be kept.

        One that was deleted meanwhile, or cancelled, stays so.
        """
        self._cancels.pop(kept.name, None)
        before = self._find(kept.owner, kept.name)
        if before is None or not before.is_open:
            return True
        return self.put(replace(kept, parts=(*before.parts[:-1], *kept.parts)))

    def close(self, owner: str, name: str) -> None:
        """Nobody makes it any more: if it has not ended, it goes."""
        self._cancels.pop(name, None)
        kept = self._find(owner, name)
        if kept is not None and kept.is_open:
            self.drop(owner, name)

    def take(self, kept: Kept, left_s: float) -> None:
        """Keep what another router has made."""
        is_whole = len(kept.parts) > 1 and not kept.is_open
        if is_whole and self._find(kept.owner, kept.name) is None:
            self.put(kept, left_s)

    def get(self, owner: str, name: str) -> Kept:
        """Raises a MissingResponse, if this owner has none of this id."""
        kept = self._find(owner, name)
        if kept is None:
            raise MissingResponse(name)
        return kept

    def watch(self, name: str, cancel: Callable[[], None]) -> None:
        """What ends it, while nobody waits for it."""
        self._cancels[name] = cancel

    def delete(self, owner: str, name: str) -> None:
        """Raises as `get` does; one that is being made with nobody to wait for it is cancelled."""
        self.get(owner, name)
        self.drop(owner, name)

    def cancel(self, owner: str, name: str) -> Kept:
        """The response, which ends if it is being made.

        Raises as `get` does, and 400 for one that was made while its client waited.
        """
        kept = self.get(owner, name)
        if not kept.is_background:
            raise ApiError("invalid_value", "only background responses can be cancelled")
        if kept.is_open:
            kept = replace(kept, status="cancelled")
            cancel = self._cancels.pop(name, None)
            self.put(kept)
            if cancel is not None:
                cancel()
        return kept

    def drop(self, owner: str, name: str) -> None:
        """Let it go, if it is here; its making ends, too, if nobody waits for that."""
        shelf = self._shelves.get(owner)
        if shelf is None or name not in shelf.kept:
            return
        self.num_bytes -= shelf.drop(name)
        if not shelf.kept:
            del self._shelves[owner]
        if (cancel := self._cancels.pop(name, None)) is not None:
            cancel()

    def all(self) -> list[tuple[Kept, float]]:
        """What has been made, and for how many seconds it is kept yet; the last first."""
        now = self._clock()
        kept = (pair for shelf in self._shelves.values() for pair in shelf.kept.values())
        made = [(one, until - now) for one, until in kept if not one.is_open]
        return sorted((pair for pair in made if pair[1] > 0), key=lambda pair: -pair[1])

    def _find(self, owner: str, name: str) -> Kept | None:
        shelf = self._shelves.get(owner)
        kept, until = shelf.kept.get(name, (None, 0.0)) if shelf else (None, 0.0)
        if kept is not None and until <= self._clock():
            self.drop(owner, name)
            return None
        return kept

    def _make_room(self, but: str, now: float) -> None:
        """Drop what is too old, and then the oldest of the largest shelf; not this one."""
        for owner, shelf in list(self._shelves.items()):
            while (name := shelf.oldest) != but and name and shelf.kept[name][1] <= now:
                self.drop(owner, name)
        while self.num_bytes > self.max_bytes:
            shelves = [pair for pair in self._shelves.items() if pair[1].oldest != but]
            owner, shelf = max(shelves, key=lambda pair: pair[1].num_bytes)
            self.drop(owner, shelf.oldest)


class _Packed(msgspec.Struct):
    """Responses on their way to another router. places: by response, of its parts."""

    parts: list[bytes]
    kept: list[tuple[Kept, float, list[int]]]  # without parts; for how many seconds yet


def packed(pairs: Iterable[tuple[Kept, float]]) -> bytes:
    """Responses as one message, in which no part is twice."""
    places = dict[bytes, int]()
    kept = [
        (replace(one, parts=()), left_s, [places.setdefault(p, len(places)) for p in one.parts])
        for one, left_s in pairs
    ]
    return msgspec.msgpack.encode(_Packed(list(places), kept))


def unpacked(raw: bytes) -> list[tuple[Kept, float]]:
    """As they were packed; raises a msgspec.MsgspecError or an IndexError for what is not so."""
    found = msgspec.msgpack.decode(raw, type=_Packed)
    return [
        (replace(one, parts=tuple(found.parts[i] for i in places)), left_s)
        for one, left_s, places in found.kept
    ]
