"""The KV cache's byte layout: sizes, hash, that the views lie where it says, and runs of pulls.

Every byte of every pair of ranks: test_sources.
"""

import itertools
import mmap
import os
from dataclasses import fields, replace

import pytest
import torch

from worker.cache.layout import KVLayout, KVRegion, ModelLayout, StateRegion, rank_heads
from worker.cache.pool import KVPool
from worker.transfer.layout import RankPair, merge_pages, rank_plan

REGION = KVRegion("target", 6, 2, head_dim=8, num_groups=3, page_size=4, dtype="float32")
DRAFT = replace(REGION, name="draft", num_layers=1, num_groups=1)
TAIL = replace(
    DRAFT, name="tail", num_kv_heads=1, head_dim=24, parts=1, rows="page", dtype="bfloat16"
)
CPU = torch.device("cpu")
NAMES = "float32", "bfloat16"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_groups": 4}, "num_groups 4 does not divide num_layers 6"),
        ({"page_size": 0}, "page_size must be at least 1"),
        ({"parts": 3}, "parts must be 1 or 2"),
        ({"dtype": "int3"}, "dtype 'int3' is not one of: float32"),
    ],
)
def test_a_wrong_region_is_refused_by_field(change, message):
    with pytest.raises(ValueError, match=message):
        replace(REGION, **change)


def test_regions_of_one_name_or_of_two_page_sizes_are_refused():
    with pytest.raises(ValueError, match="distinct names"):
        KVLayout((REGION, REGION))
    with pytest.raises(ValueError, match="one page_size"):
        KVLayout((REGION, replace(DRAFT, page_size=8)))
    with pytest.raises(ValueError, match="only the first"):
        KVLayout((DRAFT, REGION))


def layout_hash(*regions: KVRegion, model: str = "tiny", digest: str = "d") -> str:
    return ModelLayout(regions).identity(model, digest).layout_hash


def test_the_hash_is_stable_and_sees_every_field_and_the_digest_but_no_name():
    same = layout_hash(REGION)
    assert same == layout_hash(replace(REGION), model="another name")
    changes = {
        "name": "other", "num_layers": 9, "num_kv_heads": 4, "head_dim": 16, "num_groups": 1,
        "page_size": 8, "dtype": "bfloat16", "parts": 1, "rows": "page",
    }  # fmt: skip
    assert set(changes) == {field.name for field in fields(REGION)}
    others = [layout_hash(replace(REGION, **{name: value})) for name, value in changes.items()]
    others += [layout_hash(REGION, digest="e"), layout_hash(REGION, DRAFT)]
    assert len({same, *others}) == len(others) + 1


def test_the_hash_sees_the_dtype_of_states_but_not_that_of_all_before():
    state = StateRegion(2, 2, 2, 32, 32, "bfloat16")
    of = [ModelLayout((REGION,), replace(state, state_dtype=dtype)) for dtype in NAMES]
    hashes = [each.identity("tiny", "d").layout_hash for each in of]
    assert hashes[0] == "128f49e8d0764894"
    assert hashes[0] != hashes[1]
    slots = [each.share(2, 1).state.slot_bytes for each in of]
    inputs = 2 * 3 * (2 * 32 + 2 * 32) * 2
    assert slots == [2 * 2 * 32 * 32 * size + inputs for size in (4, 2)]


def test_a_refusal_names_both_models_or_both_layouts():
    ours = ModelLayout((REGION,)).identity("tiny", "1111")
    other = ours.explain(ModelLayout((REGION,)).identity("tuned", "2222"))
    for each in ("'tiny' (1111)", "'tuned' (2222)", "weights"):
        assert each in other
    shaped = ModelLayout((REGION, DRAFT)).identity("tuned", "1111")
    for each in (ours.layout_hash, shaped.layout_hash, "page_size"):
        assert each in ours.explain(shaped)


def test_every_element_lies_at_its_documented_byte_offset():
    num_pages = 5
    pool = KVPool(KVLayout((REGION,)), num_pages, device=CPU)
    for layer_id in range(6):
        for kv, view in enumerate(pool.layer(layer_id)):
            assert view.shape == (num_pages, 2, 4, 8)
            code = torch.arange(view.numel()).view(view.shape) + 1000 * (2 * layer_id + kv)
            view.copy_(code)
    (memory,) = pool.memory()
    with mmap.mmap(memory.fd, memory.num_bytes) as mapping:
        flat = torch.tensor(memoryview(mapping).cast("f").tolist())
    for layer_id in range(6):
        group, within = divmod(layer_id, 2)
        for page, head, token, kv in ((0, 0, 0, 0), (1, 1, 2, 0), (2, 0, 3, 1), (4, 1, 3, 1)):
            offset = (
                (group * num_pages + page) * REGION.group_bytes
                + head * REGION.head_bytes
                + ((within * 2 + kv) * 4 + token) * 8 * 4
            )
            row = ((page * 2 + head) * 4 + token) * 8 + 1000 * (2 * layer_id + kv)
            assert flat[offset // 4 : offset // 4 + 8].tolist() == list(range(row, row + 8))
    pool.close()


def test_a_region_of_one_row_a_page_is_a_matrix_of_them():
    num_pages = 5
    pool = KVPool(KVLayout((REGION, DRAFT, TAIL)), num_pages, device=CPU)
    rows = pool.page_rows("tail")
    assert (rows.shape, rows.dtype) == ((num_pages, 24), torch.bfloat16)
    rows.copy_(torch.arange(num_pages * 24).view(num_pages, 24))
    target, draft, tail = pool.memory()
    assert tail.num_bytes == num_pages * TAIL.page_bytes
    with mmap.mmap(tail.fd, tail.num_bytes) as mapping:
        held = torch.frombuffer(bytearray(mapping[:]), dtype=torch.bfloat16)
    assert held.tolist() == list(range(num_pages * 24))
    assert not any(cache.any() for cache in pool.caches()[:-1]), "no other region has changed"
    assert sum(each.numel() * each.element_size() for each in pool.caches()) == sum(
        region.num_bytes for region in (target, draft, tail)
    )
    for wrong in ("target", "draft"):
        with pytest.raises(ValueError, match="unpack"):
            pool.page_rows(wrong)
    assert [len(pool.layer(0, region.name)) for region in (REGION, DRAFT, TAIL)] == [2, 2, 1]
    pool.close()


def test_a_pool_is_zeroed_shared_by_fd_and_leaves_nothing_behind():
    pool = KVPool(KVLayout((REGION, DRAFT)), num_pages=2, device=CPU)
    target, draft = pool.memory()
    assert (target.name, draft.name) == ("target", "draft")
    assert target.num_bytes == 2 * REGION.page_bytes
    assert not pool.layer(5)[1].any()
    assert pool.layer(0, "draft")[0].shape == (2, 2, 4, 8)
    assert target.address == pool.layer(0)[0].data_ptr()
    with mmap.mmap(target.fd, target.num_bytes) as other:
        other[:4] = b"\x00\x00\x80\x3f"
    assert pool.layer(0)[0][0, 0, 0, 0] == 1.0
    for region in (target, draft):  # which have a name in no directory
        assert os.readlink(f"/proc/self/fd/{region.fd}").startswith("/memfd:")
    fd = target.fd
    pool.close()
    pool.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


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
    assert merge_pages(PAIRS) == [(3, 1, 3), (1, 6, 1), (7, 5, 1), (6, 4, 1)]
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


def test_heads_that_no_ranks_can_share_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be shared"):
        rank_heads(6, 4, 0)
    with pytest.raises(ValueError, match="no rank"):
        rank_heads(4, 2, 2)
