"""The KV cache's byte layout: sizes, hash, and that the views lie where the layout says."""

import dataclasses
import mmap
import os

import pytest
import torch

from worker.cache.layout import KVLayout, KVRegion, ModelLayout
from worker.cache.pool import KVPool

REGION = KVRegion(
    name="target",
    num_layers=6,
    num_kv_heads=2,
    head_dim=8,
    num_groups=3,
    page_size=4,
    dtype="float32",
)
DRAFT = dataclasses.replace(REGION, name="draft", num_layers=1, num_groups=1)
TAIL = dataclasses.replace(
    DRAFT, name="tail", num_kv_heads=1, head_dim=24, parts=1, rows="page", dtype="bfloat16"
)
CPU = torch.device("cpu")


def test_sizes_nest():
    assert REGION.layers_per_group == 2
    assert REGION.head_bytes == 2 * 2 * 4 * 8 * 4
    assert REGION.group_bytes == 2 * REGION.head_bytes
    assert REGION.page_bytes == 3 * REGION.group_bytes
    assert KVLayout((REGION, DRAFT)).page_bytes == REGION.page_bytes + DRAFT.page_bytes
    assert dataclasses.replace(REGION, dtype="bfloat16").page_bytes * 2 == REGION.page_bytes
    assert dataclasses.replace(REGION, parts=1).page_bytes * 2 == REGION.page_bytes
    assert TAIL.page_bytes == 24 * 2


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
        dataclasses.replace(REGION, **change)


def test_regions_of_one_name_or_of_two_page_sizes_are_refused():
    with pytest.raises(ValueError, match="distinct names"):
        KVLayout((REGION, REGION))
    with pytest.raises(ValueError, match="one page_size"):
        KVLayout((REGION, dataclasses.replace(DRAFT, page_size=8)))
    with pytest.raises(ValueError, match="only the first"):
        KVLayout((DRAFT, REGION))


def layout_hash(*regions: KVRegion, model: str = "tiny", digest: str = "d") -> str:
    return ModelLayout(regions).identity(model, digest).layout_hash


def test_the_hash_is_stable_and_sees_every_field_and_the_digest_but_no_name():
    same = layout_hash(REGION)
    assert same == layout_hash(dataclasses.replace(REGION), model="another name")
    changes = {
        "name": "other",
        "num_layers": 9,
        "num_kv_heads": 4,
        "head_dim": 16,
        "num_groups": 1,
        "page_size": 8,
        "dtype": "bfloat16",
        "parts": 1,
        "rows": "page",
    }
    assert set(changes) == {field.name for field in dataclasses.fields(REGION)}
    others = [
        layout_hash(dataclasses.replace(REGION, **{name: value})) for name, value in changes.items()
    ]
    others += [layout_hash(REGION, digest="e"), layout_hash(REGION, DRAFT)]
    assert len({same, *others}) == len(others) + 1


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


def test_a_layout_says_what_a_token_takes_by_region():
    """The Qwen3-8B shape in bf16, beside five draft layers of it, or one and its tails."""
    target = KVRegion("target", 36, 8, 128, 4, 64, "bfloat16")
    blocks = KVRegion("draft", 5, 8, 128, 1, 64, "bfloat16")
    found = KVLayout((target, blocks)).describe()
    assert found == "bytes a token: target 147,456, draft 20,480"
    chain = KVRegion("draft", 1, 8, 128, 1, 64, "bfloat16")
    tail = KVRegion("tail", 1, 1, 4096, 1, 64, "bfloat16", parts=1, rows="page")
    found = KVLayout((target, chain, tail)).describe()
    assert found == "bytes a token: target 147,456, draft 4,096, tail 128"


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


def test_a_pool_needs_a_page_beside_the_sink():
    with pytest.raises(ValueError, match="at least 2"):
        KVPool(KVLayout((REGION,)), num_pages=1, device=CPU)
