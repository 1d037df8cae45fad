"""Replies: one frame a router and turn, finals until acknowledged, never anything else again."""

import random
from collections import Counter

from worker.api import Chunks, FinishReason, TokenChunk
from worker.requests.replies import Replies


class Sent:
    def __init__(self) -> None:
        self.frames: list[tuple[str, Chunks]] = []

    def __call__(self, router: str, message: object) -> None:
        self.frames.append((router, message))

    def take(self) -> list[tuple[str, tuple[TokenChunk, ...]]]:
        frames, self.frames = self.frames, []
        return [(router, frame.chunks) for router, frame in frames]


def chunk(req_id: str, position: int, *, final: bool = False, dispatch: int = 1) -> TokenChunk:
    reason = FinishReason.STOP if final else None
    return TokenChunk(req_id, dispatch, position, (position,), reason)


def test_a_slow_turn_is_not_a_missing_acknowledgement() -> None:
    sent = Sent()
    replies = Replies(sent, 1.0)
    replies.add("a", chunk("x", 0, final=True))
    replies.flush(5.0, 0.0)  # the turn that settled it took five seconds
    replies.flush(5.1, 5.0)
    assert len(sent.take()) == 1
    replies.flush(9.0, 5.2)  # so did the one after: the answer may lie in the inbox
    assert sent.take() == []
    replies.flush(9.1, 9.0)
    assert len(sent.take()) == 1


def test_random_traffic_loses_no_chunk_and_repeats_only_finals() -> None:
    rnd = random.Random(1)
    sent, now = Sent(), 0.0
    replies = Replies(sent, 1.0)
    open_reqs: dict[tuple[str, str], int] = {}
    unacknowledged: set[tuple[str, str]] = set()
    received: dict[tuple[str, str], list[int]] = {}
    finals: Counter[tuple[str, str]] = Counter()
    sent_at: dict[tuple[str, str], float] = {}
    num_repeats = 0
    for number in range(10_000):
        now += rnd.random() * 0.3
        for _ in range(rnd.randint(0, 3)):
            key = rnd.choice("abc"), f"r{rnd.randint(0, 5)}.{number // 40}"
            if finals[key] or key in unacknowledged:
                continue
            position = open_reqs.get(key, 0)
            final = rnd.random() < 0.3
            replies.add(key[0], chunk(key[1], position, final=final))
            open_reqs[key] = position + 1
            if final:
                unacknowledged.add(key)
        replies.flush(now, now)
        frames = sent.take()
        assert len({router for router, _ in frames}) == len(frames)
        for router, chunks in frames:
            assert chunks
            for each in chunks:
                key = router, each.req_id
                got = received.setdefault(key, [])
                if each.finish_reason is not None:
                    finals[key] += 1
                    before, sent_at[key] = sent_at.get(key, 0.0), now
                    if finals[key] > 1:
                        num_repeats += 1
                        assert key in unacknowledged
                        assert now - before >= 1.0
                        continue
                assert each.position == len(got)
                got.append(each.position)
        for key in sorted(unacknowledged):
            assert now - sent_at[key] < 1.0, "it goes again"
            replies.acknowledged(*key, 2)  # of another dispatch
            replies.acknowledged("another router", key[1], 1)
            if rnd.random() < 0.2:
                replies.acknowledged(*key, 1)
                unacknowledged.discard(key)
        assert replies.num_unacknowledged == len(unacknowledged)
    assert num_repeats > 50
    assert all(len(received[key]) == count for key, count in open_reqs.items())
