"""Who dies at which step of a transfer, and the test of each row.

| row | dies | test |
|---|---|---|
| 1 | router after dispatch | `test_protocol_faults.py`: a link that a router lost |
| 2 | decode before it reserves | here |
| 3 | prefill, queued or computing | `test_protocol_faults.py`: is asked again later |
| 4 | prefill during the transfer | `test_protocol_faults.py`: between token and KV |
| 5 | prefill after the last byte | here |
| 6 | decode during the transfer | here |
| 7 | decode while decoding | `equivalence/test_failover.py`, at every token |
| 8 | a rank | `e2e/test_tensor_parallel.py` |
| 9 | client, while prefill computes | here |
| 10 | client, during the transfer | `test_protocol_faults.py`: aborts while pulls run |
| 11 | nobody: messages double, late, overtaken | `test_protocol_faults.py`: messages |
| 12 | nobody: a lease ends on one side | `test_protocol_faults.py`: bytes read after the lease |

A worker of this process dies for others when they find it silent: it hears nothing more of them,
and whatever it still sends is of a link that is gone.
"""

import time
from collections.abc import Iterator

import pytest

from tests.fault.test_protocol_faults import (
    FAULTS,
    GREEDY,
    NUM,
    Texts,
    faulty,
    lose,
    num_retries,
    patched,
    texts,
    undisturbed,
)
from tests.support.books import check_book
from tests.support.engines import Running, value
from tests.support.patience import until
from tests.support.prompts import problem_ids
from worker import api

__all__ = ["patched", "texts", "undisturbed"]
DEAD, LIVING = "decode-0", "decode-1"


@pytest.fixture(scope="module")
def cluster(patched: None) -> Iterator[Running]:
    with faulty("shm", num_decode=2) as made:
        yield made


def peer_of(cluster: Running, name: str) -> api.PeerId:
    return next(member.peer for member in cluster.members if member.name == name)


def ask(cluster: Running, name: str) -> list[str]:
    peer = peer_of(cluster, name)
    return [cluster.client.submit(prompt, GREEDY, decode=peer) for prompt in problem_ids(NUM)]


def die(cluster: Running, name: str) -> None:
    """For the router and for prefill."""
    lose(cluster.client, peer_of(cluster, name))
    for other in ("prefill-0", "prefill-1"):
        lose(cluster.workers[other], peer_of(cluster, name))


def check(cluster: Running, sent: list[str], texts: Texts) -> None:
    """Each has ended once, as it would have undisturbed; afterwards all is free."""
    answers = cluster.client.wait(sent)
    assert [answer.tokens for answer in answers] == texts
    assert {answer.num_finals for answer in answers} == {1}
    cluster.wait_idle()
    for each in cluster.workers.values():
        check_book(each.engine.book, [])


def resumed(cluster: Running, sent: list[str], texts: Texts) -> None:
    """What was sent to a worker that died is asked of the other one."""
    client = cluster.client
    assert {each.error.code for each in client.wait(sent) if each.error} == {"worker_lost"}
    check(cluster, ask(cluster, LIVING), texts)
    dead = next(each for each in cluster.members if each.name == DEAD)
    client._wire.connect(dead.peer, dead.address, dead.wire_key)  # it comes back
    until(lambda: cluster.workers[DEAD].loop.peers.num_connected == 2, "it stays forgotten")


def computed(cluster: Running) -> float:
    """Prompt tokens of the prefill workers."""
    prefill = cluster.workers["prefill-0"], cluster.workers["prefill-1"]
    return sum(value(each.engine.metrics.prompt_tokens) for each in prefill)


def test_decode_dies_before_it_reserves_and_prefill_never_hears_of_it(cluster, texts) -> None:
    FAULTS.inflict(api.Prefill, "lost")
    num, sent = computed(cluster), ask(cluster, DEAD)
    lose(cluster.client, peer_of(cluster, DEAD))
    until(lambda: FAULTS.num_seen >= NUM or cluster.workers[DEAD].idle(), "it hangs")
    assert computed(cluster) == num
    FAULTS.reset()
    resumed(cluster, sent, texts)


def test_decode_dies_during_the_transfer_and_pins_end_with_their_lease(cluster, texts) -> None:
    FAULTS.hold = True
    sent = ask(cluster, DEAD)
    until(lambda: cluster.workers[DEAD].counters()["pulls"] > 0, "no pull begins")
    die(cluster, DEAD)
    prefill = cluster.workers["prefill-0"], cluster.workers["prefill-1"]
    until(lambda: all(each.idle() for each in prefill), "a pin stays")
    FAULTS.hold = False
    resumed(cluster, sent, texts)


def test_prefill_dies_after_the_last_byte_before_it_says_so(cluster, texts) -> None:
    """What says that all is there never comes; decode computes what is missing elsewhere."""
    decode = cluster.workers[LIVING]
    FAULTS.inflict(api.KVReady, "lost")
    retries, sent = num_retries(decode), ask(cluster, LIVING)
    until(lambda: FAULTS.num_hit >= NUM // 2, "nothing is announced")
    FAULTS.reset()
    lose(decode, peer_of(cluster, "prefill-0"))
    check(cluster, sent, texts)
    assert num_retries(decode) > retries
    until(lambda: decode.loop.peers.num_connected == 2, "it stays forgotten")


def test_a_client_that_leaves_while_prefill_computes_stops_it(cluster, texts) -> None:
    FAULTS.turns.clear()
    num = computed(cluster)
    sent = ask(cluster, LIVING)
    until(lambda: not cluster.workers[LIVING].idle(), "nothing has come")
    time.sleep(0.2)
    for each in sent:
        cluster.client.abort(each)
    until(cluster.workers[LIVING].idle, "decode waits")
    FAULTS.turns.set()
    cluster.wait_idle()
    assert computed(cluster) - num < sum(map(len, problem_ids(NUM))), "it computes all the same"
    check(cluster, ask(cluster, LIVING), texts)
