"""A worker is live while its steps settle or nothing is to be done, to its peers and to a probe."""

import json
import queue
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.engines import worker_config
from tests.support.patience import HANG_S
from worker.api import Abort, Generate, Lost, Pong, Prefill, Release, Sampling, WorkerStats, Xfer
from worker.config import PingConfig
from worker.decode import DecodeLoop
from worker.keyring import Refusals
from worker.loop import EngineThread
from worker.observe.metrics import WorkerMetrics
from worker.plan import Plan
from worker.prefill import PrefillLoop
from worker.start.build import Place, build_engine
from worker.wire import Wire

STALL_S = 1.5
PING = PingConfig(interval_s=0.1, max_misses=10, stall_s=STALL_S)

Turn = Callable[[EngineThread], float]


class Engine:
    """An engine thread whose turn is a test's, its probe, and a peer that pings it."""

    def __init__(self, turn: Callable[[EngineThread], float], ping: PingConfig = PING) -> None:
        self.thread = EngineThread("decode-0/1", ping)
        self.metrics = WorkerMetrics(model="tiny", role="decode", worker="decode-0")
        self.url = f"http://{self.metrics.serve('127.0.0.1', stalled=self.thread.stalled)}/live"
        address = self.thread.start("127.0.0.1", lambda _: turn(self.thread))
        self.events: queue.SimpleQueue = queue.SimpleQueue()
        patient = ping.model_copy(update={"stall_s": 3600.0})
        self.peer = Wire("controller/1", patient, self.events.put)
        self.peer.start()
        self.peer.connect("decode-0/1", address)

    def answers(self) -> Iterator[Pong]:
        """What its pongs say, until it is lost."""
        while True:
            for _, event in self.events.get(timeout=HANG_S):
                if isinstance(event, Lost):
                    return
                assert isinstance(event, Pong)
                yield event

    def probed(self) -> tuple[int, dict[str, str]]:
        """Status and body of GET /live."""
        try:
            with urllib.request.urlopen(self.url, timeout=HANG_S) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def close(self) -> None:
        self.peer.close()
        self.thread.stop()
        self.metrics.close()


@pytest.fixture
def engine() -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(turn: Turn, ping: PingConfig = PING) -> Engine:
        engines.append(Engine(turn, ping))
        return engines[-1]

    yield make
    for each in engines:
        each.close()


class Endless:
    groups = None

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def done(self) -> bool:
        return False

    def tells(self, wake: object) -> bool:
        return False


PROMPT = tuple(range(9, 73))
ASKED = Generate("r", 1, PROMPT, len(PROMPT), Sampling(5), 1e3)
XFER = Xfer("x", 1, "d", "1")
ENDS = {  # what begins the step, and what takes back all that waited for it
    "prefill": (PrefillLoop, Prefill(XFER, PROMPT, 0), Release(XFER)),
    "decode": (DecodeLoop, ASKED, Abort("r", 1)),
}


@pytest.mark.parametrize("role", ENDS)
def test_a_step_in_flight_is_work_whoever_waits_for_it(role: str) -> None:
    loop_class, begins, ends = ENDS[role]
    sections: dict = {"engine": {"device": "cpu", "threads": 1, "num_pages": 64}}
    worker = build_engine(worker_config(role, sections), Place(f"{role}-0", "1", "127.0.0.1"))
    worker.runner.launch = lambda plan, *_: Endless(plan)  # type: ignore[assignment,return-value]
    thread = SimpleNamespace(
        me="w/1", stats=WorkerStats(), send=lambda *_: None, post=None, connect=None,
        disconnect=None, wake=lambda: None, refusals=Refusals(),
    )  # fmt: skip
    loop = loop_class(worker, cast("Any", thread), "1")
    loop.turn([("peer/d", begins)])
    loop.turn([("peer/d", ends)])
    assert loop.turn([]) > 0, "it looks after messages"
    assert (thread.stats.has_work, thread.stats.num_steps) == (True, 0)
    worker.close()


def test_an_engine_that_turns_and_settles_nothing_is_not_live(engine) -> None:
    num_turns = 0

    def turn(thread: EngineThread) -> float:
        nonlocal num_turns
        num_turns += 1
        thread.stats = WorkerStats(num_running=3, num_steps=7, has_work=True)
        return 0.02

    stuck = engine(turn)
    assert stuck.probed() == (200, {"status": "live"})
    assert [*stuck.answers()], "it was live before"
    at_loss = num_turns
    status, body = stuck.probed()
    assert (status, body["status"]) == (503, "not live")
    assert "while work waits" in body["reason"]
    limit = time.monotonic() + HANG_S
    while num_turns == at_loss and time.monotonic() < limit:
        time.sleep(0.01)
    assert num_turns > at_loss, "its loop does turn"
