"""When steps are launched and settled: late enough for arrivals, early enough for the device."""

from dataclasses import dataclass, field
from itertools import pairwise
from threading import Event
from typing import Any

import pytest

from worker.observe.meter import StepMeter
from worker.observe.metrics import WorkerMetrics
from worker.plan import Chunk, Plan
from worker.run import flight as module
from worker.run.flight import POLL_S, SLACK_S, Flight, MaskedStep
from worker.run.stream import CpuStream

STEP_S, LAUNCH_S = 0.007, 0.0008


class Clock:
    """The only time there is."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@dataclass
class Step:
    """A step on a device that runs one after the other."""

    plan: Plan
    clock: Clock
    starts_at: float
    took_s: float
    path: str = "graph"
    groups: object = None
    is_told: bool = False  # as of the CPU: its end wakes the loop
    wakes: bool = False

    @property
    def ends_at(self) -> float:
        return self.starts_at + self.took_s

    def done(self) -> bool:
        return self.clock.now >= self.ends_at

    def tells(self, wake: object) -> bool:
        self.wakes = self.is_told
        return self.is_told


@dataclass
class Device:
    """A loop without requests: what its Flight launched and settled, and when."""

    clock: Clock
    chunks: bool = False
    took_s: float = STEP_S
    limit: int = 1_000_000
    is_told: bool = False
    groups: object = None
    launched: list[Step] = field(default_factory=list)
    settled_at: list[float] = field(default_factory=list)
    launched_at: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        metrics = WorkerMetrics(model="m", role="decode", worker="w")
        self.meter = StepMeter(metrics)
        self.flight = Flight(self.meter, wake=lambda: None)

    def turn(self, num_arriving: int) -> float | None:
        """Of a loop, as both roles have it."""
        if self.flight.launch_due(num_arriving) and len(self.launched) < self.limit:
            step: Any = self.launch()
            self.flight.launched(step, LAUNCH_S)
        ended: Any = self.flight.take_ended()
        if ended is not None:
            self.settle(ended)
        return self.flight.idle_s(num_arriving)

    def launch(self) -> Step:
        self.launched_at.append(self.clock.now)
        free_at = self.launched[-1].ends_at if self.launched else 0.0
        self.clock.now += LAUNCH_S
        number = len(self.launched) + 1
        chunks = (Chunk(1, 0, (1, 2), True),) if self.chunks else ()
        plan = Plan(number, chunks=chunks, decode=() if chunks else (1,))
        starts_at = max(free_at, self.clock.now)
        step = Step(plan, self.clock, starts_at, self.took_s, "graph", self.groups, self.is_told)
        self.launched.append(step)
        self.meter.launched(plan)
        return self.launched[-1]

    def settle(self, step: Step) -> None:
        self.clock.now = max(self.clock.now, step.ends_at)
        self.meter.settled(step.plan, step.path)
        self.settled_at.append(self.clock.now)

    def run(self, seconds: float, num_arriving: int) -> list[float]:
        """Turns, each after the wait that the last one asked for; when they were."""
        turns, until = [], self.clock.now + seconds
        while self.clock.now < until:
            turns.append(self.clock.now)
            wait_s = self.turn(num_arriving)
            if wait_s is None:
                break
            ends = [step.ends_at for step in self.launched if step.wakes and not step.done()]
            self.clock.now = min([self.clock.now + wait_s, *ends])
            self.clock.now += 5e-5  # a timed wait is late by so much
        return turns

    @property
    def idle_s(self) -> float:
        return sum(b.starts_at - a.ends_at for a, b in pairwise(self.launched))

    @property
    def late_s(self) -> list[float]:
        """By how much each step was settled after its end."""
        pairs = zip(self.launched, self.settled_at, strict=False)
        return [at - step.ends_at for step, at in pairs]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr("worker.observe.meter.time", clock)
    return Device(clock)


def test_with_arrivals_the_launch_is_late_and_the_device_never_waits(device: Device) -> None:
    device.run(0.5, num_arriving=1)
    assert device.idle_s == 0.0
    # What came until then is in the very next step.
    late = [
        step.ends_at - at
        for step, at in zip(device.launched[4:], device.launched_at[5:], strict=False)
    ]
    assert max(late) <= LAUNCH_S + SLACK_S + POLL_S
    assert min(late) >= LAUNCH_S
    assert max(device.late_s) <= POLL_S + 1e-4, "a settled step is seen within a poll"


def test_without_arrivals_the_launch_is_at_once(device: Device) -> None:
    device.run(0.5, num_arriving=0)
    assert device.idle_s == 0.0
    pairs = zip(device.settled_at, device.launched_at[2:], strict=False)
    assert all(at - settled < 1e-4 for settled, at in list(pairs)[2:])


@pytest.mark.parametrize("num_arriving", [0, 1])
@pytest.mark.parametrize("chunks", [False, True])
def test_messages_are_read_while_a_step_computes(device: Device, num_arriving, chunks) -> None:
    """A turn at least every POLL_S, but for launches; also where steps take longer than before."""
    device.chunks = chunks
    device.run(0.1, num_arriving)  # measured now
    turns = device.run(0.2, num_arriving)
    device.took_s = 2.5 * STEP_S
    turns += device.run(0.2, num_arriving)
    gaps = [b - a for a, b in pairwise(turns)]
    assert max(gaps) <= POLL_S + 2 * LAUNCH_S


def test_a_step_that_tells_its_end_is_not_asked_for_it(device: Device) -> None:
    device.is_told = True
    turns = device.run(0.5, num_arriving=0)
    assert device.idle_s == 0.0
    assert len(device.settled_at) > 50
    assert len(turns) < 3 * len(device.settled_at), "it looks again and again"
    assert max(device.late_s) <= 1e-4


def test_with_arrivals_chunks_are_launched_late_where_their_time_is_known(device: Device) -> None:
    """A prefill worker's: it learns how long their launches take, too."""
    device.chunks = True
    device.run(0.2, num_arriving=1)
    assert all(ends > at + STEP_S / 2 for ends, at in ends_and_launches(device)), "not known"
    device.meter.chunks_s = lambda plan: 0.95 * STEP_S
    idle_s = device.idle_s
    device.run(0.5, num_arriving=1)
    assert device.idle_s - idle_s < LAUNCH_S, "of the first one alone"
    waits = [ends - at for ends, at in ends_and_launches(device)[-20:]]
    assert max(waits) < 0.05 * STEP_S + LAUNCH_S + SLACK_S + POLL_S
    device.run(0.2, num_arriving=0)
    assert all(ends > at + STEP_S / 2 for ends, at in ends_and_launches(device)[-20:])


def ends_and_launches(device: Device) -> list[tuple[float, float]]:
    """When a step ended, and when the one behind it was launched, without the first ones."""
    pairs = zip(device.launched[4:], device.launched_at[5:], strict=False)
    return [(step.ends_at, at) for step, at in pairs]


def test_the_tail_of_a_masked_step_is_due_until_it_is_launched(device: Device) -> None:
    flight, plan = device.flight, Plan(1, decode=(1,), masked=True)
    flight.waits = False
    masked = MaskedStep(plan, None)
    flight.launched(masked, LAUNCH_S)
    assert flight.tail_due is None, "the step before may run still"
    assert flight.take_ended() is None
    assert flight.tail_due is masked
    with pytest.raises(AssertionError, match="tail"):
        flight.take_ended()
    whole: Any = Step(plan, device.clock, 0.0, STEP_S)
    flight.tail_launched(whole)
    assert flight.tail_due is None
    assert flight.take_ended() is whole
    assert not flight.busy


def test_work_of_the_cpu_tells_its_end_once() -> None:
    stream, told, may_end = CpuStream(), [], Event()
    end = stream.submit(lambda: may_end.wait() and None)
    assert end.tells(lambda: told.append(end))
    assert end.tells(lambda: told.append(end))
    assert not told
    may_end.set()
    stream.close()
    assert told == [end]


def test_work_behind_a_failure_fails_in_the_same_way() -> None:
    stream, ran = CpuStream(), list[int]()
    failed = stream.submit(lambda: ran.append(1 // 0))
    behind = stream.submit(lambda: ran.append(1))
    for handle in (failed, behind):
        with pytest.raises(ZeroDivisionError):
            handle.wait()
    stream.close()
    assert not ran
