"""A worker that takes the other role in its process answers as one that was started in it."""

import gc
import random
import time
import weakref
from functools import partial
from urllib.request import urlopen

import pytest

from tests.support.engines import Client, Running, Sections, running, value, worker_config
from tests.support.hybrids import hybrid
from tests.support.pairwise import more, whole
from tests.support.patience import until
from tests.support.prompts import problem_ids
from worker.api import Prefill, Sampling, Xfer
from worker.errors import Unsupported
from worker.peers.rendezvous import free_rendezvous
from worker.start import load
from worker.start.build import Place
from worker.start.engine import Kept
from worker.worker import Worker

ME = "decode-9"  # who takes another role
METRICS_PORT = int(free_rendezvous("127.0.0.1").rpartition(":")[2])
METRICS_PORTS = range(METRICS_PORT, METRICS_PORT + 1)
ENGINE = {"threads": 1, "num_pages": 200, "max_num_reqs": 8, "strict": True}
PLAIN: Sections = {"engine": ENGINE, "kv": {"page_size": 16}, "disaggregation": {"mode": "always"}}
MODELS: dict[str, Sections] = {
    "plain": PLAIN,
    "ngram": PLAIN | {"spec": {"drafter": "ngram"}},
    "chain": PLAIN | {"spec": {"drafter": "chain"}},
    "dflash": PLAIN | {"spec": {"drafter": "dflash"}},
    "hybrid": PLAIN | {"model": {"path": str(hybrid()), "load_format": "dummy"}},
    "mooncake": PLAIN | {"transport": {"name": "mooncake", "connect_timeout_s": 60.0}},
    "auto": PLAIN | {"engine": {"threads": 1, "cpu_pool_bytes": 1 << 25}},
}


def asked() -> tuple[list[tuple[int, ...]], list[Sampling]]:
    prompts = [tuple(token % 199 for token in prompt * 2) for prompt in problem_ids(6)]
    rng = random.Random(3)
    seeded = [Sampling(24, seed=rng.getrandbits(60), top_p=0.9, ignore_eos=True) for _ in prompts]
    greedy = Sampling(24, temperature=0.0, ignore_eos=True)
    return prompts * 2, [greedy] * len(prompts) + seeded


def answers(cluster: Running, decode: str, prefill: str) -> list[list[int]]:
    """Of one decode worker that asks one prefill worker."""
    of = {member.name: member for member in cluster.members}
    client = Client([of[decode]], f"client/{decode}-{of[decode].incarnation}-{prefill}")
    peer = of[prefill].peer
    peers = cluster.workers[decode].loop.peers
    until(lambda: peers.link(peer) is not None, "no link")
    try:
        found = client.generate(*asked(), prefills=[peer])
        assert not [each.error for each in found if each.error]
        assert {each.stages[0].prefilled_by for each in found} == {peer}
        cluster.wait_idle()
        return [each.tokens for each in found]
    finally:
        client.close()


def join(cluster: Running, worker: Worker) -> None:
    member = worker.start()
    cluster.workers[member.name] = worker
    others = [each for each in cluster.members if each.name != member.name]
    cluster.members[:] = [*others, member]
    cluster.meet()


def collected(of: weakref.ref[object]) -> bool:
    """Whether it is freed. `collect` does nothing while another thread collects."""
    gc.collect()
    return of() is None


def turn(cluster: Running, role: str, sections: Sections, kept: Kept | None = None) -> Worker:
    """The worker ME in another role, of a new incarnation; it begins as one that loads."""
    if ME in cluster.workers:
        kept = cluster.workers.pop(ME).retire()
    place = Place(ME, f"{role}{random.getrandbits(20)}", "127.0.0.1")
    worker = Worker(worker_config(role, sections), place, METRICS_PORTS, kept)
    join(cluster, worker)
    return worker


@pytest.mark.parametrize(
    "model", ["hybrid", *more("chain", "plain", "ngram", "dflash", "mooncake", "auto")]
)
def test_a_turned_worker_answers_as_a_fresh_one_and_loads_nothing(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = MODELS[model]
    with running(sections, num_prefill=1, num_decode=1) as cluster:
        expected = answers(cluster, "decode-0", "prefill-0")
        engine = turn(cluster, "decode", sections).engine
        assert answers(cluster, ME, "prefill-0") == expected
        weights, memory, endpoint = engine.weights, engine.pool.memory(), engine.endpoint()
        for name in ("load_model", "load_drafter"):
            monkeypatch.delattr(load, name)  # a second call would fail
        for role in ("prefill", "decode") * (1 + whole):
            of_role = weakref.ref(engine.runner.graphs.decode)
            del engine
            engine = turn(cluster, role, sections).engine
            until(partial(collected, of_role), "what belonged to the role is not freed")
            assert engine.weights is weights
            assert engine.runner.loaded.model is weights.model
            assert (engine.pool.memory(), engine.endpoint()) == (memory, endpoint)
            decode, prefill = ("decode-0", ME) if role == "prefill" else (ME, "prefill-0")
            assert answers(cluster, decode, prefill) == expected
            assert answers(cluster, "decode-0", "prefill-0") == expected
            assert not any(cluster.workers[ME].counters().values())


def test_peers_meet_a_turned_worker_as_a_new_member() -> None:
    """Nothing that is said to the former one reaches it; its metrics are where they were."""
    with running(PLAIN, num_prefill=1, num_decode=1) as cluster:
        turn(cluster, "prefill", PLAIN)
        former, peers = cluster.members[-1], cluster.workers["decode-0"].loop.peers
        until(lambda: peers.link(former.peer) is not None, "no link")
        turn(cluster, "decode", PLAIN)
        turned = turn(cluster, "prefill", PLAIN)
        member = cluster.members[-1]
        assert former.metrics_address == member.metrics_address
        assert former.endpoints == member.endpoints
        assert former.address != member.address
        with urlopen(f"http://{member.metrics_address}/metrics", timeout=60) as page:
            text = page.read().decode()
        assert 'role="prefill"' in text
        assert 'role="decode"' not in text
        until(lambda: peers.link(member.peer) is not None, "no link")
        assert peers.link(former.peer) is None
        dropped = turned.engine.metrics.dropped("Prefill")
        xfer = Xfer("x", 1, "i0", former.incarnation)
        cluster.workers["decode-0"]._thread.send(member.peer, Prefill(xfer, (1, 2, 3), 0))
        until(lambda: value(dropped) == 1)
        assert turned.idle()


def test_pages_that_peers_may_read_are_left_alone_until_the_lease_has_ended() -> None:
    with running(PLAIN, num_prefill=0, num_decode=1) as cluster:
        worker = turn(cluster, "prefill", PLAIN)
        xfer = Xfer("x", 1, "i0", cluster.members[-1].incarnation)
        for events in ([("decode-0/i0", Prefill(xfer, tuple(range(3, 40)), 0))], []):
            worker._thread._inbox.put(events)
        until(lambda: worker.counters()["leases"] == 1)
        kept, now = cluster.workers.pop(ME).retire(), time.monotonic()
        term_s = worker.engine.config.lease.prefill_window_s
        assert now < kept.read_until <= now + term_s
        slept: list[float] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("worker.start.build.time.sleep", slept.append)
            worker = turn(cluster, "decode", PLAIN, kept)
        assert 0 < max(slept) <= term_s
        assert cluster.workers.pop(ME).retire().read_until <= time.monotonic()
        kept.transport.close()
        kept.pool.close()


def test_another_model_or_pool_needs_another_process() -> None:
    with running(PLAIN, num_prefill=0, num_decode=1) as cluster:
        kept = turn(cluster, "decode", PLAIN).retire()
        del cluster.workers[ME]
        for leaf, other in (
            ("engine.num_pages", 100), ("engine.cpu_pool_bytes", 9999999), ("kv.page_size", 32),
            ("spec.drafter", "ngram"), ("model.seed", 1), ("transport.kind", "shm"), ("tp", 2),
        ):  # fmt: skip
            section, _, name = leaf.partition(".")
            changed = PLAIN | {section: PLAIN.get(section, {}) | {name: other} if name else other}
            named = leaf if section == "engine" else section
            config, place = worker_config("prefill", changed), Place(ME, "other", "127.0.0.1")
            with pytest.raises(Unsupported, match=f"^{named}: not what this process has loaded"):
                Worker(config, place, kept=kept)
        kept.transport.close()
        kept.pool.close()
