"""The runs that a pull is made of. Every byte of every pair of ranks: test_sources."""

import itertools

import pytest

from worker.cache.layout import KVLayout, KVRegion, ModelLayout, rank_heads
from worker.errors import Incompatible
from worker.transfer.base import Endpoint, RemoteRegion
from worker.transfer.layout import (
    HeadRange,
    PageRun,
    RankPair,
    merge_pages,
    num_pool_pages,
    rank_plan,
)

PAIRS = [(3, 1), (4, 2), (5, 3), (1, 6), (7, 5), (6, 4)]
OURS, THEIRS = 8, 9  # pages


def layout(num_heads: int, num_groups: int, draft_heads: int | None = None) -> KVLayout:
    target = KVRegion("target", 4, num_heads, 2, num_groups, 2, "float16")
    if draft_heads is None:
        return KVLayout((target,))
    draft = KVRegion("draft", 3, draft_heads, 2, 1, 2, "float16", parts=1)
    return KVLayout((target, draft, KVRegion("tail", 1, 1, 6, 1, 2, "float16", 1, "page")))


def like(local: KVLayout) -> RankPair:
    """A peer of the same layout, from which all heads come."""
    whole = [region.num_kv_heads for region in local.regions]
    return RankPair(local, local, OURS, THEIRS, rank_plan(whole, 1, 0, 1)[0])


def test_merge_pages_joins_what_is_contiguous_on_both_sides() -> None:
    assert merge_pages(PAIRS) == [
        PageRun(3, 1, 3),
        PageRun(1, 6, 1),
        PageRun(7, 5, 1),
        PageRun(6, 4, 1),
    ]
    assert merge_pages([]) == []


def test_pages_become_one_run_for_each_group_and_contiguous_stretch() -> None:
    one = layout(num_heads=2, num_groups=2)
    size, pairs = one.regions[0].group_bytes, [(2, 5), (3, 6), (4, 7)]
    runs = like(one).runs(pairs)
    second = (0, (8 + 2) * size, (9 + 5) * size, 3 * size)
    assert runs == [(0, 2 * size, 5 * size, 3 * size), second]
    assert like(one).runs(pairs, range(2)) == runs
    assert like(one).runs(pairs, range(1, 2)) == [second]
    assert like(one).runs([]) == []


@pytest.mark.parametrize("pair", [(-1, 0), (8, 0), (0, -1), (0, 9)])
def test_a_page_outside_a_pool_is_a_bug(pair: tuple[int, int]) -> None:
    """Within its region it may well be: there the next group begins."""
    one = layout(num_heads=2, num_groups=2)
    for pairs in ([pair], [(3, 3), pair]):
        with pytest.raises(AssertionError, match="PageRun"):
            like(one).runs(pairs, range(1))
    assert like(one).runs([(7, 8)], range(1))


@pytest.mark.parametrize(("more", "pages"), [((0, 0), 8), ((1, 0), None), ((0, 60), None)])
def test_pages_are_counted_by_the_bytes_of_every_region(more, pages) -> None:
    one = layout(num_heads=2, num_groups=2, draft_heads=2)
    held = [8 * region.page_bytes + n for region, n in zip(one.regions, (*more, 0), strict=True)]
    regions = tuple(RemoteRegion(str(i), 0, num_bytes, None) for i, num_bytes in enumerate(held))
    endpoint = Endpoint("shm", "shm", "", "", 1, 1, regions)
    if pages is not None:
        assert num_pool_pages(one, endpoint) == pages
        return
    with pytest.raises(Incompatible, match="not the same number of pages"):
        num_pool_pages(one, endpoint)


def test_equal_tensor_parallelism_pulls_whole_pages_from_one_rank() -> None:
    for rank in range(4):
        plan = rank_plan((8,), 4, rank, 4)
        assert plan == {rank: (HeadRange(0, 0, 2),)}
        one = layout(num_heads=2, num_groups=2)
        runs = RankPair(one, one, OURS, THEIRS, plan[rank]).runs(PAIRS)
        assert len(runs) == one.num_groups * len(merge_pages(PAIRS))


def test_copies_of_a_head_share_the_load() -> None:
    sources = [next(iter(rank_plan((2,), 8, rank, 8))) for rank in range(8)]
    assert sorted(sources) == list(range(8))
    sources = [next(iter(rank_plan((2,), 4, rank, 8))) for rank in range(4)]
    assert sources == [0, 2, 4, 6]
    sources = [next(iter(rank_plan((2,), 8, rank, 4))) for rank in range(8)]
    assert sources == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("num_heads", [1, 2, 4, 8])
def test_all_regions_of_a_rank_come_from_as_few_ranks_as_can_be(num_heads: int) -> None:
    """Each remote rank takes a connection, and mooncake takes an engine for it."""
    for local_tp, remote_tp in itertools.product([1, 2, 4, 8], repeat=2):
        num_ranks = max(1, remote_tp // local_tp)
        for rank in range(local_tp):
            begin = rank * remote_tp // local_tp
            plan = rank_plan((num_heads, 2, 1), local_tp, rank, remote_tp)
            assert set(plan) <= set(range(begin, begin + num_ranks))


def test_a_head_range_of_a_page_is_one_run_per_group() -> None:
    ours, theirs = layout(num_heads=1, num_groups=2), layout(num_heads=4, num_groups=2)
    pairs, heads = [(1, 2), (2, 3)], (HeadRange(0, 3, 1),)
    runs = RankPair(ours, theirs, OURS, THEIRS, heads).runs(pairs)
    assert [run.num_bytes for run in runs] == [ours.regions[0].head_bytes] * 4


def test_heads_that_no_ranks_can_share_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be shared"):
        rank_heads(6, 4, 0)
    with pytest.raises(ValueError, match="no rank"):
        rank_heads(4, 2, 2)


def test_a_rank_s_share_of_a_layout_has_its_heads_of_every_region() -> None:
    whole = ModelLayout(layout(num_heads=4, num_groups=2, draft_heads=2).regions)
    assert whole.share(1, 0).regions == whole.regions
    assert whole.share(2, 1) == layout(num_heads=2, num_groups=2, draft_heads=1)
    assert whole.share(4, 3) == layout(num_heads=1, num_groups=2, draft_heads=1)  # a copy
    with pytest.raises(ValueError, match="cannot be shared"):
        whole.share(3, 0)
