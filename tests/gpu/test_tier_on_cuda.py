"""The tier below the pool of a GPU: bytes, streams, and pages that are another's meanwhile."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.equivalence.test_tier import NUM, PAGE, computed, one_by_one, prompts
from tests.support.engines import running, value
from tests.support.patience import until
from tests.unit.test_tier_rows import TOKENS, bytes_of, check_bytes, layout, noisy, row_of
from worker.cache.pool import KVPool
from worker.transfer.tier import rows
from worker.transfer.tier.arena import Arena
from worker.transfer.tier.directory import Directory
from worker.transfer.tier.objects import Form, Source
from worker.transfer.tier.rows import Copy, Load, Mover

pytestmark = pytest.mark.gpu(1)
KEY = b"k" * 32
LONG_CYCLES = 2_000_000_000  # about a second of a GPU


@pytest.fixture(params=["host", "disk"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Form], Arena | Directory]:
    def made(form: Form) -> Arena | Directory:
        size = form.object_bytes
        most = 8 * (size + 4096)
        if request.param == "host":
            return Arena(most, size, registered=True)
        return Directory(tmp_path / "tier", form, most, pinned=True)

    return made


def pool_of(dtype: str) -> KVPool:
    return noisy(layout(dtype), torch.device("cuda"))


@pytest.fixture
def pool() -> KVPool:
    return pool_of("bfloat16")


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once a copy has begun, which the device does not do before long."""
    began, copy = threading.Event(), Mover.copy

    def late(mover: Mover, *args: Any, **how: Any) -> None:
        with torch.cuda.stream(mover._stream):
            torch.cuda._sleep(LONG_CYCLES)
        began.set()
        copy(mover, *args, **how)

    monkeypatch.setattr(rows.Mover, "copy", late)
    return began


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_every_byte_of_a_page_and_of_a_snapshot_comes_back(dtype: str, make: Any) -> None:
    check_bytes(pool_of(dtype), make)


def test_copies_do_not_wait_for_a_step_that_runs(pool: KVPool) -> None:
    """Both ways, while the stream of the steps is busy; memory as a row has it."""
    arena = Arena(1 << 20, 1 << 19, registered=True)
    body = arena._object(0)[: pool.layout.page_bytes]
    mover, page = Mover(pool), bytes_of(pool, 3)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG_CYCLES)
    ended = torch.cuda.Event()
    ended.record()
    mover.copy([(Source(KEY, TOKENS, 3), body)], outwards=True)
    mover.copy([(Source(KEY, TOKENS, 5), body)], outwards=False)
    assert not ended.query(), "the copies waited for the step"
    assert bytes(body) == page == bytes_of(pool, 5)
    arena.close()


def test_a_page_that_is_written_again_while_it_is_copied_out_is_not_kept(
    pool: KVPool, make: Any, held_up: threading.Event
) -> None:
    """Law 4: the copy is on the device's queue when the page is freed."""
    row, mark = row_of(pool, make), object()
    marks: dict[int, object] = {3: mark}
    row.offer(Copy(Source(KEY, TOKENS, 3), marks, mark))
    assert held_up.wait(60)
    marks.clear()
    for groups in pool._pages:
        groups[:, 3].fill_(0xFF)
    until(lambda: row.idle)
    assert not row.has(KEY)
    row.close()


def test_a_load_that_was_cut_off_is_over_when_the_device_has_written(
    pool: KVPool, make: Any, held_up: threading.Event
) -> None:
    """Law 2: whoever gets its pages then is their only writer."""
    row, mark = row_of(pool, make), object()
    row.offer(Copy(Source(KEY, TOKENS, 3), {3: mark}, mark))
    until(lambda: row.has(KEY) and row.idle)
    held_up.clear()
    load = Load([(row, Source(KEY, TOKENS, 7))])
    row.load(load)
    assert held_up.wait(60)
    load.cut("late")
    until(lambda: load.is_over)
    for groups in pool._pages:
        groups[:, 7].fill_(0xFF)
    until(lambda: row.idle)
    torch.cuda.synchronize()
    assert set(bytes_of(pool, 7)) == {0xFF}
    row.close()


@pytest.mark.parametrize("kind", ["host", "disk"])
@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_what_is_found_changes_no_token(kind: str, kv: str, tmp_path: Path) -> None:
    """Of a pool that holds two of six prompts, with graphs."""
    tier = {"host_bytes": 8 << 20} if kind == "host" else {"directory": str(tmp_path / "tier")}
    config: dict[str, Any] = {
        "model": {"dtype": "float32"},
        "engine": {"device": "cuda", "num_pages": 26, "max_num_reqs": 8},
        "kv": {"page_size": PAGE, "dtype": kv, "tier": tier},
        "disaggregation": {"mode": "never"},
    }
    with running(config, num_prefill=0) as cluster:
        cold = one_by_one(cluster, prompts(NUM))
        num_cold = computed(cluster)
        assert one_by_one(cluster, prompts(NUM)) == cold
        assert computed(cluster) - num_cold < num_cold / 4
        found = cluster.workers["decode-0"].engine.metrics.tier_tokens(kind)
        assert value(found) > num_cold / 2
