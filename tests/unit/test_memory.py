"""What a worker may take of a device, and that workers of one device are built in turn."""

import os
import secrets
import signal
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from tests.support.engines import worker_config
from tests.support.patience import HANG_S
from tests.support.processes import FORKED, fork
from worker.cache.layout import KVLayout, KVRegion
from worker.config import Machine, WorkerConfig
from worker.config.checkpoint.shape import read_model_shape
from worker.errors import UserError
from worker.start.build import Place, build_engine
from worker.start.load import run_largest_steps
from worker.start.memory import (
    GIB,
    GROUP_FILES,
    DeviceShare,
    host_memory,
    process_lock,
    reqs_held,
    wait_for_free,
    with_penalty_rows,
)
from worker.start.tier import check_tier


def share(
    fraction: float, *, free: float, weights: float = 15.0, reserve: float = 2.0
) -> DeviceShare:
    return DeviceShare(140 * GIB, int(free * GIB), int(weights * GIB), int(reserve * GIB), fraction)


@pytest.mark.parametrize("version", [1, 2])
def test_host_memory_is_what_the_container_leaves(version: int, tmp_path: Path) -> None:
    """The least of its group, of those above it, and of the host; page cache can be dropped."""
    limit_name, used_name, cache_name = GROUP_FILES[version]
    own, root = tmp_path / "own", tmp_path / ("memory" if version == 1 else "")
    own.write_text("9:cpu,cpuacct:/a/b\n" + ("4:memory:/a/b\n" if version == 1 else "0::/a/b\n"))

    def group(path: str, limit: str, used: int = 0, cache: int = 0) -> None:
        (root / path).mkdir(parents=True, exist_ok=True)
        for name, text in (
            (limit_name, limit),
            (used_name, used),
            ("memory.stat", f"x 1\n{cache_name} {cache}\n"),
        ):
            (root / path / name).write_text(str(text))

    whole, why = host_memory(tmp_path, own)
    assert (whole > 0, why) == (True, "free on this host")
    group("a/b", str(5000), 3000, 500)
    assert host_memory(tmp_path, own)[0] == 2500
    group("a", str(4000), 3000)
    left, why = host_memory(tmp_path, own)
    assert left == 1000
    assert f"a/{limit_name}" in why
    unlimited = "max" if version == 2 else str(2**63 - 4096)
    group("a", unlimited)
    group("a/b", unlimited)
    assert host_memory(tmp_path, own)[1] == "free on this host"
    own.write_text("4:memory:/host/path\n" if version == 1 else "0::/host/path\n")
    group("", str(7000), 6000)
    assert host_memory(tmp_path, own)[0] == 1000, "a container sees its own group as the root"


def test_a_tier_that_no_host_has_room_for_is_refused() -> None:
    config = worker_config("decode", {"kv": {"tier": {"host_bytes": 1 << 60}}})
    with pytest.raises(UserError, match=r"host_bytes: .* GiB a rank.*lower it"):
        check_tier(config, read_model_shape(config.model.directory))


@pytest.mark.parametrize(
    ("fraction", "free", "gib"),
    [
        (0.85, 124, 102),  # a worker alone
        (0.45, 124, 46),  # of two that share, the first: the other has nothing yet
        (0.45, 124 - 63, 46),  # the second: the other holds all of its share
        (0.1, 124, -3),  # weights beyond the share
    ],
)
def test_a_worker_gets_what_its_share_leaves_whoever_is_first(fraction, free, gib) -> None:
    assert share(fraction, free=free).for_pool() == pytest.approx(gib * GIB, abs=2)


def test_a_share_that_others_hold_is_an_error_with_the_numbers() -> None:
    with pytest.raises(
        UserError, match=r"0\.85 of 140\.00 GiB is 119\.00 .* 15\.00.*5\.00 are free"
    ):
        share(0.85, free=5).for_pool()


def test_memory_that_comes_back_is_waited_for_but_not_for_ever() -> None:
    left = iter([10, 10, 99, 100])
    assert wait_for_free(100, lambda: next(left), HANG_S)
    assert next(left, None) is None
    assert not wait_for_free(100, lambda: 99, 0.2)


def on_cuda(**engine: object) -> WorkerConfig:
    """As a worker on a GPU has it when its weights are loaded."""
    tree = WorkerConfig.model_validate({"role": "decode", "engine": engine})
    machine = Machine("cuda", 8)
    return tree.resolved(machine, model_max_len=40_960, model_dtype="bfloat16")


QWEN3_8B = KVLayout((KVRegion("target", 36, 8, 128, 1, 64, "bfloat16"),))


@pytest.mark.parametrize(
    ("gib", "num_reqs"),
    [
        (102, 256),  # an H200 to itself
        (43, 256),  # half of one
        (29, 192),  # 144 MiB a request
        (4, 64),  # a card of 24 GiB: 28 requests of 1024 tokens, but more short ones
        (-1, 64),  # no room at all, which num_pages says
    ],
)
def test_a_batch_is_what_the_memory_holds(gib: int, num_reqs: int) -> None:
    held = reqs_held(on_cuda(), gib * GIB, QWEN3_8B)
    assert held == num_reqs
    assert held * 144 * (1 << 20) <= gib * GIB or held == 64


@pytest.mark.parametrize(
    ("asked", "all_requests", "num_rows"),
    [("auto", False, 16), ("auto", True, 200), (3, True, 3), (3, False, 3)],
)
def test_where_each_request_has_a_penalty_none_waits_for_a_slot(
    asked, all_requests, num_rows
) -> None:
    config = on_cuda(max_num_reqs=200, penalty_rows=asked)
    config = with_penalty_rows(config, all_requests=all_requests)
    assert config.engine.penalty_rows == num_rows


def hold(name: str, began: Event, inside: Event, leave: Event) -> None:
    began.set()
    with process_lock(name, "a test"):
        inside.set()
        leave.wait(HANG_S)


@pytest.mark.parametrize("end", ["leaves", "is killed"])
def test_one_process_at_a_time_is_inside(end: str) -> None:
    name = f"kvlane-test-{secrets.token_hex(8)}"
    began, inside, leave = ([FORKED.Event() for _ in range(2)] for _ in range(3))
    first = fork(hold, name, began[0], inside[0], leave[0])
    assert inside[0].wait(HANG_S)
    second = fork(hold, name, began[1], inside[1], leave[1])
    assert began[1].wait(HANG_S)
    assert not inside[1].wait(1.0)
    if end == "leaves":
        leave[0].set()
    else:
        os.kill(first.pid, signal.SIGKILL)
    assert inside[1].wait(HANG_S)
    leave[1].set()
    for process in (first, second):
        process.join(HANG_S)
    assert second.exitcode == 0


@pytest.mark.parametrize(("rows", "num"), [(4, 17), (64, 32)])
def test_snapshots_are_an_eighth_of_the_pool_or_half_of_the_rows(rows: int, num: int) -> None:
    """However few requests run at a time; pages give way to them."""
    engine = {"device": "cpu", "max_num_reqs": rows, "threads": 1, "cpu_pool_bytes": 8 << 20}
    config = worker_config("decode", {"model": {"path": "tiny-hybrid"}, "engine": engine})
    made = build_engine(config, Place("decode-0", "1", "127.0.0.1"))
    assert made.book.snapshots.num_slots == num
    assert 7 << 20 < sum(region.num_bytes for region in made.pool.memory()) <= 8 << 20
    made.close()


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_the_largest_steps_touch_nothing_but_the_sink(role: str) -> None:
    """They size a GPU's pool; here on the CPU, by the same code."""
    config = worker_config(
        role, {"engine": {"device": "cpu", "num_pages": 20, "max_num_reqs": 5, "threads": 1}}
    )
    engine = build_engine(config, Place(f"{role}-0", "1", "127.0.0.1"))
    runner = engine.runner
    run_largest_steps(engine.config, engine.layout, runner.loaded.model)
    runner.graphs.run_largest_steps()
    assert not runner.loaded.state.active.any()
    assert not runner.loaded.state.ints.seq_len.any()
    for layer in range(engine.shape.num_layers):
        for cache in engine.pool.layer(layer):
            assert not cache[1:].any()
    engine.close()
