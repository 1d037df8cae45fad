"""Which bytes of a peer's memory belong where in ours: arithmetic on two KV layouts.

Regions are group first (ADR 0018): a layer group of a run of pages is one range of bytes. Where the
two sides have different numbers of tensor-parallel ranks, a range of kv heads is one range in a
page and group. Nothing is staged or cut by token. The meaning of a head's bytes plays no role.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from worker.cache.layout import KVLayout, rank_heads
from worker.errors import Incompatible
from worker.transfer.base import Endpoint, Run

Pages = Sequence[tuple[int, int]]  # (local page, remote page)


class PageRun(NamedTuple):
    """`num_pages` pages that follow each other on both sides."""

    local_page: int
    remote_page: int
    num_pages: int


class HeadRange(NamedTuple):
    """`num_heads` kv heads: where they begin among a side's own heads."""

    local_first: int
    remote_first: int
    num_heads: int


# By region, then of the state if there is one; None: no head of it.
RegionHeads = tuple[HeadRange | None, ...]


def num_pool_pages(layout: KVLayout, endpoint: Endpoint) -> int:
    """How many pages of `layout` an endpoint's owner has; Incompatible if its regions disagree."""
    sizes = [region.num_bytes for region in endpoint.regions]
    if layout.state is not None and (not sizes or sizes.pop() % layout.state.slot_bytes):
        raise Incompatible("its last region is not a number of slots of state")
    num_pages = sizes[0] // layout.target.page_bytes if sizes else 0
    if sizes != [num_pages * region.page_bytes for region in layout.regions]:
        raise Incompatible(f"regions of {sizes} bytes are not the same number of pages each")
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
) -> dict[int, RegionHeads]:
    """From which remote ranks `local_rank` pulls, and which heads, by region.

    Every head of the local rank comes from exactly one remote rank. Where several remote ranks hold
    copies of a head, the local ranks that need it are spread over the copies, by their own place.
    So all regions of a rank come from the same ranks: max(1, remote_tp / local_tp) of them, where
    one of the two divides the other.

    num_kv_heads: of the whole model, by region, then key heads of the state. Raises as rank_heads.
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


@dataclass(frozen=True, slots=True)
class RankPair:
    """The pools of a local and a remote rank, and the heads that the local one pulls.

    The layouts are shares of one model, so they differ at most in their numbers of heads. Page p of
    layer group g of a region begins at (g * pages of that side + p) * group_bytes.
    """

    local: KVLayout
    remote: KVLayout
    local_pages: int  # of a side's pool, page 0 included
    remote_pages: int
    heads: RegionHeads
    remote_slots: int = 0  # of state

    def has(self, pairs: Pages, states: Pages = ()) -> bool:
        """Whether the remote rank has all of these pages and slots."""
        return all(0 <= page < self.remote_pages for _, page in pairs) and all(
            0 <= slot < self.remote_slots for _, slot in states
        )

    def runs(self, pairs: Pages, groups: range | None = None) -> list[Run]:
        """The runs that copy pages of all regions, as large as the layout allows.

        pairs: a local page once. groups: layer groups of the first region, None for all. Other
        regions, such as a drafter's, go with the last group, and must be final by then.
        """
        num_groups = self.local.num_groups
        wanted = range(num_groups) if groups is None else groups
        assert wanted.step == 1, wanted
        assert 0 <= wanted.start <= wanted.stop <= num_groups, wanted
        page_runs = merge_pages(pairs)
        for run in page_runs:  # a page beyond a group's last one would be the next group's page 0
            assert 0 <= run.local_page <= self.local_pages - run.num_pages, (run, self)
            assert 0 <= run.remote_page <= self.remote_pages - run.num_pages, (run, self)
        beside = range(1) if num_groups - 1 in wanted else range(0)
        return [
            run
            for index in range(len(self.local.regions))
            for run in self._region_runs(index, page_runs, beside if index else wanted)
        ]

    def state_runs(self, pairs: Pages) -> list[Run]:
        """The runs that copy slots of state: (local slot, remote slot)."""
        if not pairs or (heads := self.heads[-1]) is None:
            return []
        here, there = self.local.state, self.remote.state
        assert here is not None
        assert there is not None
        assert here.head_bytes == there.head_bytes
        return [
            Run(
                len(self.local.regions),
                local * here.slot_bytes + heads.local_first * here.head_bytes,
                remote * there.slot_bytes + heads.remote_first * here.head_bytes,
                heads.num_heads * here.head_bytes,
            )
            for local, remote in pairs
        ]

    def _region_runs(
        self, index: int, page_runs: Sequence[PageRun], groups: range
    ) -> Iterator[Run]:
        here, there = self.local.regions[index], self.remote.regions[index]
        heads = self.heads[index]
        if heads is None:
            return
        whole = heads.num_heads == here.num_kv_heads == there.num_kv_heads
        local_first = heads.local_first * here.head_bytes
        remote_first = heads.remote_first * here.head_bytes
        for group in groups:
            for local_page, remote_page, num_pages in page_runs:
                local_page += group * self.local_pages
                remote_page += group * self.remote_pages
                size = num_pages * here.group_bytes if whole else heads.num_heads * here.head_bytes
                for page in range(1 if whole else num_pages):
                    yield Run(
                        index,
                        (local_page + page) * here.group_bytes + local_first,
                        (remote_page + page) * there.group_bytes + remote_first,
                        size,
                    )
