"""Percentiles, rates and history of the last minutes, from counts; and parts of several routers."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from router.observe import board
from router.observe.board import History, Part, Rates, RouterRow, Spread, WorkerRow
from router.observe.metrics import TTFT_BUCKETS
from router.observe.tally import Tallies
from router.show.period import HOUR_STEP_S, NUM_STEPS, RATE_S, STEP_S, Period, Reading

NOBODY = "No decode worker answers: requests wait, then fail"
NOBODY_NEW = "No decode worker takes requests: new ones wait, then fail"
NOTHING = Spread((1.0, 2.0), (0, 0, 0))
ZERO = Reading(0, 0, {}, 0.0, 0.0, 0.0, {}, 0.0, {"end_to_end": NOTHING}, at=0.0)


def spread_of(values: list[float]) -> Spread:
    """As the router's own histogram counts them."""
    tally = Tallies("x", "x", (), TTFT_BUCKETS, CollectorRegistry()).labels()
    for value in values:
        tally.observe(value)
    return tally.spread()


def part(name: str, **more: object) -> Part:
    whole = Part(name, False, 0, 0, 1.0, {}, 0, 0, {}, 0, Rates(), {}, History(), History())
    return Part(**{each: getattr(whole, each) for each in whole.__struct_fields__} | more)


@pytest.mark.parametrize(
    ("counts", "q", "expected"),
    [
        ((4, 0, 0), 0.5, 0.5),  # linear from 0
        ((0, 4, 0), 0.25, 1.25),
        ((2, 2, 0), 0.5, 1.0),
        ((2, 2, 0), 0.75, 1.5),
        ((1, 0, 3), 0.9, 2.0),  # beyond all bounds: the last one, as Prometheus says
        ((0, 0, 0), 0.5, None),
    ],
)
def test_quantiles_are_those_of_histogram_quantile(
    counts: tuple[int, ...], q: float, expected: float | None
) -> None:
    assert Spread((1.0, 2.0), counts).quantile(q) == expected


def test_a_window_forgets_what_is_older_and_keeps_a_bounded_number() -> None:
    at = iter(range(10_000))

    def read() -> Reading:
        step = next(at)
        return replace(
            ZERO,
            at=STEP_S * step,
            running=step,
            outcomes={"stop": 3.0 * step, "busy": 1.0 if step else 0.0},
            output_tokens=20.0 * step,
            latencies={"end_to_end": Spread((1.0, 2.0), (step, 0, 1))},
        )

    period = Period(read)
    for _ in range(NUM_STEPS + 50):
        period.sample()
    found = period.part("router-0", draining=True)
    assert found.window_s == STEP_S * (NUM_STEPS + 1)
    assert found.outcomes == {"stop": 3 * (NUM_STEPS + 1)}, "busy was before"
    assert found.latencies["end_to_end"].counts == (NUM_STEPS + 1, 0, 0)
    assert found.rates == Rates(3 / STEP_S, 0.0, 20 / STEP_S)
    assert found.history.output_tokens == (20 / STEP_S,) * NUM_STEPS
    assert found.history.running[-1] == NUM_STEPS + 49
    every = int(HOUR_STEP_S / STEP_S)
    assert found.hour.running == tuple(range(every, NUM_STEPS + 50, every))
    assert set(found.hour.output_tokens) == {20 / STEP_S}
    assert (found.running, found.draining) == (NUM_STEPS + 50, True)


def test_rates_are_those_of_the_last_seconds() -> None:
    readings = [replace(ZERO, at=float(s), output_tokens=100.0 * max(0, s - 40)) for s in range(51)]
    period = Period(iter(readings).__next__)
    for _ in range(50):
        period.sample()
    assert RATE_S == 10
    assert period.part("r", draining=False).rates.output_tokens == 100.0


def test_a_router_that_has_just_started_has_no_rates() -> None:
    found = Period(lambda: replace(ZERO, output_tokens=5.0)).part("r", draining=False)
    assert (found.rates, found.history, found.window_s) == (Rates(), History(), 0.0)


def test_parts_of_several_routers_are_one_cluster() -> None:
    fast, slow = [0.01] * 99, [3.0]
    parts = [
        part(
            "router-0",
            outcomes={"stop": 2, "busy": 5},
            rates=Rates(1.0, 2.0, 3.0),
            latencies={"end_to_end": spread_of(fast), "new": spread_of(fast)},
            history=History((1.0, 2.0, 3.0), (1.0, 1.0, 1.0), (0.0, 0.0, 0.0)),
        ),
        part(
            "router-1",
            outcomes={"stop": 4},
            rates=Rates(0.5, 0.0, 1.0),
            latencies={"end_to_end": spread_of(slow)},
            history=History((10.0,), (4.0,), (2.0,)),
        ),
        part("router-2", latencies={"end_to_end": Spread((1.0,), (1000, 0))}),
    ]
    spreads = board.spreads(parts)
    together = board.latencies(spreads)["end_to_end"]
    assert together.count == 100, "other buckets cannot be added"
    assert spreads["new"].total == 99, "the others do not have it"
    assert spreads["end_to_end"].seconds == pytest.approx(sum(fast + slow))
    assert together.p50 == spread_of([*fast, *slow]).quantile(0.5)
    assert together.p99 == pytest.approx(0.01)
    outcomes = board.counted(each.outcomes for each in parts)
    assert list(outcomes.items()) == [("stop", 6), ("busy", 5)]
    assert board.rates(parts) == Rates(1.5, 2.0, 4.0)
    assert board.history([each.history for each in parts]) == History(
        (1.0, 2.0, 13.0), (1.0, 1.0, 5.0), (0.0, 0.0, 2.0)
    )


GONE = {f"prefill-{i}": "lost" for i in range(6)}
FOUR = ", ".join(f"prefill-{i} is lost" for i in range(4))


@pytest.mark.parametrize(
    ("states", "verdict"),
    [
        ({"decode-0": "ready", "prefill-0": "ready"}, ("good", "All 2 workers answer")),
        ({"decode-0": "ready", "prefill-0": "draining"}, ("warn", "prefill-0 is draining")),
        ({"decode-0": "ready", "prefill-0": "lost"}, ("bad", "prefill-0 is lost")),
        ({"decode-0": "silent", "prefill-0": "ready"}, ("bad", f"{NOBODY} (decode-0 is silent)")),
        ({"decode-0": "draining"}, ("bad", f"{NOBODY_NEW} (decode-0 is draining)")),
        ({"decode-0": "ready", "router-1": "silent"}, ("bad", "router-1 is silent")),
        ({"decode-0": "ready"} | GONE, ("bad", f"{FOUR}, and 2 more")),
        ({"decode-0": "ready"} | dict(list(GONE.items())[:4]), ("bad", FOUR)),
        ({"decode-0": "ready", "router-0": "draining"},
         ("bad", "No router takes requests (router-0 is draining)")),
        ({}, ("wait", "Starting: no worker is known yet")),
        ({"decode-0": "starting", "prefill-0": "ready"},
         ("wait", "Starting: requests wait until decode-0 is ready")),
        ({"decode-0": "ready", "prefill-0": "starting"}, ("warn", "prefill-0 is starting")),
        ({"decode-0": "starting", "decode-1": "ready"}, ("warn", "decode-0 is starting")),
    ],
)  # fmt: skip
def test_the_worst_is_said_in_a_sentence(states: dict[str, str], verdict: tuple[str, str]) -> None:
    rows: list[Any] = []
    for name, state in ({"router-0": "ready"} | states).items():
        role: Any = name.partition("-")[0]
        make = RouterRow if role == "router" else partial(WorkerRow, role=role)
        more = {"progress": "loading 42% after 7 s"} if state == "starting" else {}
        rows.append(make(name=name, state=state, **more))
    workers = [row for row in rows if isinstance(row, WorkerRow)]
    routers = [row for row in rows if isinstance(row, RouterRow)]
    assert board.verdict(workers, routers) == verdict
