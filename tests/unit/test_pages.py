"""The page allocator against a model that remembers where each page is."""

import random

import pytest

from worker.cache.pages import FreeRuns, PageAllocator
from worker.errors import OutOfPages


def runs_of(pages: set[int]) -> dict[int, int]:
    """Maximal runs of consecutive ids: first page -> length."""
    return {
        first: next(n for n in range(1, len(pages) + 2) if first + n not in pages)
        for first in pages
        if first - 1 not in pages
    }


@pytest.mark.parametrize("seed", range(3))
def test_runs_stay_maximal_and_the_choice_contiguous(seed: int) -> None:
    rnd = random.Random(seed)
    free, runs = set(range(1, 41)), FreeRuns(1, 40)
    held: list[int] = []
    split = whole = 0
    for _ in range(10_000):
        if free and rnd.random() < 0.4:
            count = rnd.randint(1, min(len(free), 9))
            lengths = runs_of(free)
            pages = runs.take(count)
            assert len(set(pages)) == len(pages) == count
            assert set(pages) <= free
            enough = [n for n in lengths.values() if n >= count]
            if enough and count > 1:  # the shortest run that suffices, from its start
                whole += 1
                assert pages == list(range(pages[0], pages[0] + count))
                assert lengths[pages[0]] == min(enough)
            elif count > 1:  # no more pieces than the longest runs need
                split += 1
                pieces = len(runs_of(set(pages)))
                longest, need = sorted(lengths.values(), reverse=True), 0
                while sum(longest[:need]) < count:
                    need += 1
                assert pieces <= need
            free -= set(pages)
            held += pages
        elif held:
            page = held.pop(rnd.randrange(len(held)))
            runs.add(page)
            free.add(page)
        assert runs.num_pages == len(free)
    assert split > 50
    assert whole > 50


class Model:
    """What the allocator must do, by sets and a step number for each freed page."""

    def __init__(self, num_pages: int) -> None:
        self.held: set[int] = set()
        self.freed_at: dict[int, int] = {page: 0 for page in range(1, num_pages)}
        self.launched = self.settled = 0

    @property
    def cooled(self) -> set[int]:
        return {page for page, step in self.freed_at.items() if step <= self.settled}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_no_page_is_in_two_places_and_none_is_pulled_to_while_it_cools(seed, depth) -> None:
    rnd = random.Random(f"{seed} {depth}")
    num_pages = rnd.choice((8, 33, 64))
    pages, model = PageAllocator(num_pages), Model(num_pages)
    refused_pulls = reused_while_cooling = 0
    for _ in range(10_000):
        action = rnd.random()
        if action < 0.25 and model.launched - model.settled < depth:
            model.launched += rnd.randint(1, 2)
            pages.launched(model.launched)
        elif action < 0.45 and model.settled < model.launched:
            model.settled = rnd.randint(model.settled + 1, model.launched)
            pages.settled(model.settled)
        elif action < 0.75:
            count, for_pull = rnd.randint(0, num_pages // 2), rnd.random() < 0.5
            allowed = model.cooled if for_pull else set(model.freed_at)
            cooling = set(model.freed_at) - model.cooled
            if count > len(allowed):
                with pytest.raises(OutOfPages):
                    pages.take(count, for_pull=for_pull)
                refused_pulls += for_pull and count <= len(model.freed_at)
            else:
                taken = pages.take(count, for_pull=for_pull)
                assert len(set(taken)) == len(taken) == count
                assert set(taken) <= allowed
                reused_while_cooling += len(set(taken) & cooling)
                model.held |= set(taken)
                for page in taken:
                    del model.freed_at[page]
        elif model.held:
            count = rnd.randint(1, len(model.held))
            given = rnd.sample(sorted(model.held), count)
            pages.free(given)
            model.held -= set(given)
            model.freed_at |= dict.fromkeys(given, model.launched)
        assert pages.num_free == len(model.freed_at)
        assert pages.num_pullable == len(model.cooled)
        assert pages.num_free + len(model.held) == num_pages - 1
    assert refused_pulls > 20
    assert reused_while_cooling > 20


def test_page_zero_is_never_handed_out() -> None:
    pages = PageAllocator(5)
    assert sorted(pages.take(4, for_pull=False)) == [1, 2, 3, 4]
    with pytest.raises(OutOfPages):
        pages.take(1, for_pull=False)
    with pytest.raises(AssertionError):
        pages.free([0])
    with pytest.raises(AssertionError, match="the sink and at least one page"):
        PageAllocator(1)


def test_step_numbers_only_ascend() -> None:
    pages = PageAllocator(3)
    pages.launched(2)
    with pytest.raises(AssertionError):
        pages.launched(2)
    with pytest.raises(AssertionError):
        pages.settled(3)
    pages.settled(2)
    with pytest.raises(AssertionError):
        pages.settled(2)
