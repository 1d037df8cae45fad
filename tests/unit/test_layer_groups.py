"""Layer groups: KV is announced group by group while later layers compute, and pulled once."""

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.support.engines import worker_config
from tests.support.prompts import problem_ids
from tests.support.pulls import DecodeSide
from worker.api import KVReady, Prefill, Release, Sampling, Xfer
from worker.cache.layout import KVRegion, ModelLayout
from worker.keyring import Refusals
from worker.model.attention import SelfAttention
from worker.prefill import PrefillLoop
from worker.start import build
from worker.start.build import Place, build_engine
from worker.transfer.fetch import Fetch

NUM_GROUPS, PAGE_SIZE, CHUNK = 3, 16, 40  # chunks end within pages
PEER = "decode-0/d"


class PrefillAlone:
    """A prefill worker's loop; keeps what it sends, with the KV as it was at that moment."""

    def __init__(self) -> None:
        sections: dict[str, dict[str, object]] = {
            "engine": {
                "device": "cpu", "threads": 1, "num_pages": 200, "max_prefill_tokens": CHUNK,
            },
            "kv": {"page_size": PAGE_SIZE, "num_groups": NUM_GROUPS},
            "lease": {"prefill_window_s": 1000.0},  # nobody renews
        }  # fmt: skip
        config = worker_config("prefill", sections)
        self.engine = build_engine(config, Place("prefill-0", "1", "127.0.0.1"))
        self.sent: list[tuple[KVReady, list[torch.Tensor]]] = []
        thread = SimpleNamespace(
            send=self._send, stats=None, wake=lambda: None, refusals=Refusals()
        )
        self._loop = PrefillLoop(self.engine, cast("Any", thread), "p")
        self._loop.flight.waits = False  # the last turn ends with its step
        self._num_asked = 0

    def serve(
        self,
        prompts: Sequence[Sequence[int]],
        link_bytes_per_s: float = 0.0,
        sampling: Sampling | None = None,
    ) -> list[tuple[KVReady, list[torch.Tensor]]]:
        """All prompts, then released; what was announced. With `sampling`, a token is drawn."""
        self.sent = []
        self._num_asked += 1
        xfers = [Xfer(f"{self._num_asked}.{i}", 1, "d", "p") for i in range(len(prompts))]
        asked = zip(xfers, prompts, strict=True)
        events: list[Any] = [
            (PEER, Prefill(xfer, tuple(prompt), 0, link_bytes_per_s, sampling, len(prompt)))
            for xfer, prompt in asked
        ]
        while sum(message.last for message, _ in self.sent) < len(prompts):
            self._loop.turn(events)
            events = []
        self._loop.turn([(PEER, Release(xfer)) for xfer in xfers])
        assert not any(self._loop.counters().values())
        return self.sent

    def bytes_of(self, page: int, groups: range) -> torch.Tensor:
        """Keys and values that a page holds of some layer groups; with the last, all regions."""
        per_group = self.engine.pool.region().layers_per_group
        layers = range(groups.start * per_group, groups.stop * per_group)
        caches = [cache for layer in layers for cache in self.engine.pool.layer(layer)]
        if groups.stop == NUM_GROUPS:
            caches += self.engine.pool.caches()[2 * self.engine.shape.num_layers :]
        return torch.cat([cache[page].flatten() for cache in caches])

    def _send(self, peer: str, message: object) -> None:
        assert peer == PEER
        self.sent.append(
            (message, [self.bytes_of(page, groups_of(message)) for page in message.pages])
        )


def groups_of(message: KVReady) -> range:
    return range(message.first_group, message.first_group + message.num_groups)


def is_early(message: KVReady) -> bool:
    """Whether it names pages of which later groups are still computed."""
    return len(message.pages) > 0 and groups_of(message).stop < NUM_GROUPS


@pytest.fixture(scope="module")
def worker() -> Iterator[PrefillAlone]:
    made = PrefillAlone()
    yield made
    made.engine.close()


@pytest.mark.parametrize("sampling", [None, Sampling(9, temperature=0.8, seed=3)])
def test_each_group_is_announced_once_and_is_final_then(sampling, worker: PrefillAlone) -> None:
    """With a token: it follows all KV, which does not wait for it."""
    prompts = [prompt * 2 for prompt in problem_ids(20)[12 * (sampling is not None) :][:8]]
    seen: Counter[tuple[str, int, int]] = Counter()
    num_early = 0
    for message, found in worker.serve(prompts, sampling=sampling):
        assert (message.token is not None) == (message.last and sampling is not None)
        assert message.token is None or not message.pages
        groups = groups_of(message)
        num_early += is_early(message)
        numbers = range(message.first_page, message.first_page + len(message.pages))
        for number, page, then in zip(numbers, message.pages, found, strict=True):
            assert then.any()
            assert torch.equal(then, worker.bytes_of(page, groups))
            seen.update((message.xfer.xfer_id, number, group) for group in groups)
    assert set(seen.values()) == {1}
    num_pages = sum(-(-(len(prompt) - (not sampling)) // PAGE_SIZE) for prompt in prompts)
    assert len(seen) == num_pages * NUM_GROUPS
    assert num_early >= len(prompts)  # at least the last chunk of every prompt


def test_the_last_group_is_announced_when_all_regions_are_written(monkeypatch) -> None:
    """Draft rows and tails travel with it, and are made of what the last layers compute."""
    plain = build.model_layout

    def with_regions(*args: Any) -> ModelLayout:
        (target,) = plain(*args).regions
        draft = replace(target, name="draft", num_layers=1, num_groups=1)
        tail = KVRegion("tail", 1, 1, 192, 1, target.page_size, target.dtype, 1, "page")
        return ModelLayout((target, draft, tail))

    monkeypatch.setattr(build, "model_layout", with_regions)
    made = PrefillAlone()
    chunks, pool = made.engine.runner.graphs.chunks, made.engine.pool
    forward = chunks.launch

    def observed(batch: Any, on_layer: Any = None) -> Any:
        found = forward(batch, on_layer)
        time.sleep(0.1)  # announced groups would be sent meanwhile
        for cache in (*pool.layer(0, "draft"), pool.page_rows("tail")):
            cache[batch.slot_mapping // PAGE_SIZE] = 7.0
        return found

    monkeypatch.setattr(chunks, "launch", observed)
    sent = made.serve([problem_ids(10)[9][:CHUNK]])
    assert any(is_early(message) for message, _ in sent), "the other groups do not wait"
    for message, found in sent:
        for page, then in zip(message.pages, found, strict=True):
            assert torch.equal(then, made.bytes_of(page, groups_of(message)))
            assert (7.0 in then) == (groups_of(message).stop == NUM_GROUPS)
    made.engine.close()


def test_a_step_that_fails_announces_nothing(worker: PrefillAlone, monkeypatch) -> None:
    """Its events pass, so that nobody waits for ever, and the error is met.

    What was stored before the error is final, and may have been announced.
    """
    attend, num_calls = SelfAttention.forward, Counter[str]()

    def breaks(self: SelfAttention, *args: Any) -> Any:
        num_calls["layers"] += 1
        assert num_calls["layers"] < 2, "a bug of ours"  # no group is final
        return attend(self, *args)

    monkeypatch.setattr(SelfAttention, "forward", breaks)
    with pytest.raises(AssertionError, match="a bug of ours"):
        worker.serve([problem_ids(12)[11][:CHUNK]])  # one step, which ends the prompt
    admitted, *others = (message for message, _ in worker.sent)
    assert groups_of(admitted) == range(NUM_GROUPS)  # what was cached
    assert not others


def test_messages_in_any_order_and_number_pull_every_byte_once() -> None:
    """Early groups, lost ones, renewals that say everything again, and attempts that end."""
    for seed in range(200):
        rng = random.Random(seed)
        decode, num_tokens = DecodeSide(num_groups=4), rng.randrange(20, 200)
        source, num_pages = decode.source, decode.book.num_pages_for(num_tokens - 1)
        fetch = Fetch(decode.context, decode.request(num_tokens), [], 1)
        pulled: set[tuple[int, int]] = set()  # (page of the prompt, group), whole pages at first
        while not fetch.landed:
            if fetch.xfer is None or rng.random() < 0.05:
                whole = {(page, g) for page in range(fetch.num_landed_pages) for g in range(4)}
                assert whole <= pulled
                pulled = whole  # of the others nothing counts in a new attempt
                fetch.drain()
                fetch.begin(decode.link(PEER), "d", time.monotonic())
                fetch.advance(time.monotonic())
                assert not source.pulled, "pulled before the peer has announced anything"
            first, first_group = rng.randrange(num_pages), rng.randrange(4)
            end = rng.randint(first + 1, num_pages)
            pages = tuple(range(1 + first, 1 + end))
            num_groups = rng.randint(1, 4 - first_group)
            fetch.announced(KVReady(fetch.xfer, first, pages, first_group, num_groups, False))
            fetch.advance(time.monotonic())
            for local, remote, group in source.pulled:
                piece = number, _ = fetch.hold.pages.index(local), group
                assert remote == 1 + number, "its id at the peer"
                assert piece not in pulled
                pulled.add(piece)
            source.pulled.clear()
        assert pulled == {(page, group) for page in range(num_pages) for group in range(4)}
