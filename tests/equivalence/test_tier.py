"""A tier below the pool changes no token: what it brings equals what was computed, or is computed.

Stores that fail are the seam's own: `Disturbed` stands before a real one and delays or raises.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import Running, running, value
from tests.support.laws import ids, sections
from tests.support.pairwise import in_whole
from tests.support.patience import until
from tests.support.prompts import problem_ids
from worker.api import Sampling
from worker.start.engine import Engine
from worker.transfer.tier.base import Fill, PageStore, Take
from worker.transfer.tier.rows import Row

GREEDY = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
NUM, PAGE = 6, 16
HOST = {"host_bytes": 8 << 20}


@pytest.fixture(autouse=True)
def patient(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load on a busy machine is not late, but where a store hangs."""
    if "hangs" not in request.node.name:
        for name in ("MIN_S", "UNMEASURED_S"):
            monkeypatch.setattr(f"worker.transfer.tier.tier.{name}", 60.0)


def prompts(num: int = NUM, length: int = 150) -> list[tuple[int, ...]]:
    """Long ones that share nothing."""
    problems = problem_ids(8 * num)
    return [sum(problems[8 * i : 8 * i + 8], ())[:length] for i in range(num)]


def tiered(tier: dict[str, Any], mode: str = "never", **engine: object) -> dict[str, Any]:
    """Sections with a pool that holds two of the prompts."""
    made = sections(mode, PAGE, **{"num_pages": 26, **engine})
    made["kv"]["tier"] = tier
    return made


def copied(cluster: Running) -> None:
    """Wait until all that has settled was copied."""
    for worker in cluster.workers.values():
        tier = worker.engine.tier
        assert tier is not None
        until(lambda tier=tier: tier.idle, "something is still copied")


def one_by_one(cluster: Running, asked: Sequence[Sequence[int]]) -> list[list[int]]:
    """Answers to prompts that are asked one after the other, so that each evicts others."""
    found = []
    for prompt in asked:
        found += ids(cluster.answers([prompt], GREEDY))
        copied(cluster)
    return found


@pytest.fixture(scope="module")
def expected(alone: Running) -> list[list[int]]:
    return [ids(alone.client.generate([each], GREEDY))[0] for each in prompts()]


def engine_of(cluster: Running) -> Engine:
    return cluster.workers["decode-0"].engine


def store_of(cluster: Running, number: int = 0) -> Any:
    """The first store of a decode worker, once it is made."""
    tier = cluster.workers[f"decode-{number}"].engine.tier
    assert tier is not None
    until(lambda: tier.rows[0]._store is not None)
    return tier.rows[0]._store


def computed(cluster: Running) -> float:
    return sum(value(each.engine.metrics.prompt_tokens) for each in cluster.workers.values())


@pytest.mark.parametrize("mode", ["never", *in_whole(("always",))])
@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_prefix_is_found_after_its_eviction(mode: str, kind: str, expected, tmp_path) -> None:
    """In chunks and pages of either role; what is found is neither computed nor wrong."""
    tier = HOST if kind == "host" else {"directory": str(tmp_path / "tier")}
    with running(tiered(tier, mode), num_prefill=int(mode == "always")) as cluster:
        assert one_by_one(cluster, prompts()) == expected
        cold = computed(cluster)
        assert one_by_one(cluster, prompts()) == expected
        assert computed(cluster) - cold < cold / 4
        found = [each.engine.metrics for each in cluster.workers.values()]
        assert sum(value(each.tier_tokens(kind)) for each in found) > cold / 2
        evicted = [value(each.tier_evicted("dropped")) for each in found]
        assert not sum(evicted), "all was copied before it had to go"


def test_another_salt_finds_nothing(expected) -> None:
    """Law 11: in each tier the same salt hits, another misses."""
    with running(tiered(HOST), num_prefill=0) as cluster:
        engine = engine_of(cluster)
        send = cluster.client._wire.send
        salts = iter(["a"] * NUM + ["b"] * NUM + ["a"] * NUM)

        def salted(peer: str, message: Any) -> None:
            from msgspec.structs import replace

            from worker.api import Generate

            if isinstance(message, Generate):
                message = replace(message, salt=next(salts))
            send(peer, message)

        cluster.client._wire.send = salted  # type: ignore[method-assign]
        found = []
        for _ in range(3):
            assert one_by_one(cluster, prompts()) == expected
            found.append(value(engine.metrics.tier_tokens("host")))
        assert found[0] == found[1] == 0 < found[2]


class Disturbed(PageStore):
    """A store before which calls can be held up, or fail. act: called by `get` before it asks."""

    def __init__(self, inner: PageStore) -> None:
        self.name, self.every, self.run, self.inner = inner.name, inner.every, inner.run, inner
        self.before_get: Callable[[bytes], None] = lambda key: None
        self.on_taken: Callable[[memoryview], None] = lambda view: None
        self.before_put: Callable[[], None] = lambda: None

    @property
    def num_bytes(self) -> int:
        return self.inner.num_bytes

    def exists(self, key: bytes) -> bool:
        return self.inner.exists(key)

    def put(self, key: bytes, fill: Fill) -> bool:
        self.before_put()
        return self.inner.put(key, fill)

    def get(self, key: bytes, take: Take) -> None:
        self.before_get(key)

        def taken(view: memoryview) -> None:
            self.on_taken(view)
            take(view)

        self.inner.get(key, taken)

    def forget(self, key: bytes = b"") -> None:
        self.inner.forget(key)

    def close(self) -> None:
        self.inner.close()


@contextmanager
def disturbed(tier: dict[str, Any] = HOST) -> Iterator[tuple[Running, Disturbed, Row]]:
    with running(tiered(tier), num_prefill=0) as cluster:
        made = engine_of(cluster).tier
        assert made is not None
        row = made.rows[0]
        until(lambda: row._store is not None)
        assert row._store is not None
        row._store = store = Disturbed(row._store)
        yield cluster, store, row


def flip(view: memoryview) -> None:
    """A byte of what stands behind the header."""
    view[len(view) - 1 if len(view) < 4096 else 2000] ^= 1


def gone(key: bytes) -> None:
    raise KeyError(key)


def broken(key: bytes) -> None:
    raise OSError("the store has died")


@pytest.mark.parametrize(
    ("cause", "field", "act"),
    [
        ("corrupt", "on_taken", flip),
        *in_whole(("absent", "before_get", gone), ("failed", "before_get", broken)),
    ],
)
def test_what_a_store_does_not_bring_is_computed(cause, field, act, expected) -> None:
    """Law 5 and what is close behind: gone, dead or wrong between `exists` and `get`."""
    with disturbed() as (cluster, store, row):
        one_by_one(cluster, prompts())
        setattr(store, field, act)
        assert one_by_one(cluster, prompts()) == expected
        metrics = engine_of(cluster).metrics
        assert value(metrics.tier_failures("host", cause)) > 0
        assert value(metrics.tier_tokens("host")) == 0, "what did not come is no hit"
        paused = row._paused_until > 0
        assert paused == (cause != "absent")


def test_a_store_that_hangs_holds_nobody_up(expected) -> None:
    """It wakes long after its load was given up, and writes to pages that are another's by then."""
    with disturbed() as (cluster, store, row):
        one_by_one(cluster, prompts())
        hangs = threading.Event()
        store.before_get = lambda key: assert_(hangs.wait(60))
        found = [ids(cluster.answers([each], GREEDY))[0] for each in prompts()]
        assert found == expected
        metrics = engine_of(cluster).metrics
        assert value(metrics.tier_failures("host", "late")) >= 3
        assert not row.has(next(iter(store.inner._used)))  # type: ignore[attr-defined]
        hangs.set()
        store.before_get = lambda key: None
        until(lambda: not row._loads and not row._num_busy)
        assert [ids(cluster.answers([each], GREEDY))[0] for each in prompts()] == expected


def assert_(holds: bool) -> None:
    assert holds


def test_a_full_store_keeps_nothing_and_fails_nobody(expected) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    with disturbed() as (cluster, store, _):
        store.before_put = full
        for _ in range(2):
            assert one_by_one(cluster, prompts()) == expected
        metrics = engine_of(cluster).metrics
        assert value(metrics.tier_failures("host", "full")) > 0
        assert value(metrics.tier_evicted("dropped")) > 0
        assert value(metrics.tier_early) > 0, "these were asked for again"


def test_a_page_that_is_freed_while_it_is_copied_is_not_kept(expected) -> None:
    """Laws 1 and 4: the store's copy is held up until its page is another's."""
    with disturbed() as (cluster, store, _):
        goes_on = threading.Event()
        store.before_put = lambda: assert_(goes_on.wait(60))
        first = [ids(cluster.answers([each], GREEDY))[0] for each in prompts()]
        goes_on.set()
        copied(cluster)
        metrics = engine_of(cluster).metrics
        assert value(metrics.tier_pages("host", "torn")) > 0
        assert first == one_by_one(cluster, prompts()) == expected


def test_the_directory_outlives_its_worker_and_serves_another(expected, tmp_path: Path) -> None:
    tier = {"directory": str(tmp_path / "tier")}
    with running(tiered(tier), num_prefill=0) as cluster:
        one_by_one(cluster, prompts())
        cold = computed(cluster)
    with running(tiered(tier), num_prefill=0) as cluster:
        store_of(cluster)
        assert one_by_one(cluster, prompts()) == expected
        assert computed(cluster) < cold / 4
    files = [each for each in (tmp_path / "tier").rglob("*.kv")]
    assert files
    assert {each.stat().st_mode & 0o777 for each in files} == {0o600}
    assert {
        each.stat().st_mode & 0o777 for each in (tmp_path / "tier").rglob("*") if each.is_dir()
    } == {0o700}


def test_what_one_worker_has_kept_another_finds_while_both_run(expected, tmp_path: Path) -> None:
    tier = {"directory": str(tmp_path / "tier")}
    with running(tiered(tier), num_prefill=0, num_decode=2) as cluster:
        first, second = cluster.client.decodes
        ids(cluster.client.generate(prompts()[:1], GREEDY, decode=first))
        copied(cluster)
        store = store_of(cluster, 1)
        until(lambda: len(store._own_keys) >= 9)
        assert ids(cluster.client.generate(prompts()[:1], GREEDY, decode=second)) == expected[:1]
        assert value(cluster.workers["decode-1"].engine.metrics.tier_tokens("disk")) == 144


def test_other_weights_find_nothing(tmp_path: Path) -> None:
    """Law 12: two digests, one directory."""
    tier = {"directory": str(tmp_path / "tier")}
    found = []
    for seed in (1, 2, 1):
        config = tiered(tier)
        config["model"] |= {"load_format": "dummy", "seed": seed}
        with running(config, num_prefill=0) as cluster:
            store_of(cluster)
            one_by_one(cluster, prompts(2))
            found.append(value(engine_of(cluster).metrics.tier_tokens("disk")))
    assert found[0] == found[1] == 0 < found[2]


def test_lengths_around_every_boundary_of_pages(expected, alone: Running) -> None:
    """Law 10: the last token is computed, and applied once."""
    text = prompts(1)[0]
    lengths = [n for at in (16, 144) for n in (at - 1, at, at + 1, at + 2)]
    cold = [ids(alone.client.generate([text[:n]], GREEDY))[0] for n in lengths]
    with running(tiered(HOST), num_prefill=0) as cluster:
        one_by_one(cluster, [text])
        for number, length in enumerate(lengths):
            one_by_one(cluster, prompts()[1:4])  # evicts
            before = value(engine_of(cluster).metrics.tier_tokens("host"))
            assert one_by_one(cluster, [text[:length]]) == [cold[number]]
            after = value(engine_of(cluster).metrics.tier_tokens("host"))
            assert after - before == (length - 1) // PAGE * PAGE


@pytest.mark.parametrize(("kind", "num"), [("disk", 2), *in_whole(("host", 2), ("disk", 4))])
def test_ranks_keep_and_bring_their_own_heads(kind, num: int, expected, tmp_path: Path) -> None:
    """Law 7: one process decides; a rank that copies late delays, and disagrees with nobody."""
    tier = HOST if kind == "host" else {"directory": str(tmp_path / "tier")}
    with running(tiered(tier), num_prefill=0, decode_tp=num) as cluster:
        assert one_by_one(cluster, prompts()) == expected
        cold = computed(cluster)
        assert one_by_one(cluster, prompts()) == expected
        assert computed(cluster) - cold < cold / 3
        assert value(engine_of(cluster).metrics.tier_tokens(kind)) > cold / 2


@pytest.mark.parametrize("mode", ["always", "never"])
def test_snapshots_of_recurrent_layers_come_with_their_pages(mode: str, tmp_path: Path) -> None:
    """Law 10: both at the same end of a text, or neither."""

    def hybrid(tier: dict[str, Any], **engine: object) -> dict[str, Any]:
        made = tiered(tier, mode, num_pages=44, state_slots=4, **engine)
        made["model"] = {"path": "tiny-hybrid"}
        made["kv"]["snapshots"] = 3
        return made

    asked = prompts(4, 300)
    num_prefill = int(mode == "always")
    with running(hybrid({}, prefix_cache=False), num_prefill=num_prefill) as cluster:
        cold = [ids(cluster.answers([each], GREEDY))[0] for each in asked]
        computed_cold = computed(cluster)
    with running(hybrid({"directory": str(tmp_path / "tier")}), num_prefill=num_prefill) as cluster:
        assert one_by_one(cluster, asked) == cold
        before = computed(cluster)
        assert one_by_one(cluster, asked) == cold
        assert computed(cluster) - before < computed_cold / 2
        assert sum(
            value(each.engine.metrics.tier_tokens("disk")) for each in cluster.workers.values()
        )
