"""Which bytes of the peer's memory belong where in ours: pure arithmetic on two KV layouts.

Regions are group first (ADR 0018). A layer group of a run of pages is one range, so whole pages
are one range in each group. Where the two sides have different numbers of tensor-parallel ranks, a
range of kv heads is one range in each page and group. Nothing is staged or cut by token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from worker.cache.layout import KVLayout, KVRegion, rank_heads
from worker.errors import Incompatible
from worker.transfer.base import Endpoint, Run

Pages = Sequence[tuple[int, int]]  # (local page, remote page)


class PageRun(NamedTuple):
    """`num_pages` pages that follow each other on both sides."""

    local_page: int
    remote_page: int
    num_pages: int


class PoolPages(NamedTuple):
    """Pages of each side's pool, the sink included; they say where a group begins."""

    local: int
    remote: int


class HeadRange(NamedTuple):
    """`num_heads` kv heads: where they begin among each side's own heads."""

    local_first: int
    remote_first: int
    num_heads: int


def num_pool_pages(layout: KVLayout, endpoint: Endpoint) -> int:
    """How many pages of `layout` the owner of `endpoint` has registered.

    Raises:
        Incompatible: no whole number, or not the same number in every region.
    """
    held = [each.num_bytes for each in endpoint.regions]
    num_pages = held[0] // layout.regions[0].page_bytes if held else 0
    if held != [num_pages * region.page_bytes for region in layout.regions]:
        raise Incompatible(f"regions of {held} bytes are not the same number of pages each")
    return num_pages


def merge_pages(pairs: Pages) -> list[PageRun]:
    """`pairs` in their order, neighbours that are contiguous on both sides joined."""
    runs: list[PageRun] = []
    for local, remote in pairs:
        if runs:
            first_local, first_remote, n = runs[-1]
            if (local, remote) == (first_local + n, first_remote + n):
                runs[-1] = PageRun(first_local, first_remote, n + 1)
                continue
        runs.append(PageRun(local, remote, 1))
    return runs


def rank_plan(
    num_kv_heads: Sequence[int], local_tp: int, local_rank: int, remote_tp: int
) -> dict[int, tuple[HeadRange | None, ...]]:
    """From which remote ranks `local_rank` pulls, and which heads of each region.

    Every head of the local rank comes from exactly one remote rank. Where several remote ranks hold
    copies of a head, the local ranks that need it are spread over them, each to the copy that stands
    where it stands itself. So all regions of a rank come from the same ranks, max(1, remote_tp /
    local_tp) of them where one of the two divides the other.

    Args:
        num_kv_heads: of the whole model, per region of the layout.

    Returns:
        remote rank -> for each region the heads to pull from that rank, None for none.
    """
    plan: dict[int, list[HeadRange | None]] = {}
    for region, total in enumerate(num_kv_heads):
        wanted = rank_heads(total, local_tp, local_rank)
        num_copies = max(1, remote_tp // total)
        num_local_copies = max(1, local_tp // total)
        copy = local_rank % num_local_copies * num_copies // num_local_copies
        for remote_rank in range(copy, remote_tp, num_copies):
            held = rank_heads(total, remote_tp, remote_rank)
            first = max(wanted.start, held.start)
            num_heads = min(wanted.stop, held.stop) - first
            if num_heads > 0:
                ranges = plan.setdefault(remote_rank, [None] * len(num_kv_heads))
                ranges[region] = HeadRange(first - wanted.start, first - held.start, num_heads)
    return {rank: tuple(ranges) for rank, ranges in plan.items()}


def plan_runs(
    layout: KVLayout,
    pairs: Pages,
    pool_pages: PoolPages,
    groups: range | None = None,
    *,
    remote: KVLayout | None = None,
    heads: Sequence[HeadRange | None] | None = None,
) -> list[Run]:
    """The runs that copy pages of all regions from a peer.

    Args:
        layout: ours.
        pairs: (local page, remote page), each local page once.
        pool_pages: of the two sides; no page of `pairs` is beyond them.
        groups: layer groups of the first region, None for all. The other regions, such as a
            drafter's, go with the last group, so they must be final when that is announced.
        remote: the peer's layout, None if it is the same.
        heads: for each region the heads to copy, None for no heads. Without `heads` all are
            copied, and both sides must hold the same.
    """
    remote = remote or layout
    assert len(remote.regions) == len(layout.regions)
    num_groups = layout.num_groups
    wanted = range(num_groups) if groups is None else groups
    assert wanted.step == 1, wanted
    assert 0 <= wanted.start <= wanted.stop <= num_groups, wanted
    page_runs = merge_pages(pairs)
    for run in page_runs:  # a page beyond a group's last one would be the next group's sink
        assert 0 <= run.local_page <= pool_pages.local - run.num_pages, (run, pool_pages)
        assert 0 <= run.remote_page <= pool_pages.remote - run.num_pages, (run, pool_pages)
    runs: list[Run] = []
    for index, (here, there) in enumerate(zip(layout.regions, remote.regions, strict=True)):
        span = HeadRange(0, 0, here.num_kv_heads) if heads is None else heads[index]
        if span is None:
            continue
        _check_heads(here, there, span)
        of_region = _region_groups(here, num_groups, wanted)
        for each in _ranges(here, there, page_runs, pool_pages, of_region, span):
            runs.append(Run(index, *each))
    return runs


def _region_groups(region: KVRegion, num_groups: int, wanted: range) -> range:
    """`wanted` groups of the first region, as groups of `region`."""
    if region.num_groups == num_groups:
        return wanted
    return range(1) if num_groups - 1 in wanted else range(0)


def _check_heads(here: KVRegion, there: KVRegion, span: HeadRange) -> None:
    """Assert that the two regions differ at most in their heads, and that both hold `span`."""
    assert here.head_bytes == there.head_bytes, f"{here} and {there} do not match"
    assert here.num_groups == there.num_groups, f"{here} and {there} do not match"
    assert 0 <= span.local_first <= here.num_kv_heads - span.num_heads, (here, span)
    assert 0 <= span.remote_first <= there.num_kv_heads - span.num_heads, (there, span)


def _ranges(
    here: KVRegion,
    there: KVRegion,
    page_runs: Sequence[PageRun],
    pool_pages: PoolPages,
    groups: range,
    span: HeadRange,
) -> Iterator[tuple[int, int, int]]:
    """(local offset, remote offset, num_bytes), as large as the layout allows."""
    all_heads = span.num_heads == here.num_kv_heads == there.num_kv_heads
    for group in groups:
        for local_page, remote_page, num_pages in page_runs:
            local_at = (group * pool_pages.local + local_page) * here.group_bytes
            remote_at = (group * pool_pages.remote + remote_page) * there.group_bytes
            if all_heads:
                yield local_at, remote_at, num_pages * here.group_bytes
                continue
            local_at += span.local_first * here.head_bytes
            remote_at += span.remote_first * there.head_bytes
            for i in range(num_pages):
                yield (
                    local_at + i * here.group_bytes,
                    remote_at + i * there.group_bytes,
                    span.num_heads * here.head_bytes,
                )
