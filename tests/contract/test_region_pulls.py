"""Pages with three regions (target, draft, tail) from pool to pool, by every transport."""

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.support import kv_sources
from tests.support.kv_sources import CONNECT_S, Serves, registered
from tests.support.pulls import OK, ended
from worker.cache.layout import KVLayout, KVRegion
from worker.cache.pool import KVPool
from worker.transfer.base import Peer
from worker.transfer.layout import RankPair, num_pool_pages, rank_plan

CPU = torch.device("cpu")
LAYOUT = KVLayout(
    (
        KVRegion("target", 6, 2, 16, 3, 8, "bfloat16"),
        KVRegion("draft", 2, 4, 8, 1, 8, "float32"),
        KVRegion("tail", 1, 1, 48, 1, 8, "bfloat16", parts=1, rows="page"),
    )
)
OURS, THEIRS = 40, 57  # pages
NUM_GROUPS = LAYOUT.num_groups


def filled(num_pages: int, seed: int) -> KVPool:
    pool = KVPool(LAYOUT, num_pages, CPU)
    generator = torch.Generator().manual_seed(seed)
    for cache in pool.caches():
        cache.normal_(generator=generator)
    return pool


def served() -> Serves:
    pool = filled(THEIRS, 1)
    return pool.memory(), pool


@pytest.fixture(scope="module", params=[("shm", "shm"), ("mooncake", "tcp")], ids="/".join)
def linked(request: pytest.FixtureRequest) -> Iterator[tuple[KVPool, Peer, RankPair]]:
    """Our pool, and a connection to the source's."""
    source, pool = kv_sources.source(request.param, served), filled(OURS, 2)
    transport = registered(request.param, pool.memory())
    peer = transport.connect(source.endpoint, CONNECT_S)
    assert num_pool_pages(LAYOUT, source.endpoint) == THEIRS
    whole = rank_plan([region.num_kv_heads for region in LAYOUT.regions], 1, 0, 1)[0]
    yield pool, peer, RankPair(LAYOUT, LAYOUT, OURS, THEIRS, whole)
    peer.close()
    transport.close()
    source.kill()
    pool.close()


def by_group(pool: KVPool, group: int) -> list[Tensor]:
    """The views that travel with a layer group: its layers' and, with the last, all others."""
    target = pool.region()
    layers = range(group * target.layers_per_group, (group + 1) * target.layers_per_group)
    found = [part for layer in layers for part in pool.layer(layer)]
    if group == NUM_GROUPS - 1:
        found += [part for layer in range(2) for part in pool.layer(layer, "draft")]
        found.append(pool.page_rows("tail"))
    return found


@pytest.mark.parametrize("groups", [None, range(2), range(2, 3), range(1, 1)])
def test_pulled_pages_are_the_peer_s_in_every_region_and_no_others_change(linked, groups) -> None:
    pool, peer, pair = linked
    source, before = filled(THEIRS, 1), filled(OURS, 2)
    for cache, old in zip(pool.caches(), before.caches(), strict=True):
        cache.copy_(old)
    rng = random.Random(7)
    here, there = (rng.sample(range(1, num), 20) for num in (OURS, THEIRS))
    here[3:9], there[3:9] = range(here[3], here[3] + 6), range(there[3], there[3] + 6)
    pairs = {ours: theirs for ours, theirs in zip(here, there, strict=True)
             if ours < OURS and theirs < THEIRS}  # fmt: skip
    pull = peer.pull(pair.runs(list(pairs.items()), groups))
    assert ended(pull) is OK
    wanted = range(NUM_GROUPS) if groups is None else groups
    for group in range(NUM_GROUPS):
        views = (by_group(each, group) for each in (pool, source, before))
        for now, theirs, old in zip(*views, strict=True):
            for page in range(OURS):
                pulled = group in wanted and page in pairs
                expected = theirs[pairs[page]] if pulled else old[page]
                assert torch.equal(now[page], expected), (group, page)
    whole = LAYOUT.page_bytes * len(pairs)
    last = sum(region.page_bytes for region in LAYOUT.regions[1:]) * len(pairs)
    per_group = LAYOUT.region().group_bytes * len(pairs)
    assert pull.num_bytes == len(wanted) * per_group + last * (NUM_GROUPS - 1 in wanted)
    assert groups is not None or pull.num_bytes == whole
    source.close()
    before.close()
