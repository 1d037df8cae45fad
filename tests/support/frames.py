"""Frames of the wire that are wrong in some way: every message, mutated, huge, again, out of order.

A frame here is what a socket sends at once: one part or several. Where it stands on its link is the
sender's business; `Frames.next` says whether it shall lie about that, too.
"""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from worker import api

MAX_TOKENS = 4  # of what is valid: it is computed
TOKENS = (5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21)
SAMPLING = api.Sampling(MAX_TOKENS, stop_ids=(3,), logit_bias=((5, 1.0),), logprobs=1, min_p=0.1)
PLAIN = api.Sampling(MAX_TOKENS, temperature=0.0)
ERROR = api.Error("busy", "no room", None)
SCORED = (api.TokenLogprob(-0.5, ((5, -0.5),)),)
STAGES = api.Stages(0.1, 0.1, 0.1, 0.1, 0.1, "prefill-0/x")
NUM_KEPT = 64  # frames that may be sent again
MAX_HUGE_BYTES = 140 << 20  # beyond what a socket takes
NASTY: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 15, 16, 17, 1023, 1024, 2**31 - 1, 2**31, 2**32, 2**53,
    2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63), 0.0, -0.0, 0.5, 1e-308, 1e308, -1e308,
    float("nan"), float("inf"), float("-inf"), "", "\x00", "a" * 5000, "\N{GRINNING FACE}" * 40,
    "start: /a+/", '{"type": "object"}', "tool_calls", b"", b"\x00" * 40, [], [[]], [0], [-1],
    [2**63], [None], [[], []], [[5, float("nan")]], ["Ping", "x"], [1] * 5000, {}, {"a": 1},
)  # fmt: skip


def seeds(own: str, peer: str, prefill: str) -> list[api.AnyMessage]:
    """A valid one of every type, and of some two.

    own: who sends them; peer: who gets them; prefill: a worker of that role.
    """
    xfer = api.Xfer("x-1", 1, own.rpartition("/")[2], peer.rpartition("/")[2])
    back = api.Xfer("x-1", 1, peer.rpartition("/")[2], own.rpartition("/")[2])
    ends, window = api.FinishReason.LENGTH, api.Window(17, 2, (5,), 1)
    chunk = api.TokenChunk("r-1", 1, 17, (5,), ends, None, 16, SCORED, STAGES, window)
    asked, told = (api.Candidate(prefill),), (api.Candidate(prefill, 1, 0.1, 16),)
    return [
        api.Generate("r-1", 1, TOKENS, 17, SAMPLING, 5.0, asked, "", "", "key-1"),
        api.Generate("r-2", 1, TOKENS, 16, PLAIN, 5.0, told, "r-1"),
        api.Claim("r-3", 1, "key-1", 5.0),
        api.Claimed("r-3", 1, True),
        api.Stop("r-1", 1, 18),
        api.Abort("r-1", 1, True),
        api.Ack("r-1", 1),
        api.Refused("r-1", 1, ERROR, 0.1),
        api.Chunks((chunk, api.TokenChunk("r-2", 1, 18))),
        api.Prefill(xfer, TOKENS, 0, 1e9, PLAIN, 17, ""),
        api.Prefill(xfer, TOKENS, 16),
        api.PrefillRefused(back, ERROR),
        api.KVReady(back, 0, (1, 2), 0, 1, True, 16, 0.1, 5),
        api.Renew(1, (xfer, xfer)),
        api.RenewAck(1, (back,)),
        api.Release(xfer),
        api.Ping(own),
        api.Pong(own, api.WorkerStats(draining=True)),
        api.Bye(),
        api.RankMessage(b"\x91\xa5Ended"),
    ]


class Frame(NamedTuple):
    """kind: of the message and of what was done to it. payload: what follows the place, in parts;
    rest: further parts."""

    kind: str
    payload: bytes
    lies: bool = False  # about its link or number
    rest: tuple[bytes, ...] = ()


class Frames:
    """An endless row of them, the same for the same seed."""

    def __init__(self, rng: random.Random, messages: Sequence[api.Message]) -> None:
        self._rng, self._messages, self._num = rng, messages, 0
        self._bodies = [msgspec.msgpack.decode(api.encode(each)) for each in messages]
        self._ping = next(each for each in messages if isinstance(each, api.Ping))  # is answered
        self._kept: list[Frame] = []

    def next(self) -> Frame:
        """The next one."""
        rng, kind = self._rng, self._rng.random()
        self._num += 1
        if kind < 0.08 and self._kept:
            kept = rng.choice(self._kept)
            return kept._replace(kind=f"{kept.kind} again")
        number = rng.randrange(len(self._messages))
        if isinstance(self._messages[number], api.Bye) and rng.random() < 0.9:
            number = 0  # or most links would be short
        name = type(self._messages[number]).__name__
        if kind < 0.16:
            frame = Frame(f"{name} whole", api.encode(self._fresh(self._messages[number])))
        elif kind < 0.70:
            frame = Frame(f"{name} fields", self._fields(self._bodies[number]))
        elif kind < 0.84:
            frame = Frame(f"{name} bytes", self._bytes(api.encode(self._messages[number])))
        elif kind < 0.89:
            frame = Frame(f"{name} deep", self._deep(self._bodies[number]))
        elif kind < 0.95:
            parts = tuple(rng.randbytes(rng.choice([0, 1, 40])) for _ in range(rng.randint(1, 3)))
            message = rng.choice([self._messages[number], self._ping])
            name = type(message).__name__
            frame = Frame(f"{name} parts", api.encode(message), rng.random() < 0.5, parts)
        elif kind < 0.9998:
            frame = Frame(f"{name} place", api.encode(self._messages[number]), lies=True)
        else:
            frame = Frame(f"{name} huge", self._huge(api.encode(self._messages[number])))
        if len(frame.payload) < 10_000:
            self._kept.append(frame)
            del self._kept[:-NUM_KEPT]
        return frame

    def _fresh(self, message: api.Message) -> api.Message:
        """With an id that no other has, where it has one: else only the first one is new."""
        changed: dict[str, Any] = {}
        if isinstance(message, api.Generate):
            changed = {"req_id": f"r-{self._num}"}
        elif isinstance(message, api.Prefill):
            changed = {"xfer": msgspec.structs.replace(message.xfer, xfer_id=f"x-{self._num}")}
        return msgspec.structs.replace(message, **changed)

    def _fields(self, body: Any) -> bytes:
        """One to three values are others, or are missing, or are twice there."""
        rng, made = self._rng, _copied(body)
        for _ in range(rng.choice([1, 1, 2, 3])):
            found: list[tuple[list[Any], int]] = []
            _places(made, found)
            holder, index = rng.choice(found)
            how = rng.random()
            if how < 0.8:
                holder[index] = _copied(rng.choice(NASTY))
            elif how < 0.9:
                del holder[index:]
            else:
                holder.insert(index, _copied(holder[index]))
            if not made:
                break
        return msgspec.msgpack.encode(made)

    def _bytes(self, raw: bytes) -> bytes:
        """Some of its bytes are others, it is cut off, or heads of what never comes are in it."""
        rng, made = self._rng, bytearray(raw)
        for _ in range(rng.randint(1, 4)):
            made[rng.randrange(len(made))] = rng.randrange(256)
        how = rng.random()
        if how < 0.25:
            del made[rng.randrange(len(made)) :]
        elif how < 0.5:
            head = rng.choice([b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\x7f\0\0\0"])
            at = rng.randrange(len(made) + 1)
            made[at:at] = head
        elif how < 0.6:
            made += rng.randbytes(rng.randint(1, 300))
        return bytes(made)

    def _deep(self, body: list[Any]) -> bytes:
        """Lists in lists: in place of a field, or behind all of them, where nobody looks."""
        depth = self._rng.choice([100, 2_000, 100_000])
        nested = self._rng.choice([b"\x91", b"\x81\xa1a"]) * depth + b"\xc0"
        behind = self._rng.random() < 0.5
        kept = body if behind else body[:-1] if len(body) > 1 else body
        raw = [msgspec.msgpack.encode(each) for each in kept]
        return b"\xdc" + (len(raw) + 1).to_bytes(2, "big") + b"".join(raw) + nested

    def _huge(self, raw: bytes) -> bytes:
        size = self._rng.choice([1 << 20, 16 << 20, MAX_HUGE_BYTES])
        return raw + bytes(size)


def _copied(value: Any) -> Any:
    return [_copied(each) for each in value] if isinstance(value, list) else value


def _places(value: list[Any], found: list[tuple[list[Any], int]]) -> None:
    for index, each in enumerate(value):
        found.append((value, index))
        if isinstance(each, list):
            _places(each, found)
