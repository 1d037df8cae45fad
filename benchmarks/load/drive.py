"""Sending a workload from one process: open loop by its schedule, or closed loop by free slots.

A session's task sends its turns one after the other. In an open loop a session begins at its own
time, whatever became of the others; when the server or this process is late, the time from which a
request is counted stays the one at which it was due (no coordinated omission).
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from benchmarks.load.client import Client, Conversation, Target
from benchmarks.load.pacer import Pacer, now
from benchmarks.load.records import Lag, Outcome, Session

PROBE_S = 0.1  # often enough to see a lag, seldom enough not to disturb a server beside us
LEAD_S = 0.02  # a session is made ready so long before it is due

Numbered = tuple[int, Session]  # a session and its index in the whole workload


class Driver:
    """Sends sessions; every outcome goes to `emit` when it is complete."""

    def __init__(
        self, target: Target, client: Client, pacer: Pacer, emit: Callable[[Outcome], None]
    ) -> None:
        self.num_running, self._run = 0, f"{time.time_ns():x}-"
        self._target = target
        self._client = client
        self._pacer = pacer
        self._emit = emit

    async def open_loop(self, sessions: Sequence[Numbered]) -> None:
        """Begin every session at its start_s after the client's origin."""
        tasks: set[asyncio.Task[None]] = set()
        try:
            for index, session in sorted(sessions, key=lambda each: each[1].start_s or 0.0):
                due_s = session.start_s or 0.0
                await self._pacer.until(self._client.origin + due_s - LEAD_S)
                task = asyncio.create_task(self._session(index, session, due_s))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            if tasks:
                await asyncio.wait(tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def closed_loop(
        self, sessions: Sequence[Numbered], concurrency: int, duration_s: float | None
    ) -> None:
        """Keep `concurrency` sessions running until all are done, or none begins any more."""
        waiting = iter(sessions)
        async with asyncio.TaskGroup() as slots:
            for _ in range(concurrency):
                slots.create_task(self._slot(waiting, duration_s))

    async def _slot(self, waiting: Iterator[Numbered], duration_s: float | None) -> None:
        for index, session in waiting:
            free_s = now() - self._client.origin
            if duration_s is not None and free_s >= duration_s:
                return
            await self._session(index, session, free_s)

    async def _session(self, index: int, session: Session, begin_s: float) -> None:
        talk, ended_s = Conversation(self._target.endpoint), begin_s
        name = self._run + str(index) if self._target.session_header else ""
        broken = False
        for number, turn in enumerate(session.turns):
            intended_s = ended_s + turn.think_s
            outcome = Outcome(index, number, intended_s)
            if broken:  # what it would have said is unknown
                outcome.error = "session_broken"
                outcome.sent_s = outcome.end_s = intended_s
                self._emit(outcome)
                continue
            raw = msgspec.json.encode(talk.body(turn, self._target))
            await self._pacer.until(self._client.origin + intended_s)
            self.num_running += 1
            try:
                talk.heard(await self._client.ask(outcome, raw, name))
            finally:
                self.num_running -= 1
            self._emit(outcome)
            ended_s, broken = outcome.end_s, bool(outcome.error)


async def probe(pacer: Pacer, lag: Lag) -> None:
    """Write down how late a timer is that fires all the time, until cancelled."""
    began, cpu = now(), time.process_time()
    try:
        while True:
            due = now() + PROBE_S
            await pacer.until(due)
            lag.loop_s.append(now() - due)
    finally:
        lag.cpu_s, lag.wall_s = time.process_time() - cpu, now() - began
