"""Client processes: one or more, all counting from the same moment of the same clock.

    parent                          child
      Orders ────────────────────────>  connect, warm up
             <──────────────────  ready
      origin ────────────────────────>  drive its share
             <─ outcomes, every 0.2 s
             <──────────────  lag, end

The parent draws the progress and keeps the outcomes, so the process that measures does little else.
"""

import asyncio
import contextlib
import gc
import multiprocessing
import signal
from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC, datetime
from multiprocessing.connection import Connection, wait
from typing import Any

import msgspec

from benchmarks.load.client import Client, Target
from benchmarks.load.drive import Driver, probe
from benchmarks.load.pacer import Pacer, now
from benchmarks.load.records import Lag, Outcome, Run, Session, Workload

HEADSTART_S = 0.3  # from the word to the origin
BATCH_S = 0.2
GC_THRESHOLD = 50_000  # a collection in the middle of a run is a lag of our own


class Orders(msgspec.Struct, frozen=True):
    """What one client process is to do."""

    process: int
    target: Target
    sessions: list[tuple[int, Session]]
    warmup: list[Session]
    concurrency: int | None  # None: open loop
    duration_s: float | None


class Report(msgspec.Struct):
    """What a client process says now and then."""

    outcomes: list[Outcome] = []
    num_running: int = 0
    lag: Lag | None = None  # with the last one


Watch = Callable[[Sequence[Outcome], int], None]  # new outcomes, requests under way


def run(
    workload: Workload,
    target: Target,
    *,
    warmup: Sequence[Session] = (),
    concurrency: int | None = None,
    duration_s: float | None = None,
    num_processes: int = 1,
    watch: Watch | None = None,
) -> Run:
    """Send `workload` and wait for all of it. Ctrl-C ends it early, with what there is by then.

    Raises RuntimeError if a client process dies.
    """
    numbered = list(enumerate(workload.sessions))
    context = multiprocessing.get_context("spawn")
    links: list[Connection] = []
    children = []
    try:
        for process in range(num_processes):
            part = slice(process, None, num_processes)
            slots = concurrency and len(range(concurrency)[part])
            orders = Orders(process, target, numbered[part], list(warmup[part]), slots, duration_s)
            here, there = context.Pipe()
            child = context.Process(target=_child, args=(there, msgspec.msgpack.encode(orders)))
            child.start()
            there.close()
            links.append(here)
            children.append(child)
        whole = _conduct(links, watch)
        starts = [each.start_s for each in workload.sessions if each.start_s is not None]
        whole.schedule = sorted(starts) if concurrency is None else []
        return whole
    finally:
        for link in links:
            link.close()
        for child in children:
            child.join(5)
            if child.is_alive():
                child.kill()


def _conduct(links: Sequence[Connection], watch: Watch | None) -> Run:
    for link in links:
        _receive(link)
    origin = now() + HEADSTART_S
    begun_at = datetime.now(UTC).isoformat(timespec="seconds")
    for link in links:
        link.send(origin)
    outcomes: list[Outcome] = []
    lags: list[Lag] = []
    running = dict.fromkeys(links, 0)
    while running:
        try:
            for link in wait(list(running), BATCH_S):
                assert isinstance(link, Connection)
                report = msgspec.msgpack.decode(_receive(link), type=Report)
                outcomes += report.outcomes
                running[link] = report.num_running
                if watch is not None:
                    watch(report.outcomes, sum(running.values()))
                if report.lag is not None:
                    lags.append(report.lag)
                    del running[link]
        except KeyboardInterrupt:
            for link in running:
                with contextlib.suppress(OSError):
                    link.send(None)
    outcomes.sort(key=lambda each: (each.intended_s, each.session, each.turn))
    first = min((each.intended_s for each in outcomes), default=0.0)
    last = max((each.end_s for each in outcomes), default=0.0)
    return Run(outcomes, lags, begun_at, last - first)


def _receive(link: Connection) -> bytes:
    try:
        return link.recv_bytes()
    except EOFError:
        raise RuntimeError("a client process died; see above") from None


def _child(link: Connection, raw: bytes) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent tells us
    orders = msgspec.msgpack.decode(raw, type=Orders)
    run_loop(lambda: _serve(link, orders))


def run_loop(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """`asyncio.run`, on uvloop where it is installed."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        from asyncio import new_event_loop
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main())


async def _serve(link: Connection, orders: Orders) -> None:
    """The whole life of a client process."""
    fresh: list[Outcome] = []
    lag = Lag(orders.process)
    client = Client(orders.target)
    with Pacer() as pacer:
        driver = Driver(orders.target, client, pacer, fresh.append)
        try:
            await driver.closed_loop([(0, each) for each in orders.warmup], 4, None)
            fresh.clear()
            gc.collect()
            gc.freeze()
            gc.set_threshold(GC_THRESHOLD)
            link.send_bytes(b"ready")
            client.origin = await asyncio.to_thread(link.recv)
            await pacer.until(client.origin)
            await _drive(link, orders, driver, pacer, lag, fresh)
        finally:
            await client.close()
    link.send_bytes(msgspec.msgpack.encode(Report(fresh, 0, lag)))


async def _drive(
    link: Connection, orders: Orders, driver: Driver, pacer: Pacer, lag: Lag, fresh: list[Outcome]
) -> None:
    """Drive its share, reporting on the way; ends early when the parent says so."""
    if orders.concurrency is None:
        work = driver.open_loop(orders.sessions)
    else:
        work = driver.closed_loop(orders.sessions, orders.concurrency, orders.duration_s)
    task, prober = asyncio.create_task(work), asyncio.create_task(probe(pacer, lag))
    while not task.done():
        await asyncio.wait([task], timeout=BATCH_S)
        report = Report(list(fresh), driver.num_running)
        fresh.clear()
        link.send_bytes(msgspec.msgpack.encode(report))
        if link.poll():
            task.cancel()
            break
    prober.cancel()
    await asyncio.gather(prober, return_exceptions=True)
    with contextlib.suppress(asyncio.CancelledError):
        await task
