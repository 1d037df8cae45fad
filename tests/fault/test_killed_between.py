"""SIGKILL of a prefill worker whose first tokens clients have, and whose KV is on its way."""

from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import pytest

from tests.fault.test_protocol_faults import SlowPull
from tests.support.books import check_book
from tests.support.counted import value
from tests.support.engines import Running, running, worker_config
from tests.support.patience import HANG_S, until
from tests.support.processes import FORKED, fork
from tests.support.prompts import problem_ids
from tests.support.shallow import shallow
from worker.api import FinishReason, Member, Sampling
from worker.errors import PeerLost
from worker.start.build import Place
from worker.transfer.base import Run
from worker.transfer.shm import ShmPeer
from worker.worker import Worker

NUM = 8
SAMPLINGS = [Sampling(20, temperature=0.0), Sampling(20, temperature=0.9, top_k=30, seed=4)]


def sections(model: str) -> dict[str, Any]:
    return {
        "model": {"path": model},
        "engine": {"device": "cpu", "threads": 1, "cpu_pool_bytes": 24 << 20},
        "disaggregation": {"mode": "always"},
        "ping": {"interval_s": 0.2, "max_misses": 10},
    }


def prefill(conn: Connection, model: str) -> None:
    """Main function of the prefill worker's process, which ends with the other end of `conn`."""
    config = worker_config("prefill", sections(model))
    worker = Worker(config, Place("prefill-0", "i0", "127.0.0.1"))
    conn.send(worker.start())
    conn.poll(None)


@pytest.fixture
def cluster() -> Iterator[Running]:
    with running(sections(str(shallow())), num_prefill=0) as made:
        yield made


def test_the_rest_follows_on_the_token_that_was_passed_on(
    cluster: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = problem_ids(NUM)
    asked = [SAMPLINGS[number % 2] for number in range(NUM)]
    decode, client = cluster.workers["decode-0"], cluster.client
    pull = ShmPeer.pull

    pulls: list[SlowPull] = []  # none ends before it is noticed that the worker is gone

    def slow(self: ShmPeer, runs: Sequence[Run]) -> Any:
        pulls.append(SlowPull(pull(self, runs), 2 * HANG_S))
        return pulls[-1]

    ours, theirs = FORKED.Pipe()
    process = fork(prefill, theirs, str(shallow()))
    theirs.close()
    try:
        member: Member = ours.recv()
        decode.update_members([*cluster.members, member])
        until(lambda: decode.loop.peers.num_connected > 0, "no link")
        monkeypatch.setattr(ShmPeer, "pull", slow)
        sent = [
            client.submit(prompt, sampling, prefills=[member.peer])
            for prompt, sampling in zip(prompts, asked, strict=True)
        ]
        until(
            lambda: all(client.answers[each].tokens for each in sent),
            "a first token waits for KV",
            lambda: client.pump(0.01),
        )
        assert decode.counters()["fetches"] == NUM
    finally:
        process.kill()
        process.join()
        ours.close()
    assert {len(client.answers[each].tokens) for each in sent} == {1}, "nothing has landed"
    until(lambda: not decode.loop.peers.num_connected, "nobody notices")
    for each in pulls:
        each.release()
    answers = client.wait(sent)
    cluster.wait_idle()
    placed = decode.engine.metrics.placed
    assert value(placed("remote")) == value(placed("fallback")) == NUM
    assert value(decode.engine.metrics.fetch_retries(PeerLost.code)) == NUM

    alone = client.generate(prompts, asked, prefills=[])
    assert [(each.tokens, each.finish_reason) for each in answers] == [
        (each.tokens, each.finish_reason) for each in alone
    ]
    for each in answers:
        assert (each.num_finals, each.error, len(each.stages)) == (1, None, 1)
        assert each.stages[0].prefilled_by == member.peer
        assert each.finish_reason is not FinishReason.ABORT
    check_book(decode.engine.book, [])
