"""SIGKILL of a prefill worker whose first tokens clients have, and whose KV is on its way."""

from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

from tests.fault.test_protocol_faults import FAULTS, patched, until_first_tokens
from tests.support.books import check_book
from tests.support.engines import Running, running, value, worker_config
from tests.support.meeting import MET
from tests.support.patience import until
from tests.support.processes import FORKED, fork
from tests.support.prompts import problem_ids
from tests.support.shallow import shallow
from worker.api import FinishReason, Member, Sampling
from worker.errors import PeerLost
from worker.start.build import Place
from worker.worker import Worker

__all__ = ["patched"]
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
    worker.update_members(conn.recv())
    conn.poll(None)


@pytest.fixture
def cluster(patched: None) -> Iterator[Running]:
    with running(sections(str(shallow())), num_prefill=0) as made:
        yield made


def test_the_rest_follows_on_the_token_that_was_passed_on(cluster: Running, monkeypatch) -> None:
    prompts = problem_ids(NUM)
    asked = [SAMPLINGS[number % 2] for number in range(NUM)]
    decode, client = cluster.workers["decode-0"], cluster.client
    ours, theirs = FORKED.Pipe()
    process = fork(prefill, theirs, str(shallow()))
    theirs.close()
    try:
        member: Member = ours.recv()
        ours.send(cluster.members)
        decode.update_members([*cluster.members, *MET.values(), member])
        until(lambda: decode.loop.peers.num_connected > 0, "no link")
        monkeypatch.setattr(FAULTS, "hold", True)  # no pull ends before the death is noticed
        sent = [
            client.submit(prompt, sampling, prefills=[member.peer])
            for prompt, sampling in zip(prompts, asked, strict=True)
        ]
        until_first_tokens(cluster, sent)
    finally:
        process.kill()
        process.join()
        ours.close()
    until(lambda: not decode.loop.peers.num_connected, "nobody notices")
    FAULTS.hold = False
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
        assert (each.num_finals, each.error) == (1, None)
        assert [stages.late for stages in each.stages] == [False, True]
        assert each.stages[0].prefilled_by == member.peer
        assert each.finish_reason is not FinishReason.ABORT
    check_book(decode.engine.book, [])
