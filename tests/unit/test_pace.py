"""Pace: step lengths and layer groups by measured times, the way ADR 0016 argues."""

import random
from dataclasses import replace

import pytest

from worker.prefill import step_times
from worker.run.base import BucketCheck
from worker.schedule.pace import AFTER_STORE, ANNOUNCE_S, Pace, StepTime

KV_BYTES = 147_456  # a token of the Qwen3-8B shape
NUM_LAYERS = 36
TIMES = [  # of one H200, f950304
    StepTime(256, 0.0076, 0.0080),
    StepTime(512, 0.0130, 0.0134),
    StepTime(1024, 0.0243, 0.0246),
    StepTime(2048, 0.0513, 0.0513),
]
NVLINK, RDMA_200G, TCP = 390e9, 25e9, 1.8e9


def pace(num_groups: int = 4, times: list[StepTime] = TIMES, max_tokens: int = 2048) -> Pace:
    return Pace(times, num_groups, KV_BYTES, max_tokens, NUM_LAYERS)


def total_s(known: Pace, step: StepTime, num_queued: int, rate: float) -> float:
    """The estimate, written out step by step."""
    lengths = [step.num_tokens] * (num_queued // step.num_tokens)
    lengths += [rest] if (rest := num_queued - sum(lengths)) else []
    steps_s = sum(min(t.whole_s for t in known.times if t.num_tokens >= n) for n in lengths)
    pull_s = lengths[-1] * KV_BYTES / rate if rate else 0.0
    in_groups = known.announce_groups(lengths[-1], rate)
    return steps_s + pull_s / (known.num_groups if in_groups else 1)


def test_the_step_is_the_one_after_which_decode_has_all_first() -> None:
    rng = random.Random(0)
    for _ in range(300):
        spent = sorted(n * rng.uniform(1, 3) for n in (64, 512, 1024, 2048))
        times = [StepTime(n, t, t) for n, t in zip((64, 512, 1024, 2048), spent, strict=True)]
        known, rate = pace(rng.choice([1, 2, 4]), times), rng.choice([0.0, 10 ** rng.uniform(3, 9)])
        num_queued = rng.randrange(1, 20_000)
        chosen = known.step_tokens(num_queued, rate)
        cost = {each.num_tokens: total_s(known, each, num_queued, rate) for each in times[1:]}
        assert cost[chosen] == pytest.approx(min(cost.values()))


def test_a_slower_link_never_asks_for_longer_steps() -> None:
    for num_queued in (100, 2000, 8000, 50_000):
        rates = (0.0, NVLINK, RDMA_200G, TCP)
        lengths = [pace().step_tokens(num_queued, rate) for rate in rates]
        assert lengths == sorted(lengths, reverse=True)


def test_without_measured_steps_they_are_as_long_as_they_may_be() -> None:
    assert pace(times=[], max_tokens=777).step_tokens(10_000, RDMA_200G) == 777
    assert pace(max_tokens=1500).step_tokens(10_000, 0.0) <= 1500


def test_groups_are_announced_where_the_pull_takes_long() -> None:
    assert pace().announce_groups(2048, RDMA_200G)
    assert pace().announce_groups(512, RDMA_200G)
    assert not pace().announce_groups(16, NVLINK)
    assert pace().announce_groups(2048, NVLINK)  # three fourths of 0.8 ms
    assert not pace(num_groups=1).announce_groups(2048, TCP)


def test_groups_must_save_more_than_the_pieces_cost() -> None:
    """Where a step is faster without breaks, announcing costs that and the messages."""
    rate = RDMA_200G
    early_s = AFTER_STORE * 0.0130 / NUM_LAYERS  # and a little, as steps in pieces are longer
    saved_s = 0.75 * 512 * KV_BYTES / rate + early_s
    for extra_s, pays in ((0.9 * saved_s, True), (1.1 * saved_s, False)):
        step = StepTime(512, 0.0130, 0.0130 + extra_s - 3 * ANNOUNCE_S)
        assert pace(times=[step]).announce_groups(512, rate) is pays
        assert pace(times=[step]).announce_groups(600, rate)  # beyond what has graphs


def test_step_times_are_those_of_the_fastest_way() -> None:
    checks = [
        BucketCheck("prefill", 512, True, 14.0, 13.5),
        BucketCheck("decode", 8, True, 4.0, 9.0),
        BucketCheck("prefill", 64, True, 6.0, 15.0),
        BucketCheck("prefill", 64, True, 5.0, 15.0, fixed_len=2048),
    ]
    assert step_times(checks) == [StepTime(64, 0.005, 0.006), StepTime(512, 0.0135, 0.0135)]


def test_what_lies_beside_the_target_s_kv_travels_last() -> None:
    """So less is hidden, and nothing is announced before the last layer has ended."""
    known = replace(pace(), beside=0.2)
    assert known.last_share == pytest.approx(0.4)
    assert pace().last_share == 0.25
    times = [StepTime(64, 0.0052, 0.0052), StepTime(128, 0.0120, 0.0120)]
    rate = 128 * KV_BYTES / (0.7 * 3 * ANNOUNCE_S)  # the pull takes 0.7 of the cost
    assert pace(times=times).announce_groups(128, rate)  # most of the last layer pays for it
    assert not replace(pace(times=times), beside=1e-4).announce_groups(128, rate)
    rate = 64 * KV_BYTES / (3 * ANNOUNCE_S / 0.7)  # 0.7 of the pull is what it costs
    assert pace(times=times).announce_groups(64, rate)
    assert not replace(pace(times=times), beside=0.2).announce_groups(64, rate)
