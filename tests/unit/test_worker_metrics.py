"""What a worker counts of its steps, logs of them, and the port at which it is asked."""

import socket
import threading
import urllib.request
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from tests.support.engines import running
from tests.support.laws import sections
from tests.support.patience import HANG_S, until
from tests.support.prompts import problem_ids
from tests.support.reference import sampling_of
from worker.errors import UserError
from worker.observe.meter import StepMeter
from worker.observe.metrics import WorkerMetrics
from worker.observe.page import MAX_CONNECTIONS
from worker.observe.step_log import StepLine
from worker.observe.window_counts import WindowCounts
from worker.plan import Chunk, Plan

BOUND = {"model": "tiny", "role": "decode", "worker": "decode-0"}


@pytest.fixture
def metrics() -> WorkerMetrics:
    return WorkerMetrics(**BOUND)


@pytest.fixture
def meter(metrics: WorkerMetrics) -> StepMeter:
    meter = StepMeter(metrics)
    meter.verifies(WindowCounts(4))
    return meter


def value(metrics: WorkerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"kvlane_{name}", BOUND | labels)


@pytest.mark.parametrize(
    ("said", "path", "reason"),
    [
        ("graph", "graph", None),
        ("piecewise", "piecewise", None),
        ("eager", "eager", "configured"),
        ("eager_too_long", "eager", "too_long"),
        ("eager_padding", "eager", "padding"),
    ],
)
def test_a_step_counts_under_its_path_and_an_eager_one_under_its_reason(
    metrics: WorkerMetrics, said, path, reason
) -> None:
    meter, plan = StepMeter(metrics), Plan(1, chunks=(Chunk(1, 0, (5, 6, 7)),))
    meter.launched(plan)
    meter.settled(plan, said)
    assert value(metrics, "engine_steps_total", kind="prefill", path=path) == 1
    for each in ("configured", "too_long", "padding"):
        found = value(metrics, "engine_eager_steps_total", kind="prefill", reason=each)
        assert found == (1 if each == reason else None)
    assert value(metrics, "engine_step_seconds_count", kind="prefill") == 1
    assert value(metrics, "prompt_tokens_computed_total") == 3


def by_place(metrics: WorkerMetrics, name: str) -> list[float | None]:
    return [value(metrics, f"spec_{name}_at_position_total", position=p) for p in "1234"]


def test_windows_count_rows_and_what_they_accepted(metrics, meter) -> None:
    """All places from the start; in the meter, which routers hear of, as on the page."""
    assert by_place(metrics, "accepted") == by_place(metrics, "drafted") == [0, 0, 0, None]
    meter.verified(4, [1, 3, 4], [(-1, -1, -1), (5, 6, -1), (5, 6, 7)])
    meter.verified(2, [2, 1], [(5,), (6,)])
    meter.verified(1, [1, 1, 1], [(), (), ()])
    meter.verified(4, [], [])  # all of its requests had ended
    assert value(metrics, "spec_steps_total") == meter.windows.num_windows == 5
    assert value(metrics, "spec_accepted_tokens_total") == 6
    assert by_place(metrics, "accepted") == [*meter.windows.accepted, None] == [3, 2, 1, None]
    assert by_place(metrics, "drafted") == [*meter.windows.drafted, None] == [4, 2, 1, None]
    assert value(metrics, "spec_undrafted_steps_total") == 1
    assert value(metrics, "spec_width_sum") == 7
    assert value(metrics, "spec_width_count") == 3
    assert value(metrics, "spec_simulated") == 0


@pytest.mark.parametrize(("reads_text", "share"), [(False, 0.75), (True, 0)])
def test_the_first_acceptance_is_kept_unless_it_depends_on_the_text(
    metrics: WorkerMetrics, reads_text, share
) -> None:
    meter, drafts = StepMeter(metrics), [(5,), (6,), (7,), (8,)]
    meter.verifies(WindowCounts(2, reads_text=reads_text))
    for number in range(300):
        meter.verified(2, [2, 2, 2, 1] if number < 250 else [1] * 4, drafts)
        early = value(metrics, "spec_first_acceptance")
        assert early == (share if number >= 249 else 0)
    assert value(metrics, "spec_steps_total") == 1200


def test_a_port_that_is_named_is_served_and_one_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    first, second = WorkerMetrics(**BOUND), WorkerMetrics(**BOUND | {"worker": "decode-1"})
    try:
        only = range(port, port + 1)
        assert first.serve("127.0.0.1", only) == f"127.0.0.1:{port}"
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
            assert b"kvlane_requests_waiting" in response.read()
        with pytest.raises(UserError, match=rf"cluster\.worker_metrics_port: 127.0.0.1:{port}: "):
            second.serve("127.0.0.1", only)
        served = second.serve("127.0.0.1", range(port, port + 50))
        assert port < int(served.partition(":")[2]) < port + 50, "the next that is free"
    finally:
        first.close()
        second.close()


NUM, MAX_TOKENS = 6, 12


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a decode worker that has served NUM requests by itself."""
    place = tmp_path_factory.mktemp("steps")
    config = sections("never", step_log=str(place))
    with running(config, num_prefill=0) as cluster:
        found = cluster.client.generate(
            problem_ids(NUM), [sampling_of(0, MAX_TOKENS) for _ in range(NUM)]
        )
        assert not [each.error for each in found if each.error]
        cluster.wait_idle()
    (path,) = place.iterdir()
    return path


def test_each_step_has_a_line_that_adds_up(log: Path) -> None:
    lines = [msgspec.json.decode(text, type=StepLine) for text in log.read_bytes().splitlines()]
    assert [line.step for line in lines] == list(range(1, len(lines) + 1))
    assert sum(line.tokens for line in lines) == sum(map(len, problem_ids(NUM)))
    for line in lines:
        assert bool(line.rows) != bool(line.tokens)
        assert line.longest <= line.num_keys <= max(line.rows, 1 + NUM) * line.longest
        assert line.launch_us > 0
        assert line.wait_us >= 0
    assert not lines[0].joined
    assert any(line.joined for line in lines)
    assert [line.at for line in lines] == sorted(line.at for line in lines)


def test_half_requests_hold_few_threads_and_keep_nobody_out(metrics: WorkerMetrics) -> None:
    """The oldest connection is closed for each beyond the most; so is whoever says nothing."""
    host, _, port = metrics.serve("127.0.0.1").rpartition(":")
    before = threading.active_count()
    half = [socket.create_connection((host, int(port)), timeout=HANG_S) for _ in range(200)]
    try:
        for each in half:
            with suppress(OSError):  # it was closed already
                each.sendall(b"GET /metrics HTTP/1.1\r\nhost: a\r\n")
        with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=HANG_S) as page:
            assert b"kvlane_" in page.read()
        until(lambda: threading.active_count() - before <= MAX_CONNECTIONS)
        assert half[0].recv(1) == b"", "the oldest"
    finally:
        for each in half:
            each.close()
        metrics.close()
    until(lambda: threading.active_count() < before)
