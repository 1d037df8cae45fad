"""States of recurrent layers on the host: their slots, their layout, and how they are pulled."""

import time

import pytest

from tests.support.pulls import OK, PAGE_SIZE, RUNNING, DecodeSide, ScriptedSource
from worker.api import KVReady, Prefill, Xfer
from worker.cache.book import PageBook
from worker.cache.layout import KVRegion, ModelLayout, StateRegion
from worker.config import EngineConfig, LeaseConfig
from worker.keyring import Refusals
from worker.observe.metrics import WorkerMetrics
from worker.schedule.asked import PromptLimits
from worker.schedule.pace import Pace
from worker.schedule.prefill import PrefillScheduler
from worker.transfer.fetch import Fetch
from worker.transfer.layout import RankPair, rank_plan
from worker.transfer.outbound import Outbound

TARGET = KVRegion("target", 2, 2, 16, 2, PAGE_SIZE, "float32")
STATE = StateRegion(3, 4, 2, 16, 32, "float32")
LAYOUT = ModelLayout((TARGET,), STATE)
LIMITS = PromptLimits(512, grain=64)


def test_a_slot_is_not_handed_out_before_steps_that_may_write_it_have_settled() -> None:
    book = PageBook(16, PAGE_SIZE, num_slots=3)
    first, second = (book.open([1, 2], 2, max_matched=0) for _ in range(2))
    assert first is not None
    assert second is not None
    assert {first.slot, second.slot} == {1, 2}
    assert book.open([1, 2], 2, max_matched=0) is None
    freed = first.slot
    book.launched(1)
    book.close(first)
    assert first.slot == 0
    assert book.open([1, 2], 2, max_matched=0) is None, "step 1 may still write it"
    assert book.num_holds == 1
    book.settled(1)
    again = book.open([1, 2], 2, max_matched=0)
    assert again is not None
    assert again.slot == freed


def test_the_state_is_part_of_the_layout() -> None:
    digests = {
        ModelLayout((TARGET,), state).identity("m", "d").layout_hash
        for state in (None, STATE, StateRegion(3, 4, 2, 32, 16, "float32"))
    }
    assert len(digests) == 3
    share = LAYOUT.share(2, 1)
    assert share.state is not None
    assert share.state.key_heads == 2
    assert STATE.slot_bytes == 4 * 3 * (2 * 16 * 32 * 4 + 3 * (2 * 16 + 2 * 32) * 4)


@pytest.mark.parametrize(("local_tp", "remote_tp"), [(1, 1), (1, 2), (2, 1), (2, 4), (4, 2)])
def test_ranks_pull_the_bytes_of_their_key_heads(local_tp: int, remote_tp: int) -> None:
    """Every byte of a slot once, from where the same heads lie."""
    whole = bytes(range(4))  # a byte for each key head
    for rank in range(local_tp):
        here = LAYOUT.share(local_tp, rank)
        assert here.state is not None
        slot = [-1] * here.state.key_heads
        plan = rank_plan([2, STATE.key_heads], local_tp, rank, remote_tp)
        for remote_rank, heads in plan.items():
            there = LAYOUT.share(remote_tp, remote_rank)
            assert there.state is not None
            for run in RankPair(here, there, 9, 9, heads).state_runs([(5, 7)]):
                size = STATE.head_bytes
                assert run.region == 1
                first = run.local_offset // size - 5 * here.state.key_heads
                source = run.remote_offset // size - 7 * there.state.key_heads
                for i in range(run.num_bytes // size):
                    owned = remote_rank * there.state.key_heads + source + i
                    assert slot[first + i] == -1
                    slot[first + i] = whole[owned]
        assert slot == list(whole[rank * len(slot) : (rank + 1) * len(slot)])


def test_each_attempt_pulls_the_state_of_its_own_source() -> None:
    """Pages stay from attempt to attempt; the state comes from who computed the rest."""
    decode = DecodeSide(source=ScriptedSource(RUNNING), num_slots=4)
    req = decode.request(40)
    assert req.hold is not None
    decode.start(req, ["p/1", "q/1"])

    def tell(state_slot: int, *, last: bool) -> list[Fetch]:
        ready = KVReady(decode.asked.xfer, 0, (4, 5, 6), 0, 1, last, state_slot=state_slot)
        decode.hears(ready)
        return decode.inbound.poll(time.monotonic())

    assert not tell(3, last=True)
    pages, state = decode.source.pulls
    assert decode.source.states == [(req.hold.slot, 3)]
    state.state = OK
    assert not decode.inbound.poll(time.monotonic()), "its pages are not here"
    decode.inbound.on_lost("p/1")
    pages.fail("lost")
    decode.source.state = OK
    assert not decode.inbound.poll(time.monotonic())
    assert decode.asked.xfer.attempt == 2
    assert not tell(0, last=False), "all pages are here, its state is not"
    (ended,) = tell(2, last=True)
    assert ended.landed
    assert decode.source.states == [(req.hold.slot, 3), (req.hold.slot, 2)]
    assert req.num_computed_tokens == 39


def test_pages_without_their_state_are_computed_anew() -> None:
    decode = DecodeSide(num_slots=4)
    req = decode.request(40)
    decode.start(req, ["p/1"])
    decode.hears(KVReady(decode.asked.xfer, 0, (4, 5), 0, 1, False))
    decode.inbound.poll(time.monotonic())
    decode.inbound.on_lost("p/1")
    (fetch,) = decode.inbound.poll(time.monotonic())
    assert not fetch.landed
    assert fetch.num_landed_pages == 2
    assert req.num_computed_tokens == 0
    assert decode.source.state is OK


def test_with_all_pages_here_another_worker_is_asked_for_the_state() -> None:
    decode = DecodeSide(source=ScriptedSource(OK), num_slots=4)
    req = decode.request(40)
    decode.start(req, ["p/1", "q/1"])
    decode.hears(KVReady(decode.asked.xfer, 0, (4, 5, 6), 0, 1, False))
    decode.inbound.poll(time.monotonic())
    decode.inbound.on_lost("p/1")
    assert not decode.inbound.poll(time.monotonic())
    assert (decode.asked.xfer.attempt, decode.asked.num_matched) == (2, 39)
    sent, outbound, scheduler = outbound_of_states()
    outbound.on_prefill("decode/d", Prefill(Xfer("x", 1, "d", "p"), tuple(range(40)), 39), 0.0)
    plan = scheduler.plan()
    assert plan is not None
    outbound.announce_settled(scheduler.settle(plan.step, []), 0.0)
    assert [(m.last, m.state_slot) for m in sent] == [(False, 0), (True, 1)]


def outbound_of_states() -> tuple[list[KVReady], Outbound, PrefillScheduler]:
    sent: list[KVReady] = []
    book = PageBook(64, PAGE_SIZE, num_slots=4)
    pace = Pace([], 2, 1, 128, 2, 0.5)
    scheduler = PrefillScheduler(book, EngineConfig(max_num_reqs=4), LIMITS, pace)
    metrics = WorkerMetrics(model="m", role="prefill", worker="w")
    outbound = Outbound(
        "p", scheduler, 2, lambda _, message: sent.append(message),  # type: ignore[arg-type]
        LeaseConfig(), metrics, Refusals(),
    )  # fmt: skip
    return sent, outbound, scheduler


def test_a_state_is_announced_once_its_last_step_has_settled() -> None:
    """Layer groups of the last step are announced while it computes, and the state is not."""
    sent, outbound, scheduler = outbound_of_states()
    tokens = tuple(range(100))
    outbound.on_prefill("decode/d", Prefill(Xfer("x", 1, "d", "p"), tokens, 0, 0.0, None, 100), 0.0)
    plan = scheduler.plan()
    assert plan is not None
    chunks = scheduler.launched[plan.step]
    outbound.announce_groups(chunks, 1, 0.0)
    outbound.announce_groups(chunks, 2, 0.0)
    assert [len(message.pages) for message in sent[1:]] == [7, 7]
    assert not any(message.last or message.state_slot for message in sent)
    outbound.announce_settled(scheduler.settle(plan.step, []), 0.0)
    assert (sent[-1].last, sent[-1].state_slot) == (True, 1)


def test_chunks_end_on_the_grid_of_blocks_or_with_their_prompt() -> None:
    book = PageBook(640, PAGE_SIZE, num_slots=9)
    pace = Pace([], 1, 1, 150, 2, 0.5)
    scheduler = PrefillScheduler(book, EngineConfig(max_num_reqs=8), LIMITS, pace)
    lengths, done = (200, 64, 65, 10, 300), dict[int, int]()
    for i, length in enumerate(lengths):
        tokens = tuple(range(length))
        assert scheduler.admit(Prefill(Xfer(str(i), 1, "d", "p"), tokens, 0, 0.0, None, length))
    while (plan := scheduler.plan()) is not None:
        assert 0 < sum(len(chunk.tokens) for chunk in plan.chunks) <= 150
        for chunk in plan.chunks:
            slot = chunk.state_slot
            assert chunk.start % 64 == 0
            assert chunk.start == done.get(slot, 0)
            done[slot] = chunk.start + len(chunk.tokens)
        scheduler.settle(plan.step, [])
    assert sorted(done.values()) == sorted(length - 1 for length in lengths)


def test_a_slot_outlives_the_row_that_filled_it() -> None:
    """The row is another request's from the next step on; the state is pulled later."""
    book = PageBook(64, PAGE_SIZE, num_slots=2)
    pace = Pace([], 1, 1, 128, 2, 0.5)
    scheduler = PrefillScheduler(book, EngineConfig(max_num_reqs=1), LIMITS, pace)
    asked = Prefill(Xfer("x", 1, "d", "p"), tuple(range(70)), 0, 0.0, None, 70)
    req = scheduler.admit(asked)
    assert req is not None
    plan = scheduler.plan()
    assert plan is not None
    assert req.row == 0
    scheduler.settle(plan.step, [])
    assert (req.hold.slot, book.num_free_slots) == (1, 0)
    scheduler.drop(req)
    assert (req.hold.slot, book.num_free_slots) == (0, 1)
