"""Invariants of a worker's page book."""

from collections.abc import Iterable

from worker.cache.book import Hold, PageBook


def check_book(book: PageBook, holds: Iterable[Hold]) -> None:
    """Assert the invariants against all holds that are open."""
    holds = list(holds)
    private = [page for hold in holds for page in hold.private]
    assert len(private) == len(set(private)) == book.num_private
    assert book.num_reserved == sum(hold.num_reserved for hold in holds)
    assert min(book.num_reserved, book.num_available) >= 0
    assert book.num_holds == len(holds)
