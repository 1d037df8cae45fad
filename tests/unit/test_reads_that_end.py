"""Reads write into pages until they are over, so whoever gives pages back waits for them."""

import queue
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.patience import HANG_S, until
from tests.support.pulls import FAILED, OK, RUNNING, ScriptedPull
from tests.support.ranks import NOBODY, Ranks, content, model_layout
from worker.transfer.base import Endpoint, Run
from worker.transfer.peers import PrefillPeers
from worker.transfer.ranked import RankPulls
from worker.transfer.sources import JoinedPull, LocalRank


class Slow:
    """A transport whose reads last until the test ends them; a cancelled one fails then."""

    name, kind = "a", "b"

    def __init__(self) -> None:
        self.open: list[str] = []
        self.reads: list[ScriptedPull] = []

    def connect(self, endpoint: Endpoint, timeout_s: float) -> object:
        self.open.append(endpoint.name)
        remove = lambda: self.open.remove(endpoint.name)  # noqa: E731
        return SimpleNamespace(close=remove, pull=self.pull, transport="a/b")

    def pull(self, runs: Sequence[Run]) -> ScriptedPull:
        self.reads.append(ScriptedPull(sum(run.num_bytes for run in runs)))
        return self.reads[-1]


@pytest.mark.parametrize(("measures", "leads"), [(False, True), (True, True), (False, False)])
def test_a_worker_that_ends_cancels_reads_whose_bytes_come_to_its_memory(
    measures: bool, leads: bool
) -> None:
    layout = model_layout(4)
    prefill, transport, answer = (
        Ranks(layout, 4, content(layout, 12, 1)),
        Slow(),
        queue.SimpleQueue(),
    )
    rank = LocalRank(cast("Any", transport), layout, NOBODY, 9, 1.0)
    if measures:
        threading.Thread(target=lambda: answer.put(rank.measure(prefill.member))).start()
    else:
        rank.dial(prefill.member, answer.put)
    until(lambda: bool(transport.reads))
    peers = PrefillPeers(rank, lambda _: None, lambda *_: None, lambda *_: None)
    pulls = RankPulls(rank, lambda _: None, lambda _: None)
    ends = threading.Thread(target=peers.close if leads else pulls.close)
    ends.start()
    until(lambda: all(read.num_cancels for read in transport.reads))
    assert ends.is_alive(), "reads may still write"
    for read in transport.reads:
        read.fail("cancelled")
    ends.join(HANG_S)
    assert "cancelled" in str(answer.get(timeout=HANG_S).error)
    assert not transport.open
    prefill.close()


def test_a_joined_pull_that_fails_runs_until_no_part_does() -> None:
    parts = [ScriptedPull(), ScriptedPull(), ScriptedPull()]
    pull = JoinedPull(parts)
    parts[0].state = OK
    parts[1].fail("it broke")
    for _ in range(3):
        assert pull.poll() is RUNNING
        assert pull.error is None
    assert [part.num_cancels for part in parts] == [0, 0, 1]
    parts[2].fail("cancelled")
    assert pull.poll() is FAILED
    assert pull.error == "it broke"
