"""Which pages go last: those of sessions that are likely to come back, within their owner's share.

That a rank is no lock, whoever asks: the books' own tests hold with it, see `check_book`.
"""

import random

import pytest

from tests.support.books import check_book, nodes_of
from worker.cache.book import Hold, PageBook
from worker.schedule.retention import PART, Retention

SIZE = 4
NUM_PAGES = 40


class Worker:
    """A book of pages with its retention, and a clock."""

    def __init__(self, num_pages: int = NUM_PAGES, span: int = 0) -> None:
        self.now = 100.0
        self.book = PageBook(num_pages + 1, SIZE, span=span, step_tokens=8 if span else 0)
        self.retention = Retention(self.book, lambda: self.now)

    def turn(self, tokens: list[int], name: str = "", owner: str = "o", ttl_s: float = 60.0) -> int:
        """Serve a prompt, of a session if it has a name; how many of its tokens were there."""
        hold = self.book.open(tokens, len(tokens), max_matched=len(tokens) - 1)
        assert hold is not None
        self.book.bind(hold, len(tokens))
        self.book.commit(hold, tokens)
        self.ended(hold, name, owner, ttl_s)
        self.now += 1
        return hold.num_matched

    def ended(self, hold: Hold, name: str, owner: str, ttl_s: float) -> None:
        if name:
            self.retention.ended(hold, f"{owner}/{name}", ttl_s)
        self.book.close(hold)
        check_book(self.book, ())
        kept = [node for node in nodes_of(self.book.tree.root) if node.kept_until]
        assert len(kept) == self.book.tree.num_kept

    def found(self, tokens: list[int]) -> int:
        """Tokens of a text that are there."""
        hold = self.book.open(tokens, len(tokens), max_matched=len(tokens))
        assert hold is not None
        self.book.close(hold)
        return hold.num_matched


def text(key: int, num_pages: int) -> list[int]:
    return [key * 1000 + i for i in range(num_pages * SIZE)]


def test_a_pause_is_survived_that_others_fill() -> None:
    for name, num in (("s", 40), ("", 0)):
        worker = Worker()
        worker.turn(text(1, 10), name)
        for other in range(2, 20):
            worker.turn(text(other, 5))
        assert worker.found(text(1, 10)) == num
    assert worker.book.tree.num_kept_evicted == 0


def test_a_rank_is_no_lock_and_the_first_to_end_goes_first_as_a_whole() -> None:
    worker = Worker()
    shared = text(1, 4)
    for key in (2, 3):
        worker.turn(shared + text(key, 10), f"s{key}", ttl_s=60.0 * key)
    worker.turn(text(9, 24))
    assert worker.book.tree.num_kept_evicted == 8
    assert worker.found(shared + text(3, 10)) == 14 * SIZE
    assert worker.found(shared + text(2, 10)) == 6 * SIZE, "its last pages have gone"
    worker.turn(text(8, 40))
    assert worker.found(shared) == 0


def test_a_turn_renews_and_time_ends_the_rank() -> None:
    worker = Worker()
    worker.turn(text(1, 8), "s", ttl_s=10)
    worker.turn(text(1, 9), "s", ttl_s=10)
    assert (len(worker.retention), worker.book.tree.num_kept) == (1, 9)
    worker.retention.sweep()
    assert worker.book.tree.num_kept == 9
    worker.now += 10
    worker.retention.sweep()
    assert (len(worker.retention), worker.book.tree.num_kept) == (0, 0)
    for other in range(2, 20):
        worker.turn(text(other, 5))
    assert worker.found(text(1, 9)) == 0, "they are the oldest again"
    worker.turn(text(1, 8), "s", ttl_s=0)
    assert worker.book.tree.num_kept == 0


def test_an_owner_crowds_out_its_own_sessions() -> None:
    worker = Worker()
    for key in range(1, 20):
        worker.turn(text(key, 6), f"s{key}", "many")
        assert worker.book.tree.num_kept <= PART * NUM_PAGES
    worker.turn(text(50, 6), "one", "few")
    for key in range(20, 40):
        worker.turn(text(key, 6), f"s{key}", "many")
        assert worker.book.tree.num_kept <= PART * NUM_PAGES
    assert worker.found(text(50, 6)) == 24
    plain = text(60, 6)
    worker.turn(plain)
    assert worker.found(plain) == 24, "what has no rank finds room"


@pytest.mark.parametrize("span", [0, 9])
@pytest.mark.parametrize("seed", range(3))
def test_any_mix_keeps_the_book_and_never_refuses_pages(seed: int, span: int) -> None:
    rnd = random.Random(f"{seed} {span}")
    worker = Worker(span=span)
    texts = {key: text(rnd.randint(0, 2), 3) + text(key, 1) for key in range(12)}
    for _ in range(400):
        key = rnd.randrange(12)
        tokens = texts[key] = (texts[key] + text(rnd.randrange(9**6), 1))[: 30 * SIZE]
        if len(tokens) == 30 * SIZE:
            texts[key] = text(rnd.randint(0, 2), 3) + text(key, 1)
        named = rnd.random() < 0.7
        worker.turn(tokens, f"s{key}" * named, f"o{key % 3}", rnd.choice((0.0, 5.0, 50.0)))
        if rnd.random() < 0.1:
            worker.now += rnd.random() * 30
            worker.retention.sweep()
        if rnd.random() < 0.02:
            worker.book.forget()
            assert worker.book.tree.num_kept == 0
    worker.now += 100
    worker.retention.sweep()
    assert (len(worker.retention), worker.book.tree.num_kept) == (0, 0)
